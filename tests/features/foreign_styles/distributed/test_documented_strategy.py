"""Strategies in the form that transformers' documentation of tensor parallelism gives them: its contract, step by step.

No `__init__` calls the base class's, `partition_tensor` returns a parameter, functions before and after the forward are
static or plain functions of the class, and are called in this order. The base class and the interface are ours, or
transformers' own, as the documentation imports them.
"""

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers import AutoModelForCausalLM
from transformers.integrations import tensor_parallel as theirs

import tp_transformers
from tests.support.comparisons import assert_as_one_process, compare_seen
from tests.support.models import excess_read, load, observe
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers import PlanError
from tp_transformers.strategies import STRATEGIES, ParallelInterface, TensorParallelLayer, get_tensor_shard

TOLERANCE = 1e-4  # fp32 sums in another order
CALLS: list[str] = []
LAYERS = "model.layers.*"


def strategies(base: Any) -> tuple[Any, Any, Any]:
    """Three classes of strategies that inherit from `base`."""

    class Columns(base):
        def __init__(self, *, input_layouts=None, output_layouts=None, use_local_output=True, use_dtensor=True):
            self.input_layouts = (input_layouts or Replicate(),)
            self.output_layouts = (output_layouts or Shard(-1),)
            self.desired_input_layouts = (Replicate(),)
            self.use_local_output = use_local_output
            self.use_dtensor = use_dtensor

        @staticmethod
        def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
            CALLS.append(f"input {type(mod).__name__}")
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, input_layouts, run_check=False)
            if input_layouts != desired_input_layouts:
                x = x.redistribute(placements=desired_input_layouts, async_op=True)
            return x

        def partition_tensor(
            self, param, empty_param, param_type, param_casting_dtype, to_contiguous, rank, device_mesh
        ):
            shard = get_tensor_shard(param, empty_param, device_mesh, rank, -1 if param_type == "bias" else -2)
            shard = shard.to(param_casting_dtype)
            if to_contiguous:
                shard = shard.contiguous()
            if self.use_dtensor:
                placements = [Shard(-1 if param_type == "bias" else -2)]
                shape, stride = empty_param.size(), empty_param.stride()
                shard = DTensor.from_local(shard, device_mesh, placements, run_check=False, shape=shape, stride=stride)
            return nn.Parameter(shard, requires_grad=shard.is_floating_point())

        @staticmethod
        def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
            CALLS.append(f"output {type(mod).__name__}")
            if outputs.placements != output_layouts:
                outputs = outputs.redistribute(placements=output_layouts, async_op=True)
            return outputs.to_local() if use_local_output else outputs

    class Rows(Columns):
        def __init__(self) -> None:
            super().__init__(input_layouts=Shard(-1), output_layouts=Replicate())
            self.desired_input_layouts = (Shard(-1),)

        def partition_tensor(
            self, param, empty_param, param_type, param_casting_dtype, to_contiguous, rank, device_mesh
        ):
            shard = get_tensor_shard(param, empty_param, device_mesh, rank, -1)
            return nn.Parameter(DTensor.from_local(shard, device_mesh, [Shard(-1)], run_check=False))

    class Plain(base):
        """Returns a slice; its functions are not static."""

        def partition_tensor(
            self, param, empty_param, param_type, param_casting_dtype, to_contiguous, rank, device_mesh
        ):
            return get_tensor_shard(param, empty_param, device_mesh, rank, 0)

        def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):  # noqa: N805
            CALLS.append("plain input")
            x = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return x.to_local(grad_placements=[Partial()])  # each rank's columns give a part of the gradient

        def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):  # noqa: N805
            CALLS.append("plain output")
            return DTensor.from_local(outputs, device_mesh, [Shard(-1)], run_check=False).full_tensor()

    return Columns, Rows, Plain


def register_ours() -> None:
    """With our interface: on the class, on an instance, as an item."""
    columns, rows, plain = strategies(TensorParallelLayer)
    ParallelInterface.register_strategy("columns", columns)
    STRATEGIES.register_strategy("rows", rows)
    ParallelInterface()["plain"] = plain()
    assert {"columns", "rows", "plain", "colwise"} <= set(STRATEGIES.valid_keys())


def register_theirs(base: Any = theirs.TensorParallelLayer) -> None:
    """With transformers' interface: the same, under `register_strategy`, which `enable()` adds, and `register`."""
    columns, rows, plain = strategies(base)
    theirs.ParallelInterface.register_strategy("columns", columns)
    theirs.ParallelInterface().register_strategy("rows", rows())
    theirs.ALL_PARALLEL_STYLES["plain"] = plain()
    assert {"columns", "rows", "plain", "colwise"} <= set(theirs.ALL_PARALLEL_STYLES.valid_keys())


def register_ours_with_theirs() -> None:
    """Strategies that inherit from ours, with transformers' interface."""
    register_theirs(TensorParallelLayer)


@pytest.mark.parametrize("register", wide([register_theirs, register_ours_with_theirs, register_ours], 2))
@pytest.mark.parametrize("size", wide([2, 4], 1))
@on_ranks(heads=(8, 4))
def test_the_documented_contract_holds(folder, register) -> None:
    plan = {f"{LAYERS}.self_attn.{name}_proj": "columns" for name in "qkv"}
    plan |= {f"{LAYERS}.mlp.gate_proj": "plain", f"{LAYERS}.mlp.up_proj": "plain"}
    plan |= {f"{LAYERS}.self_attn.o_proj": "rows"}
    with tp_transformers.enable():
        try:
            register()
            model = load(folder, tp_plan=plan)
            CALLS.clear()
            seen = observe(model)
        finally:
            mappings = (STRATEGIES, theirs.ParallelInterface._global_mapping, theirs.ALL_PARALLEL_STYLES._local_mapping)
            for name in ("columns", "rows", "plain"):
                for mapping in mappings:
                    mapping.pop(name, None)
    assert_as_one_process(compare_seen(model, seen, observe_one(folder)), TOLERANCE, TOLERANCE)
    layer = model.model.layers[0]
    assert all(isinstance(each.weight, DTensor) for each in (layer.mlp.gate_proj, layer.self_attn.q_proj))
    assert [*CALLS[:2], *CALLS[8:10]] == ["input Linear", "output Linear", "plain input", "plain output"]
    assert excess_read(model, folder) == 0  # only the slices were read


def observe_one(folder: str) -> dict[str, Any]:
    """What one process computes."""
    return observe(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("base", wide([object, TensorParallelLayer, theirs.TensorParallelLayer], 1))
@on_ranks(heads=(8, 4))
def test_a_built_in_takes_what_the_documented_strategy_leaves(folder, base) -> None:
    """Layouts that `__init__` sets as attributes, and the name of a strategy after them."""
    columns = strategies(base)[0]()
    plan = {f"{LAYERS}.mlp.gate_proj": columns, f"{LAYERS}.mlp.up_proj": columns, f"{LAYERS}.mlp.down_proj": "rowwise"}
    model = load(folder, tp_plan=plan)
    assert_as_one_process(compare_seen(model, observe(model), observe_one(folder)), TOLERANCE, TOLERANCE)


def test_the_documented_name_of_the_registration_is_there_while_the_hook_is_on() -> None:
    before = dict(vars(theirs.ParallelInterface))
    with tp_transformers.enable():
        assert callable(theirs.ParallelInterface.register_strategy)
    assert dict(vars(theirs.ParallelInterface)) == before


@pytest.mark.parametrize("base", [TensorParallelLayer, theirs.TensorParallelLayer])
@pytest.mark.parametrize("method", ["shard_tensor", "prepare_module_tp"])
def test_methods_that_nothing_here_would_call_are_refused(base, method) -> None:
    """Those of the releases from 5.0 to 5.15, which have no documentation."""
    plain = strategies(base)[2]
    old = type("Old", (plain,), {method: lambda self, *args, **kwargs: None})
    with pytest.raises(PlanError, match=f"{method}.*implement split_dim or partition_tensor"):
        ParallelInterface.register_strategy("old", old)
