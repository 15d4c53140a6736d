"""The private API of torch that this package uses, and a check that it exists.

Private are names that begin with an underscore, and all names in modules that do. Functions and classes are bound here
once, and imported from here; attributes of objects (`param._local_tensor`) are read in place. `PRIVATE` has both, but
for names that one feature alone uses: its `torch_names` lists them, and it binds them by `take`. A test lets no module
use more. A function that torch lacks raises UnsupportedError when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from inspect import getattr_static
from types import ModuleType
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed

from .errors import lacks
from .seams import RAISES, REFUSED, features

F = TypeVar("F", bound=Callable[..., Any])

PRIVATE: dict[str, str] = {
    # Attributes, methods and arguments, used in place.
    "torch.Tensor._backward_hooks": REFUSED,  # hooks of tensors, as torch keeps them
    "torch.Tensor._is_view": REFUSED,  # a sum in place would write to its base
    "torch.Tensor._version": REFUSED,  # values that have changed since
    "torch.UntypedStorage._cdata": REFUSED,  # tensors that share memory
    "torch.autograd.Function._register_hook_dict": REFUSED,  # a hook without a handle
    "torch.autograd.forward_ad._current_level": REFUSED,  # forward-mode differentiation is refused
    "torch.distributed.ProcessGroup._get_backend": REFUSED,  # collectives without a dispatcher, as the next two
    "torch.distributed.ProcessGroupGloo._allgather_base": REFUSED,
    "torch.distributed.ProcessGroupGloo._reduce_scatter_base": REFUSED,
    "torch.distributed.device_mesh.DeviceMesh._init_backend": "no mesh",  # a mesh without ranks, as the next
    "torch.distributed.device_mesh.DeviceMesh._rank": "no mesh",
    "torch.distributed.tensor.DTensor._local_tensor": REFUSED,  # this rank's shard
    "torch.distributed.tensor.DTensor._spec": REFUSED,  # a DTensor with the same placements
    "torch.distributed.tensor.parallel.ParallelStyle._apply": REFUSED,  # styles of torch
    "torch.nn.Module._apply": REFUSED,  # `to`, `half`, ...: overridden
    "torch.nn.Module._buffers": REFUSED,
    "torch.nn.Module._forward_hooks": REFUSED,  # left out of copies; hooks of users under FSDP
    "torch.nn.Module._modules": REFUSED,
    "torch.nn.Module._parameters": REFUSED,  # exchanged in a forward
    "torch.nn.Parameter.__new__._is_param": REFUSED,  # shards that are nn.Parameter
}
"""Private name -> the consequence if the installed torch lacks it; `_bind` adds the functions and classes below."""


def check() -> None:
    """Raise UnsupportedError if torch lacks a name that every tensor-parallel model needs."""
    missing = lacking(REFUSED)
    if missing:
        raise lacks("torch", f"no {', '.join(missing)}", subject="tp_plan")


@cache
def lacking(consequence: str = "") -> Mapping[str, str]:
    """{name: consequence} for the private names that the installed torch lacks; imports torch's compiler.

    With `consequence`: the names with that consequence alone.
    """
    listed = dict(PRIVATE)
    for feature in features().values():
        listed.update(feature.torch_names)
    return {name: then for name, then in listed.items() if consequence in ("", then) and not _exists(name)}


def _exists(path: str) -> bool:
    """True if torch has the name: an attribute, one that `__init__` or another function sets, or an argument."""
    owner, _, name = path.rpartition(".")
    try:
        value = _resolve(owner)
    except (AttributeError, ImportError):
        return False
    if hasattr(value, name) or name in getattr(value, "__annotations__", ()):
        return True
    code = getattr(getattr_static(value, "__init__", None) if isinstance(value, type) else value, "__code__", None)
    return code is not None and name in code.co_names + code.co_varnames


def _resolve(path: str) -> Any:
    """Import the object at a dotted path. Raises AttributeError or ImportError."""
    value: Any = torch
    parts = path.split(".")
    for number, name in enumerate(parts[1:], 2):
        if isinstance(value, ModuleType) and not hasattr(value, name):
            value = import_module(".".join(parts[:number]))
        else:
            value = getattr(value, name)
    return value


class _Missing:
    """Placeholder for a function or class that torch lacks; its use raises UnsupportedError."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise lacks("torch", f"no {self._path}", subject="a tensor-parallel model")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self()


def take(path: str, *default: Any) -> Any:
    """Import a listed object; if torch lacks it, return `default`, or else a `_Missing`."""
    try:
        return _resolve(path)
    except (AttributeError, ImportError):
        return default[0] if default else _Missing(path)


def _bind(path: str, without: str = REFUSED, *default: Any) -> Any:
    """List an object in PRIVATE, with the consequence `without` if torch lacks it, and `take` it."""
    PRIVATE[path] = without
    return take(path, *default)


_OTHER = "the other name of the same function is called"
_UNTRACED = "torch.compiler.disable"

as_torch = _bind("torch._C.DisableTorchFunctionSubclass")
"""Context manager in which operators treat a shard as a plain tensor."""
make_wrapper_subclass = _bind("torch.Tensor._make_wrapper_subclass", RAISES)
is_transformed = _bind("torch._C._are_functorch_transforms_active")
top_saved_tensors_hooks = _bind("torch._C._autograd._top_saved_tensors_default_hooks", RAISES)
"""Return the active hooks on saved tensors, or None."""
current_backward = _bind("torch._C._current_graph_task_id", RAISES)
"""Return the id of the running backward; -1 outside of one."""
is_watched = _bind("torch._C._len_torch_dispatch_stack")
"""Return the number of active dispatch modes."""
foreach_norm = _bind("torch._foreach_norm", RAISES)
CompileContext = _bind("torch._guards.CompileContext")
TracingContext = _bind("torch._guards.TracingContext")
traced_all_gather = _bind("torch.distributed._functional_collectives.all_gather_single", _OTHER, None) or _bind(
    "torch.distributed._functional_collectives.all_gather_tensor"  # until torch 2.12
)
traced_reduce_scatter = _bind("torch.distributed._functional_collectives.reduce_scatter_single", _OTHER, None) or _bind(
    "torch.distributed._functional_collectives.reduce_scatter_tensor"  # until torch 2.12
)
wait_tensor = _bind("torch.distributed._functional_collectives.wait_tensor", RAISES)
functional_all_reduce = _bind("torch.ops._c10d_functional.all_reduce", RAISES)
get_default_store = _bind("torch.distributed.distributed_c10d._get_default_store")
resolve_process_group = _bind("torch.distributed.distributed_c10d._resolve_process_group")
world = _bind("torch.distributed.distributed_c10d._world", RAISES)
is_any_true = _bind("torch.ops.aten._is_any_true.default", "detect_anomaly raises")
to_copy = _bind("torch.ops.aten._to_copy", "a style whose partition_tensor casts is refused")
group_tensors = _bind("torch.utils._foreach_utils._group_tensors_by_device_and_dtype", RAISES)
TorchDispatchMode: Any = _bind(
    "torch.utils._python_dispatch.TorchDispatchMode", "dropout with tp_invariant raises AttributeError", object
)
has_bfloat16 = _bind("torch.ops.mkldnn._is_mkldnn_bf16_supported", "products in fp32", lambda: False)
"""Return True if the processor multiplies bfloat16 (AVX-512 and later)."""
tree_leaves = _bind("torch.utils._pytree.tree_leaves")
tree_map = _bind("torch.utils._pytree.tree_map")
tree_map_only = _bind("torch.utils._pytree.tree_map_only")
_FrameAction = _bind("torch._C._dynamo.eval_frame._FrameAction", _UNTRACED, None)
_FrameExecStrategy = _bind("torch._C._dynamo.eval_frame._FrameExecStrategy", _UNTRACED, None)
_set_strategy = _bind("torch._C._dynamo.eval_frame.set_code_exec_strategy", _UNTRACED, None)


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for all ordinary tensors with the same values in memory, even if they are empty."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()


def version_of(tensor: torch.Tensor) -> int:
    """The version of a tensor, which counts changes in place; one that was made in inference mode has none."""
    return 0 if tensor.is_inference() else tensor._version


def untraced(function: F) -> F:
    """Let torch.compile skip `function` and everything that it calls, unless a traced caller inlines it.

    As `torch.compiler.disable`, but without a wrapper and without importing Dynamo; and a traced caller still inlines
    the function.
    """
    if None in (_FrameAction, _FrameExecStrategy, _set_strategy):
        return cast(F, torch.compiler.disable(function))
    _set_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
