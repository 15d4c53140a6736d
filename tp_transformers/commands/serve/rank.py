"""Rank of `tp-transformers serve`: rank 0 runs transformers' server, the others decode the same batches.

All ranks decode in step by transformers' continuous batching, which starts with the first request to rank 0. The other
ranks get its settings of sampling and cache through the store of the process group.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import CBGenerateManager

from ...anatomy.classes import read_config
from ...errors import TensorParallelError, UsageError
from ...loading.hook import enable
from ...patches import replace
from ...ranks.launch import end_with_parent
from ...torch_api import get_default_store
from ..own_plan import add_plan, import_files
from ..run.errors import keep_errors
from .ports import bound

CPU_MEMORY = 0.1
"""Fraction of the free CPU memory for the caches of all ranks together; by default, each rank would take all."""

STOP = 5.0
"""Seconds that the server has to finish its answers, and then the ranks to finish a batch."""

_SETTINGS = "tp_transformers/serve"
"""Key of the settings in the store; the value is empty if there was no request."""


def read_options(name: str, options: Sequence[str]) -> Any:
    """Parse the options of `transformers serve` into a typer context. Raises UsageError for an unknown option."""
    import typer  # a dependency of transformers, for its command line

    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    try:
        return typer.main.get_command(app).make_context("serve", [name, "--continuous-batching", *options])
    except Exception as error:
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        fix = "See `transformers serve --help`."
        raise UsageError(
            "options of the server", got=format_message(), expected="those of transformers", fix=fix
        ) from None


def serve(model: Any, name: str, context: Any, sockets: list[socket.socket]) -> None:
    """Run transformers' server on `sockets` until a signal; `context` is the typer context with its options."""
    server: Any = import_module("uvicorn").Server

    def init(original: Any, self: Any, model: Any, gen_config: Any) -> None:
        if self._cb is None and dist.is_initialized():
            get_default_store().set(_SETTINGS, pickle.dumps((gen_config, self._cb_config)))
        original(self, model, gen_config)
        managers.append(self)

    def run(original: Any, self: Any) -> None:
        self.config.timeout_graceful_shutdown = int(STOP)  # otherwise it waits for the last answer to be read
        host, port = sockets[0].getsockname()[:2]
        line = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1/chat/completions answers for model {name!r}"
        print(f"tp-transformers serve: {line}", file=sys.stderr, flush=True)
        original(self, sockets=sockets)

    managers: list[Any] = []
    served = {"id": name, "object": "model", "created": int(time.time()), "owned_by": name.rpartition("/")[0]}
    replace(ModelManager, "_load_model", lambda original, self, *args, **kwargs: model)
    if hasattr(ModelManager, "get_gen_models"):  # up to transformers 5.23, it lists the models in the Hub's cache
        replace(ModelManager, "get_gen_models", lambda original, *args, **kwargs: [served])
    replace(CBGenerateManager, "init_cb", init)
    replace(server, "run", run)
    limits = ("cb_num_blocks", "cb_max_memory_percent")
    if model.device.type == "cpu" and all(context.params[limit] is None for limit in limits):
        context.params["cb_max_memory_percent"] = CPU_MEMORY / model.tp_size
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn raises the signal again when it has ended
    try:
        with suppress(SystemExit), context:
            context.command.invoke(context)
    finally:
        for manager in managers:  # this also ends the other ranks
            manager._cb.stop(timeout=STOP, hard_stop=True)
        if dist.is_initialized() and not get_default_store().check([_SETTINGS]):
            get_default_store().set(_SETTINGS, b"")


def follow(model: Any) -> int:
    """Decode the requests of rank 0's server; returns 1 if that failed."""
    while not get_default_store().check([_SETTINGS]):
        time.sleep(0.05)
    settings = get_default_store().get(_SETTINGS)
    if not settings:
        return 0
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 stops all ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    generation_config, batching_config = pickle.loads(settings)
    manager = model.init_continuous_batching(
        generation_config=generation_config, continuous_batching_config=batching_config
    )
    manager.start()
    manager._generation_thread.join()
    return int(manager.background_thread_status.fatal_error is not None)


def main(arguments: Sequence[str]) -> int:
    """Run one rank; `arguments`: those of `add_plan`, `--`, the model, and the options of transformers' server."""
    divider = list(arguments).index("--")
    name, *options = arguments[divider + 1 :]
    parser = argparse.ArgumentParser()
    add_plan(parser)
    own = parser.parse_args(arguments[:divider])
    end_with_parent(signal.SIGKILL)
    context = read_options(name, options)
    is_first = os.environ["RANK"] == "0"
    # Before the load, which takes long.
    sockets = bound(context.params["host"], context.params["port"]) if is_first else []
    where = {"trust_remote_code": context.params["trust_remote_code"]}
    read_config(name, **where)  # raises errors with the messages of this package
    import_files(own.imports)
    enable()
    model = AutoModelForCausalLM.from_pretrained(name, tp_plan=own.plan, **where)
    if not is_first:
        return follow(model)
    serve(model, name, context, sockets)
    return 0


if __name__ == "__main__":
    with keep_errors(TensorParallelError):
        code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a thread may still wait for a rank that has ended
