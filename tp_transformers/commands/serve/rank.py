"""A rank of `tp-transformers serve`: the first runs transformers' server, the others follow its batches.

The ranks decode in step by transformers' continuous batching, in which the first rank has the requests. It begins with
the first request, whose settings of sampling and of the cache the others get through the store of the launch.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import CBGenerateManager

from ...loading.hook import enable
from ...patches import replace
from ...ranks.launch import end_with_parent

CPU_MEMORY = 0.1
"""Share of the memory that is free on a CPU, for the caches of all ranks; transformers would take all, on each."""

_SETTINGS = "tp_transformers/serve"
"""Key of the settings in the store; empty where there was no request."""


def serve(model: Any, name: str, options: Sequence[str]) -> None:
    """Run transformers' server until it is told to stop."""
    import typer  # transformers brings it for its own command line

    def init(original: Any, self: Any, model: Any, gen_config: Any) -> None:
        if self._cb is None and dist.is_initialized():
            _store().set(_SETTINGS, pickle.dumps((gen_config, self._cb_config)))
        original(self, model, gen_config)

    replace(ModelManager, "_load_model", lambda original, self, *args, **kwargs: model)
    replace(CBGenerateManager, "init_cb", init)
    if model.device.type == "cpu" and not any(option.startswith(("--cb-num", "--cb-max-memory")) for option in options):
        options = [*options, "--cb-max-memory-percent", str(CPU_MEMORY / model.tp_size)]
    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    try:
        app([name, "--continuous-batching", *options], standalone_mode=False)
    finally:
        if dist.is_initialized() and not _store().check([_SETTINGS]):
            _store().set(_SETTINGS, b"")


def follow(model: Any) -> int:
    """Decode what the first rank's server has to; returns 1 where that failed."""
    while not _store().check([_SETTINGS]):
        time.sleep(0.05)
    settings = _store().get(_SETTINGS)
    if not settings:
        return 0
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first rank stops all
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    generation_config, batching_config = pickle.loads(settings)
    manager = model.init_continuous_batching(
        generation_config=generation_config, continuous_batching_config=batching_config
    )
    manager.start()
    manager._generation_thread.join()
    return int(manager.background_thread_status.fatal_error is not None)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def main(arguments: Sequence[str]) -> int:
    name, *options = arguments
    end_with_parent(signal.SIGKILL)
    enable()
    model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")
    if model.tp_group.rank:
        return follow(model)
    serve(model, name, options)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a thread may wait for a rank that has ended
