"""Tensor parallelism for Hugging Face Transformers: `from_pretrained(..., tp_plan="auto")` on any number of ranks.

Importing the package patches nothing and starts nothing; `enable()` does. The import sets the level of the package's
logger if TP_TRANSFORMERS_VERBOSITY is in the environment.
"""

from __future__ import annotations

import atexit
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from .logs import read_environment
from .namespaces import lazy_names

if TYPE_CHECKING:
    from . import checkpoint, debug, plans, strategies, training
    from .checkpoint import *  # noqa: F403 - names that have moved, as all with * or `as`
    from .debug import *  # noqa: F403
    from .errors import CheckpointError, MeshError, PlanError, RemoteRankError, TensorParallelError, UnsupportedError
    from .features.data_parallel.data_parallel import data_parallel
    from .features.presharded.save import save_sharded
    from .features.reshard.reshard import reshard as reshard
    from .features.watch.calls import fail_together
    from .features.watch.renew import renew_process_group
    from .loading.hook import disable, enable
    from .model.clip import clip_grad_norm_
    from .model.parallelize import is_tensor_parallel
    from .plans import *  # noqa: F403
    from .strategies import *  # noqa: F403
    from .strategies.shards.shard import full_tensor, local_tensor
    from .training import load_optimizer_state_dict as load_optimizer_state_dict
    from .training import optimizer_state_dict as optimizer_state_dict
    from .training import parameter_groups as parameter_groups

__version__ = "0.1.0"

read_environment()

__all__ = [
    "CheckpointError",
    "MeshError",
    "PlanError",
    "RemoteRankError",
    "TensorParallelError",
    "UnsupportedError",
    "checkpoint",
    "clip_grad_norm_",
    "data_parallel",
    "debug",
    "disable",
    "enable",
    "fail_together",
    "full_tensor",
    "is_tensor_parallel",
    "local_tensor",
    "plans",
    "renew_process_group",
    "save_sharded",
    "strategies",
    "training",
]

_HOMES = {
    "errors": "CheckpointError MeshError PlanError RemoteRankError TensorParallelError UnsupportedError",
    "loading.hook": "disable enable",
    "model.clip": "clip_grad_norm_",
    "model.parallelize": "is_tensor_parallel",
    "strategies.shards.shard": "full_tensor local_tensor",
}
"""Module -> its public names at the top level; all other public names are in a namespace."""
_FORMER = {
    "checkpoint": "load_distributed_checkpoint verify_sharded",
    "debug": "Partition check_inputs check_replicas partition",
    "plans": "Attention Plan Rule",
    "strategies": "ColwiseParallel GatherParallel IsolatedParallel PackedColwiseParallel PackedRowwiseParallel "
    "ParallelInterface ReplicateParallel ReplicateSumGradParallel RowwiseParallel STRATEGIES SequenceParallel "
    "TensorParallelLayer get_packed_weights get_tensor_shard vocab_parallel_cross_entropy",
    "training": "load_optimizer_state_dict optimizer_state_dict parameter_groups",
}
"""Namespace -> its names that can also be imported from the top level, until version 0.2."""

_MOVED = {name: namespace for namespace, names in _FORMER.items() for name in names.split()}
_find, _ = lazy_names(__name__, _HOMES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name on first use, so that the command line's `--help` does not import torch."""
        if name in _FORMER:
            return import_module(f".{name}", __name__)
        if name not in _MOVED:
            return _find(name)
        path = f"{__name__}.{_MOVED[name]}"
        warnings.warn(f"{__name__}.{name} has moved to {path}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(path), name)


@atexit.register
def _warn_of_no_hook() -> None:
    """Warn at exit if a model of transformers shows that `enable()` was forgotten."""
    if "transformers.modeling_utils" in sys.modules:
        import_module(".loading.forgotten", __name__).warn_of_no_hook()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
