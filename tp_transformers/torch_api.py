"""The private API of torch that this package uses, and a check that it exists.

Private are names that begin with an underscore, and all names in modules that do. Functions and classes are bound here
once, and imported from here; attributes of objects (`param._local_tensor`) are read in place. `PRIVATE` lists both, but
for names that one feature alone uses: its `torch_names` lists them, and it binds them by `take`. A test lets no module
use more. A function that torch lacks raises UnsupportedError when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

_OTHER = "the other name of the same function is called"


@dataclass(frozen=True)
class Private:
    """The use of one private name of torch."""

    use: str
    users: str
    """Packages that use it."""
    without: str = REFUSED
    """The consequence if the installed torch lacks it."""


PRIVATE: dict[str, Private] = {
    # Functions and classes, bound below.
    "torch.Tensor._make_wrapper_subclass": Private("tensors without data", "features strategies", RAISES),
    "torch._C.DisableTorchFunctionSubclass": Private("operators of torch on shards", "features strategies"),
    "torch._C._are_functorch_transforms_active": Private("torch.func is refused", "ranks"),
    "torch._C._autograd._top_saved_tensors_default_hooks": Private(
        "other hooks on saved tensors keep their tensors", "features", RAISES
    ),
    "torch._C._current_graph_task_id": Private("one for each backward", "features", RAISES),
    "torch._C._dynamo.eval_frame._FrameAction": Private("`untraced`", "features ranks", "torch.compiler.disable"),
    "torch._C._dynamo.eval_frame._FrameExecStrategy": Private("`untraced`", "features ranks", "the same"),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": Private("`untraced`", "features ranks", "the same"),
    "torch._C._len_torch_dispatch_stack": Private("dispatch modes see every collective", "ranks"),
    "torch._foreach_norm": Private("the norms of many gradients in one call", "model", RAISES),
    "torch._guards.CompileContext": Private("patches stay during a compilation", "patches.py"),
    "torch._guards.TracingContext": Private("torch.compile sees the shards alone", "strategies"),
    "torch.distributed._functional_collectives.all_gather_single": Private("compiled graphs", "ranks", _OTHER),
    "torch.distributed._functional_collectives.all_gather_tensor": Private("until torch 2.12", "ranks", _OTHER),
    "torch.distributed._functional_collectives.reduce_scatter_single": Private("compiled graphs", "ranks", _OTHER),
    "torch.distributed._functional_collectives.reduce_scatter_tensor": Private("until torch 2.12", "ranks", _OTHER),
    "torch.distributed._functional_collectives.wait_tensor": Private("functional collectives", "ranks", RAISES),
    "torch.distributed.distributed_c10d._get_default_store": Private("the ranks meet in it", "features ranks"),
    "torch.distributed.distributed_c10d._resolve_process_group": Private("groups by name", "features strategies"),
    "torch.distributed.distributed_c10d._world": Private("all process groups", "features", RAISES),
    "torch.ops._c10d_functional.all_reduce": Private("sums that dispatch modes may keep", "ranks", RAISES),
    "torch.ops.aten._is_any_true.default": Private("detect_anomaly", "strategies", "detect_anomaly raises"),
    "torch.ops.aten._to_copy": Private("a style's partition_tensor may cast", "strategies", "such a style is refused"),
    "torch.utils._foreach_utils._group_tensors_by_device_and_dtype": Private(
        "the order of norms with tp_invariant", "model", RAISES
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": Private(
        "masks of dropout with tp_invariant", "features strategies", "such a dropout raises AttributeError"
    ),
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": Private("products in fp32 elsewhere", "features", "in fp32"),
    "torch.utils._pytree.tree_leaves": Private("nested arguments", "features strategies"),
    "torch.utils._pytree.tree_map": Private("tensors in nested arguments", "features strategies"),
    "torch.utils._pytree.tree_map_only": Private("tensors in nested arguments", "features strategies"),
    # Attributes, methods and arguments, used in place.
    "torch.Tensor._backward_hooks": Private("hooks of tensors, as torch keeps them", "ranks strategies"),
    "torch.Tensor._is_view": Private("a sum in place would write to its base", "ranks"),
    "torch.Tensor._version": Private("values that have changed since", "features strategies"),
    "torch.UntypedStorage._cdata": Private("tensors that share memory", "features"),
    "torch.autograd.Function._register_hook_dict": Private("a hook without a handle", "ranks"),
    "torch.autograd.forward_ad._current_level": Private("forward-mode differentiation is refused", "ranks"),
    "torch.distributed.ProcessGroup._get_backend": Private("collectives without a dispatcher", "features ranks"),
    "torch.distributed.ProcessGroupGloo._allgather_base": Private("collectives without a dispatcher", "ranks"),
    "torch.distributed.ProcessGroupGloo._get_sequence_number_for_group": Private("their number", "ranks"),
    "torch.distributed.ProcessGroupGloo._reduce_scatter_base": Private("collectives without a dispatcher", "ranks"),
    "torch.distributed.device_mesh.DeviceMesh._init_backend": Private("a mesh without ranks", "strategies", "no mesh"),
    "torch.distributed.device_mesh.DeviceMesh._rank": Private("a mesh without ranks", "strategies", "no mesh"),
    "torch.distributed.tensor.DTensor._local_tensor": Private("this rank's shard", "features strategies"),
    "torch.distributed.tensor.DTensor._spec": Private("a DTensor with the same placements", "strategies"),
    "torch.distributed.tensor.parallel.ParallelStyle._apply": Private("styles of torch", "features"),
    "torch.nn.Module._apply": Private("`to`, `half`, ...: overridden", "model"),
    "torch.nn.Module._buffers": Private("the module's own", "features loading"),
    "torch.nn.Module._forward_hooks": Private("left out of copies; hooks of users under FSDP", "features"),
    "torch.nn.Module._modules": Private("the module's own", "features strategies"),
    "torch.nn.Module._parameters": Private(
        "the module's own, exchanged in a forward", "anatomy.py features loading model strategies"
    ),
    "torch.nn.Parameter.__new__._is_param": Private("shards that are nn.Parameter", "strategies"),
    "torch.nn.utils.parametrize._cache": Private("shards in `parametrize.cached`", "strategies"),
    "torch.nn.utils.parametrize._cache_enabled": Private("shards in `parametrize.cached`", "strategies"),
}


def check() -> None:
    """Raise UnsupportedError if torch lacks a name that every tensor-parallel model needs."""
    missing = _lacking(REFUSED)
    if missing:
        raise lacks("torch", f"no {', '.join(missing)}", subject="tp_plan")


def lacking() -> dict[str, str]:
    """{name: consequence} for the private names that the installed torch lacks; imports torch's compiler."""
    return dict(_lacking())


@cache
def _lacking(consequence: str = "") -> Mapping[str, str]:
    """As `lacking`; with `consequence`, the names with that consequence alone."""
    listed = {name: private.without for name, private in PRIVATE.items()}
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


as_torch = take("torch._C.DisableTorchFunctionSubclass")
"""Context manager in which operators treat a shard as a plain tensor."""
make_wrapper_subclass = take("torch.Tensor._make_wrapper_subclass")
is_transformed = take("torch._C._are_functorch_transforms_active")
top_saved_tensors_hooks = take("torch._C._autograd._top_saved_tensors_default_hooks")
"""Return the active hooks on saved tensors, or None."""
current_backward = take("torch._C._current_graph_task_id")
"""Return the id of the running backward; -1 outside of one."""
is_watched = take("torch._C._len_torch_dispatch_stack")
"""Return the number of active dispatch modes."""
foreach_norm = take("torch._foreach_norm")
CompileContext = take("torch._guards.CompileContext")
TracingContext = take("torch._guards.TracingContext")
traced_all_gather = take("torch.distributed._functional_collectives.all_gather_single", None) or take(
    "torch.distributed._functional_collectives.all_gather_tensor"
)
traced_reduce_scatter = take("torch.distributed._functional_collectives.reduce_scatter_single", None) or take(
    "torch.distributed._functional_collectives.reduce_scatter_tensor"
)
wait_tensor = take("torch.distributed._functional_collectives.wait_tensor")
functional_all_reduce = take("torch.ops._c10d_functional.all_reduce")
get_default_store = take("torch.distributed.distributed_c10d._get_default_store")
resolve_process_group = take("torch.distributed.distributed_c10d._resolve_process_group")
world = take("torch.distributed.distributed_c10d._world")
is_any_true = take("torch.ops.aten._is_any_true.default")
to_copy = take("torch.ops.aten._to_copy")
group_tensors = take("torch.utils._foreach_utils._group_tensors_by_device_and_dtype")
TorchDispatchMode: Any = take("torch.utils._python_dispatch.TorchDispatchMode", object)
has_bfloat16 = take("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)
"""Return True if the processor multiplies bfloat16 (AVX-512 and later)."""
tree_leaves = take("torch.utils._pytree.tree_leaves")
tree_map = take("torch.utils._pytree.tree_map")
tree_map_only = take("torch.utils._pytree.tree_map_only")


def in_backward() -> int:
    """Return the id of the running backward (checkpointing recomputes activations there); -1 outside a backward."""
    return -1 if torch.compiler.is_compiling() else int(current_backward())


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
    action = take("torch._C._dynamo.eval_frame._FrameAction", None)
    strategy = take("torch._C._dynamo.eval_frame._FrameExecStrategy", None)
    set_strategy = take("torch._C._dynamo.eval_frame.set_code_exec_strategy", None)
    if None in (action, strategy, set_strategy):
        return cast(F, torch.compiler.disable(function))
    set_strategy(function.__code__, strategy(action.SKIP, action.SKIP))
    return function
