"""The private API of torch that this package uses, and a check that it exists.

Private are names that begin with an underscore, and all names in modules that do. Functions and classes are bound here
once, and imported from here; attributes of objects (`param._local_tensor`) are read in place. `PRIVATE` lists both, and
a test lets no other module use more. A function that torch lacks raises UnsupportedError when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from inspect import getattr_static
from types import ModuleType
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed

from .errors import lacks

F = TypeVar("F", bound=Callable[..., Any])

_REFUSED = "a load with tp_plan is refused"
_RAISES = "its call raises UnsupportedError"
_OTHER = "the other name of the same function is called"
_DECODED = "packed weights are decoded in a forward"
_BY_ITSELF = "meshes find the new group by themselves"


@dataclass(frozen=True)
class Private:
    """The use of one private name of torch."""

    use: str
    users: str
    """Packages that use it."""
    without: str = _REFUSED
    """The consequence if the installed torch lacks it."""


PRIVATE: dict[str, Private] = {
    # Functions and classes, bound below.
    "torch.Tensor._make_wrapper_subclass": Private("tensors without data", "features strategies", _RAISES),
    "torch._C.DisableTorchFunctionSubclass": Private("operators of torch on shards", "features strategies"),
    "torch._C._are_functorch_transforms_active": Private("torch.func is refused", "ranks"),
    "torch._C._autograd._top_saved_tensors_default_hooks": Private(
        "other hooks on saved tensors keep their tensors", "features", _RAISES
    ),
    "torch._C._current_graph_task_id": Private("one for each backward", "features", _RAISES),
    "torch._C._dynamo.eval_frame._FrameAction": Private("`untraced`", "features ranks", "torch.compiler.disable"),
    "torch._C._dynamo.eval_frame._FrameExecStrategy": Private("`untraced`", "features ranks", "the same"),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": Private("`untraced`", "features ranks", "the same"),
    "torch._C._len_torch_dispatch_stack": Private("dispatch modes see every collective", "ranks"),
    "torch._assert_async": Private("the loss refuses labels that are no token", "features", _RAISES),
    "torch._dynamo.eval_frame.OptimizedModule": Private("its calls are watched", "features", "they are not watched"),
    "torch._foreach_norm": Private("the norms of many gradients in one call", "model", _RAISES),
    "torch._guards.CompileContext": Private("patches stay during a compilation", "patches.py"),
    "torch._guards.TracingContext": Private("torch.compile sees the shards alone", "strategies"),
    "torch._inductor.ir.TensorBox": Private("operators of ours in compiled graphs", "features", _RAISES),
    "torch._inductor.ir._CollectiveKernel.create_out_of_place": Private("the same", "features", _RAISES),
    "torch._inductor.lowering.add_layout_constraint": Private("the same", "features", _RAISES),
    "torch._inductor.lowering.constrain_to_fx_strides": Private("the same", "features", _RAISES),
    "torch._inductor.lowering.register_lowering": Private("the same", "features", _RAISES),
    "torch.autograd.Variable._execution_engine": Private("averages end with the backward", "features", _RAISES),
    "torch.distributed._functional_collectives.all_gather_single": Private("compiled graphs", "ranks", _OTHER),
    "torch.distributed._functional_collectives.all_gather_tensor": Private("until torch 2.12", "ranks", _OTHER),
    "torch.distributed._functional_collectives.reduce_scatter_single": Private("compiled graphs", "ranks", _OTHER),
    "torch.distributed._functional_collectives.reduce_scatter_tensor": Private("until torch 2.12", "ranks", _OTHER),
    "torch.distributed._functional_collectives.wait_tensor": Private("functional collectives", "ranks", _RAISES),
    "torch.distributed.distributed_c10d._get_default_store": Private("the ranks meet in it", "features ranks"),
    "torch.distributed.distributed_c10d._resolve_process_group": Private("groups by name", "features strategies"),
    "torch.distributed.distributed_c10d._world": Private("all process groups", "features", _RAISES),
    "torch.nn.modules.module._global_backward_hooks": Private("a warning of them", "features", "no warning"),
    "torch.nn.modules.module._global_backward_pre_hooks": Private("a warning of them", "features", "no warning"),
    "torch.nn.modules.module._global_forward_hooks": Private("a warning of them", "features", "no warning"),
    "torch.nn.modules.module._global_forward_pre_hooks": Private("a warning of them", "features", "no warning"),
    "torch.ops._c10d_functional.all_reduce": Private("sums that dispatch modes may keep", "ranks", _RAISES),
    "torch.ops.aten._is_any_true.default": Private("detect_anomaly", "strategies", "detect_anomaly raises"),
    "torch.ops.aten._to_copy": Private("a style's partition_tensor may cast", "strategies", "such a style is refused"),
    "torch.utils._foreach_utils._group_tensors_by_device_and_dtype": Private(
        "the order of norms with tp_invariant", "model", _RAISES
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": Private(
        "masks of dropout with tp_invariant", "features strategies", "such a dropout raises AttributeError"
    ),
    "torch.utils._python_dispatch._disable_current_modes": Private("collectives below modes", "features", _RAISES),
    "torch.ops.aten._convert_weight_to_int4pack": Private("packed weights of 4 bits on a GPU", "features", _DECODED),
    "torch.ops.aten._convert_weight_to_int4pack_for_cpu": Private("packed weights of 4 bits", "features", _DECODED),
    "torch.ops.aten._unsafe_view": Private("results of other dims, which may change in place", "features", _RAISES),
    "torch.ops.aten._weight_int4pack_mm": Private("their product on a GPU", "features", _DECODED),
    "torch.ops.aten._weight_int4pack_mm_for_cpu": Private("their product", "features", _DECODED),
    "torch.ops.aten._weight_int8pack_mm": Private("the product of packed weights of 8 bits", "features", _DECODED),
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": Private("products in fp32 elsewhere", "features", "in fp32"),
    "torch.utils._pytree.tree_leaves": Private("nested arguments", "features strategies"),
    "torch.utils._pytree.tree_map": Private("tensors in nested arguments", "features strategies"),
    "torch.utils._pytree.tree_map_only": Private("tensors in nested arguments", "features strategies"),
    # Attributes, methods and arguments, used in place.
    "torch.Tensor._backward_hooks": Private("hooks of tensors, as torch keeps them", "ranks strategies"),
    "torch.Tensor._is_view": Private("a sum in place would write to its base", "ranks"),
    "torch.Tensor._post_accumulate_grad_hooks": Private("hooks that see the gradient of one copy", "features", _RAISES),
    "torch.Tensor._version": Private("values that have changed since", "features strategies"),
    "torch.UntypedStorage._cdata": Private("tensors that share memory", "features"),
    "torch.amp.GradScaler._unscale_grads_": Private("replaced", "features", "GradScaler refuses shards"),
    "torch.autograd.Function._register_hook_dict": Private("a hook without a handle", "ranks"),
    "torch.autograd.forward_ad._current_level": Private("forward-mode differentiation is refused", "ranks"),
    "torch.distributed.ProcessGroup._get_backend": Private("collectives without a dispatcher", "features ranks"),
    "torch.distributed.ProcessGroupGloo._Options._timeout": Private("of groups in shared memory", "features"),
    "torch.distributed.ProcessGroupGloo._allgather_base": Private("collectives without a dispatcher", "ranks"),
    "torch.distributed.ProcessGroupGloo._get_sequence_number_for_group": Private("their number", "ranks"),
    "torch.distributed.ProcessGroupGloo._reduce_scatter_base": Private("collectives without a dispatcher", "ranks"),
    "torch.distributed.checkpoint.filesystem._StorageInfo": Private("in torch's checkpoints", "features", "not read"),
    "torch.distributed.checkpoint.filesystem._StoragePrefix": Private("the same", "features", "not read"),
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": Private("the same", "features", "not read"),
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": Private("a renewed group", "features", _BY_ITSELF),
    "torch.distributed.device_mesh.DeviceMesh._init_backend": Private("a mesh without ranks", "strategies", "no mesh"),
    "torch.distributed.device_mesh.DeviceMesh._pg_registry": Private("a renewed group", "features", _BY_ITSELF),
    "torch.distributed.device_mesh.DeviceMesh._rank": Private("a mesh without ranks", "strategies", "no mesh"),
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": Private(
        "calls of modules inside of FSDP's", "features", _RAISES
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init": Private("the same", "features", _RAISES),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._post_forward": Private("the same", "features", _RAISES),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_forward": Private("the same", "features", _RAISES),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_pre_backward_hook": Private(
        "the same", "features", _RAISES
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._training_state": Private(
        "the same", "features", _RAISES
    ),
    "torch.distributed.tensor.DTensor._local_tensor": Private("this rank's shard", "features strategies"),
    "torch.distributed.tensor.DTensor._spec": Private("a DTensor with the same placements", "strategies"),
    "torch.distributed.tensor.distribute_module._distribute_module_applied": Private("left out of copies", "features"),
    "torch.distributed.tensor.parallel.ParallelStyle._apply": Private("styles of torch", "features"),
    "torch.nn.Module._apply": Private("`to`, `half`, ...: overridden", "model"),
    "torch.nn.Module._buffers": Private("the module's own", "features loading"),
    "torch.nn.Module._forward_hooks": Private("left out of copies; hooks of users under FSDP", "features"),
    "torch.nn.Module._forward_pre_hooks": Private("left out of copies", "features"),
    "torch.nn.Module._load_state_dict_pre_hooks": Private("left out of copies", "features"),
    "torch.nn.Module._modules": Private("the module's own", "features strategies"),
    "torch.nn.Module._parameters": Private(
        "the module's own, exchanged in a forward",
        "anatomy features loading model strategies",
    ),
    "torch.nn.Module._state_dict_hooks": Private("left out of copies", "features"),
    "torch.nn.Parameter.__new__._is_param": Private("shards that are nn.Parameter", "strategies"),
    "torch.nn.utils.parametrize._cache": Private("shards in `parametrize.cached`", "strategies"),
    "torch.nn.utils.parametrize._cache_enabled": Private("shards in `parametrize.cached`", "strategies"),
    "torch.nn.utils.parametrize._maybe_set": Private("replaced", "features", "remove_parametrizations raises"),
    "torch.serialization._get_layout": Private("in torch's checkpoints", "features", "not read"),
}


def check() -> None:
    """Raise UnsupportedError if torch lacks a name that every tensor-parallel model needs."""
    missing = _lacking(_REFUSED)
    if missing:
        raise lacks("torch", f"no {', '.join(missing)}", subject="tp_plan")


def lacking() -> dict[str, str]:
    """{name: consequence} for the private names that the installed torch lacks; imports torch's compiler."""
    return {name: PRIVATE[name].without for name in _lacking(*{private.without for private in PRIVATE.values()})}


@cache
def _lacking(*consequences: str) -> list[str]:
    return [name for name, private in PRIVATE.items() if private.without in consequences and not _exists(name)]


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


def _take(path: str, *default: Any) -> Any:
    """Import an object listed in `PRIVATE`; if torch lacks it, return `default`, or else a `_Missing`."""
    assert path in PRIVATE
    try:
        return _resolve(path)
    except (AttributeError, ImportError):
        return default[0] if default else _Missing(path)


as_torch = _take("torch._C.DisableTorchFunctionSubclass")
"""Context manager in which operators treat a shard as a plain tensor."""
make_wrapper_subclass = _take("torch.Tensor._make_wrapper_subclass")
is_transformed = _take("torch._C._are_functorch_transforms_active")
top_saved_tensors_hooks = _take("torch._C._autograd._top_saved_tensors_default_hooks")
"""Return the active hooks on saved tensors, or None."""
current_backward = _take("torch._C._current_graph_task_id")
"""Return the id of the running backward; -1 outside of one."""
is_watched = _take("torch._C._len_torch_dispatch_stack")
"""Return the number of active dispatch modes."""
assert_async = _take("torch._assert_async")
foreach_norm = _take("torch._foreach_norm")
CompileContext = _take("torch._guards.CompileContext")
TracingContext = _take("torch._guards.TracingContext")
engine = _take("torch.autograd.Variable._execution_engine")
traced_all_gather = _take("torch.distributed._functional_collectives.all_gather_single", None) or _take(
    "torch.distributed._functional_collectives.all_gather_tensor"
)
traced_reduce_scatter = _take("torch.distributed._functional_collectives.reduce_scatter_single", None) or _take(
    "torch.distributed._functional_collectives.reduce_scatter_tensor"
)
wait_tensor = _take("torch.distributed._functional_collectives.wait_tensor")
functional_all_reduce = _take("torch.ops._c10d_functional.all_reduce")
get_default_store = _take("torch.distributed.distributed_c10d._get_default_store")
resolve_process_group = _take("torch.distributed.distributed_c10d._resolve_process_group")
world = _take("torch.distributed.distributed_c10d._world")
is_any_true = _take("torch.ops.aten._is_any_true.default")
to_copy = _take("torch.ops.aten._to_copy")
group_tensors = _take("torch.utils._foreach_utils._group_tensors_by_device_and_dtype")
TorchDispatchMode = _take("torch.utils._python_dispatch.TorchDispatchMode", object)
disable_current_modes = _take("torch.utils._python_dispatch._disable_current_modes")
unsafe_view = _take("torch.ops.aten._unsafe_view")
"""Return a result in another shape; unlike a view, the result may be changed in place and recorded."""
pack_int4 = _take("torch.ops.aten._convert_weight_to_int4pack_for_cpu", None)
int4_product = _take("torch.ops.aten._weight_int4pack_mm_for_cpu", None)
pack_int4_for_gpu = _take("torch.ops.aten._convert_weight_to_int4pack", None)
int4_product_of_gpu = _take("torch.ops.aten._weight_int4pack_mm", None)
int8_product = _take("torch.ops.aten._weight_int8pack_mm", None)
has_bfloat16 = _take("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)
"""Return True if the processor multiplies bfloat16 (AVX-512 and later)."""
tree_leaves = _take("torch.utils._pytree.tree_leaves")
tree_map = _take("torch.utils._pytree.tree_map")
tree_map_only = _take("torch.utils._pytree.tree_map_only")
GLOBAL_HOOKS = (
    _take("torch.nn.modules.module._global_forward_pre_hooks", {}),
    _take("torch.nn.modules.module._global_forward_hooks", {}),
    _take("torch.nn.modules.module._global_backward_pre_hooks", {}),
    _take("torch.nn.modules.module._global_backward_hooks", {}),
)
"""The global hooks on all modules, by handle id."""


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
    action = _take("torch._C._dynamo.eval_frame._FrameAction", None)
    strategy = _take("torch._C._dynamo.eval_frame._FrameExecStrategy", None)
    set_strategy = _take("torch._C._dynamo.eval_frame.set_code_exec_strategy", None)
    if None in (action, strategy, set_strategy):
        return cast(F, torch.compiler.disable(function))
    set_strategy(function.__code__, strategy(action.SKIP, action.SKIP))
    return function


DYNAMO = "torch._dynamo.eval_frame"
"""A module that torch.compile imports, which takes a second; patches of it wait for that import."""


def compiled_class() -> Any:
    """The class of compiled modules; imports Dynamo. Raises AttributeError if torch lacks it."""
    return _resolve("torch._dynamo.eval_frame.OptimizedModule")


def lower_as_collectives(operators: Iterable[Any]) -> None:
    """Let Inductor treat `operators` like torch's collectives, which it neither reorders nor drops."""
    add_layout_constraint = _take("torch._inductor.lowering.add_layout_constraint")
    strides = _take("torch._inductor.lowering.constrain_to_fx_strides")
    register_lowering = _take("torch._inductor.lowering.register_lowering")
    box = _take("torch._inductor.ir.TensorBox")
    create = _take("torch._inductor.ir._CollectiveKernel.create_out_of_place")
    for operator in operators:
        add_layout_constraint(operator, strides)
        make = partial(create, operator)
        register_lowering(operator)(lambda *args, make=make: box.create(make(*args)))
