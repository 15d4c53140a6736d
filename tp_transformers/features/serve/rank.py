"""Rank of `tp-transformers serve`: rank 0 runs transformers' server, the others decode the same batches.

All ranks decode in step by transformers' continuous batching. Rank 0 sends its requests to the other ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager

from ...commands import import_files
from ...errors import MeshError, RemoteRankError, TensorParallelError, UsageError
from ...loading.hook import enable
from ...patches import replace
from ..command_line.arguments import add_plan, parse_dtype
from ..command_line.models import read_config
from ..run.errors import FOLDER, keep_errors
from ..run.launch import AGAIN, end_with_parent
from ..watch.calls import WATCH
from ..watch.watch import BUSY
from .batches import start_batches
from .command import STOP, add_own
from .ports import bound
from .requests import Answers

WITHOUT_EFFECT = {
    "compile": (False, "Leave it out: batches are not compiled."),
    "device": ("auto", "Leave it out; CUDA_VISIBLE_DEVICES says which devices the ranks use."),
    "quantization": (None, "Serve a quantised checkpoint, with --packed."),
}
"""Options of transformers' server for the model that it would load: name -> (default, what to do instead)."""


def read_options(name: str, options: Sequence[str]) -> Any:
    """Parse the options of `transformers serve` into a typer context.

    Raises UsageError for an unknown option, and for one that would have no effect.
    """
    import typer  # a dependency of transformers, for its command line

    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    try:
        context = typer.main.get_command(app).make_context("serve", [name, "--continuous-batching", *options])
    except Exception as error:
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        fix = "See `transformers serve --help`."
        raise UsageError(
            "options of the server", got=format_message(), expected="those of transformers", fix=fix
        ) from None
    for option, (default, fix) in WITHOUT_EFFECT.items():
        if (value := context.params[option]) != default:
            raise UsageError(f"--{option}", got=str(value), expected="an option with an effect", fix=fix)
    return context


def serve(answers: Answers, name: str, context: Any, sockets: list[socket.socket], drain: float) -> None:
    """Run transformers' server on `sockets` until a signal, and up to `drain` seconds more for its requests.

    `context` is the typer context with the options of the server. An error of a batch ends the server, too.
    """
    server: Any = import_module("uvicorn").Server
    model, manager = answers.model, answers.manager
    leave_out_tracebacks(manager)
    answers.begin()

    def end_requests() -> None:
        """Answer all requests with an error, and end the batches of all ranks."""
        manager.background_thread_status.request_stop(manager.background_thread_status.HARD_STOP, 0)

    def end_with_batches(server: Any) -> None:
        manager._generation_thread.join()
        server.should_exit = True

    def run(original: Any, self: Any) -> None:
        threading.Thread(target=end_with_batches, args=(self,), daemon=True).start()
        for listener in sockets:
            listener.listen()  # whoever connects from now on is answered
        host, port = sockets[0].getsockname()[:2]
        line = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1/chat/completions answers for model {name!r}"
        print(f"tp-transformers serve: {line}", file=sys.stderr, flush=True)
        original(self, sockets=sockets)

    async def shut_down(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        left = time_left(manager, drain)
        if count := len(self.server_state.tasks):
            line = f"{count} request{'s' * (count > 1)} may take {left or STOP:g} s more; new ones are refused"
            print(f"tp-transformers serve: {line}", file=sys.stderr, flush=True)
        self.config.timeout_graceful_shutdown = int(left + STOP)
        asyncio.get_running_loop().call_later(left, end_requests)
        await original(self, *args, **kwargs)

    def hear(original: Any, self: Any, *args: Any) -> None:
        heard.append(time.monotonic())
        if heard[-1] - heard[0] > AGAIN:
            end_requests()
        original(self, *args)

    heard: list[float] = []
    served = {"id": name, "object": "model", "created": int(time.time()), "owned_by": name.rpartition("/")[0]}
    replace(ModelManager, "_load_model", lambda original, self, *args, **kwargs: model)
    if hasattr(ModelManager, "get_gen_models"):  # up to transformers 5.23, it lists the models in the Hub's cache
        replace(ModelManager, "get_gen_models", lambda original, *args, **kwargs: [served])
    replace(server, "run", run)
    replace(server, "shutdown", shut_down)
    replace(server, "handle_exit", hear)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn raises the signal again when it has ended
    try:
        with suppress(SystemExit), context:
            context.command.invoke(context)
    finally:
        manager.stop(timeout=STOP, hard_stop=True)  # this also ends the other ranks


def time_left(manager: Any, drain: float) -> float:
    """Seconds for requests once the server ends: `drain`, or 0 after an error of a batch, when none is answered."""
    return drain if manager.background_thread_status.fatal_error is None else 0


def follow(model: Any, context: Any, silence: float) -> None:
    """Decode the requests of rank 0's server until rank 0 ends. Raises the error of a batch."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 stops all ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    manager, _ = start_batches(model, context.params, silence)
    leave_out_tracebacks(manager)
    manager._generation_thread.join()
    raise_error(model, manager, silence)


def leave_out_tracebacks(manager: Any) -> None:
    """Let the thread of the batches print no error, unless with `--verbose`: `raise_error` raises the error."""
    if FOLDER in os.environ:
        logging.getLogger("ContinuousBatchingLogger").addFilter(lambda record: not record.exc_info)
        thread, hook = manager._generation_thread, threading.excepthook
        threading.excepthook = lambda failed: None if failed.thread is thread else hook(failed)


def raise_error(model: Any, manager: Any, silence: float) -> None:
    """Raise the error that ended the batches of this rank, if one did: MeshError if another rank is silent."""
    error, watching = manager.background_thread_status.fatal_error, WATCH.find(model)
    if error is None:
        return
    try:
        with watching or nullcontext():
            raise error
    except RemoteRankError as remote:
        failure = watching.failure if watching is not None else None
        if failure is None or not failure.is_lost:
            raise
        got = f"no sign of life of rank {failure.rank}"
        fix = f"It was killed; or paused or swapped out for {silence:g} s: then give --watch more seconds."
        raise MeshError("a batch", got=got, expected="an answer", fix=fix) from remote


class Rank:
    """What a rank serves, and how."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Read the `arguments`: of `add_plan`, of `add_own`, `--`, the model, the options of the server.

        Files of `--import` are imported, nothing is loaded. Raises UsageError for options or a model that cannot be
        served.
        """
        divider = list(arguments).index("--")
        self.name, *options = arguments[divider + 1 :]
        parser = argparse.ArgumentParser()
        add_plan(parser)
        add_own(parser)
        self.own = parser.parse_args(arguments[:divider])
        self.context = read_options(self.name, options)
        self.silence = BUSY * self.own.watch
        """Seconds that ranks wait for one another between two steps."""
        # This raises errors with the messages of this package.
        read_config(self.name, trust_remote_code=self.context.params["trust_remote_code"])
        import_files(self.own.imports)
        enable()

    def bound(self) -> list[socket.socket]:
        """Sockets of the server. Raises UsageError if the port is in use."""
        return bound(self.context.params["host"], self.context.params["port"])

    def load(self, **where: Any) -> Any:
        """Load the model, with further arguments of `from_pretrained`. Collective."""
        own = self.own
        given = {option: self.context.params[option] for option in ("trust_remote_code", "attn_implementation")}
        given |= where | {"dtype": parse_dtype(own.dtype)} | ({"tp_dequantize": False} if own.packed else {})
        return AutoModelForCausalLM.from_pretrained(self.name, tp_plan=own.plan, tp_watch=own.watch, **given)


def main(arguments: Sequence[str]) -> None:
    """Run one rank; `arguments`: see `Rank`."""
    end_with_parent(signal.SIGKILL)
    rank = Rank(arguments)
    is_first = os.environ["RANK"] == "0"
    sockets = rank.bound() if is_first else []  # before the load, which takes long
    model = rank.load()
    if is_first:
        manager, room = start_batches(model, rank.context.params, rank.silence)
        serve(Answers(model, manager, room), rank.name, rank.context, sockets, rank.own.drain)
        raise_error(model, manager, rank.silence)
    else:
        follow(model, rank.context, rank.silence)


if __name__ == "__main__":
    with keep_errors(TensorParallelError):
        main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # a thread may still wait for a rank that has ended
