"""Strategies written for transformers' own interface, by the contract of its releases from 5.16 on, in our loads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tp_transformers
from tests.support.comparisons import compare_seen, relative
from tests.support.models import excess_read, load, observe
from tests.support.pool import Pool
from tests.support.tiers import wide
from tp_transformers import PlanError

interface = pytest.importorskip(
    "transformers.distributed.tensor_parallel", reason="the interface is of transformers 5.16 and later"
)

TOLERANCE = 1e-4  # fp32 sums in another order
LAYERS = "model.layers.*"


class Columns(interface.TensorParallelLayer):
    """Output features cut; the input is whole."""

    def __init__(self, *, output_layouts: Any = None, use_local_output: bool = True) -> None:
        self.input_layouts = Replicate()
        self.output_layouts = output_layouts or Shard(-1)
        self.use_local_output = use_local_output

    def shard_param(self, module, param, mesh):
        whole = module._parameters.get(param)
        if whole is not None:
            part = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[param] = nn.Parameter(part, requires_grad=whole.requires_grad)

    def transform_inputs_pre_forward(self, module, args, kwargs, mesh):
        x = args[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
        return (x.redistribute(placements=[Replicate()]), *args[1:]), kwargs

    def transform_output_post_forward(self, module, output, mesh):
        output = output.redistribute(placements=[self.output_layouts])
        return output.to_local() if self.use_local_output else output


class Rows(Columns):
    """Input features cut; the output is summed."""

    def __init__(self) -> None:
        super().__init__(output_layouts=Replicate())
        self.input_layouts = Shard(-1)

    def shard_param(self, module, param, mesh):
        whole = module._parameters[param]
        part = distribute_tensor(whole, mesh, [Shard(1) if whole.ndim == 2 else Replicate()], src_data_rank=None)
        module._parameters[param] = nn.Parameter(part, requires_grad=whole.requires_grad)

    def transform_inputs_pre_forward(self, module, args, kwargs, mesh):
        return (DTensor.from_local(args[0], mesh, [self.input_layouts], run_check=False), *args[1:]), kwargs


class Embedding(Columns):
    """The hidden dim of an embedding cut; the output is gathered."""

    def __init__(self) -> None:
        super().__init__(output_layouts=Replicate())

    def shard_param(self, module, param, mesh):
        whole = module._parameters[param]
        part = distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(part, requires_grad=whole.requires_grad)


class Picky(Columns):
    def validate_param(self, module, param, mesh, parameter_name=None):
        raise ValueError(f"{parameter_name} is not for me")


class Counted(interface.TensorParallelLayer):
    """Leaves its parameters whole; its whole forward is its own, which counts the calls."""

    calls = 0

    def install_forward(self, module, mesh):
        inner = module.forward

        def forward(*args, **kwargs):
            Counted.calls += 1
            return inner(*args, **kwargs)

        module.forward = forward
        return module


PLAN = {
    **{f"{LAYERS}.self_attn.{name}_proj": "my_columns" for name in "qkv"},
    f"{LAYERS}.self_attn.o_proj": "my_rows",
    f"{LAYERS}.mlp.gate_proj": "my_rep",
    f"{LAYERS}.mlp.up_proj": "my_rep",
    f"{LAYERS}.input_layernorm": "my_count",
}


def registered(run: Any) -> Any:
    """The result of `run()` while the names are registered with transformers' interface."""
    names = {"my_columns": Columns(), "my_rows": Rows(), "my_count": Counted(), "my_picky": Picky()}
    names["my_rep"] = interface.ColwiseParallel(output_layouts=Replicate())  # a class of transformers' own
    for name, style in names.items():
        interface.ParallelInterface.register(name, style)
    try:
        return run()
    finally:
        for name in names:
            del interface.ParallelInterface._global_mapping[name]


def with_registered(folder: str, reference_file: str) -> dict[str, Any]:
    """Run on every rank: a load with registered strategies, compared with one process."""
    model = registered(lambda: load(folder, tp_plan=PLAN))
    Counted.calls = 0
    seen, reference = observe(model), torch.load(reference_file)
    calls, layers = Counted.calls, model.config.num_hidden_layers
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.layers[0].mlp.gate_proj.weight.zero_()
        inputs = torch.arange(6)[None]
        changed = relative(copied(inputs).logits, model(inputs).logits)
    return {
        **compare_seen(model, seen, reference),
        "type": type(model.model.layers[0].mlp.gate_proj.weight),
        "count": calls > 0 and calls % layers == 0,
        "read": excess_read(model, folder),
        "changed": changed,
    }


@pytest.mark.distributed
@pytest.mark.parametrize("size", wide([2, 4], 1))
def test_registered_strategies_give_one_processs_numbers(pool: Pool, cases: Any, size: int) -> None:
    case = cases(8, 4)
    for result in pool.run(size, with_registered, case.folder, case.reference):
        assert result["logits"] < TOLERANCE
        assert result["tokens"]
        assert result["grads"][1] < TOLERANCE, result["grads"]
        assert issubclass(result["type"], DTensor)
        assert result["count"]
        assert result["read"] == 0  # only the slices were read
        assert result["changed"] > 1e-3  # a deep copy computes with its own weights


def configured(folder: str, reference_file: str) -> float:
    """Run on every rank: the plan in a DistributedConfig, as the documentation writes it."""
    from transformers import DistributedConfig

    config = DistributedConfig(tp_size=2, tp_plan={name: PLAN[name] for name in PLAN if "self_attn" in name})
    model = registered(lambda: load(folder, tp_plan=None, distributed_config=config))
    assert model.tp_plan[f"{LAYERS}.self_attn.q_proj"] == "my_columns"
    assert model.tp_plan[f"{LAYERS}.mlp.down_proj"] == "rowwise"
    assert tp_transformers.is_tensor_parallel(model)
    return relative(observe(model)["logits"], torch.load(reference_file)["logits"])


@pytest.mark.distributed
def test_a_distributed_config_names_them(pool: Pool, cases: Any) -> None:
    case = cases(8, 4)
    assert max(pool.run(2, configured, case.folder, case.reference)) < TOLERANCE


def refused(folder: str, plan: dict[str, Any]) -> str:
    """Run on every rank."""
    with pytest.raises(PlanError) as caught:
        registered(lambda: load(folder, tp_plan=plan))
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({f"{LAYERS}.mlp.gate_proj": "my_picky"}, "mlp.gate_proj.weight is not for me"),
        ({f"{LAYERS}.input_layernorm": interface.SequenceParallel()}, "install_forward replaces parameters"),
        ({f"{LAYERS}.mlp.gate_up_proj": "my_unheard"}, "unknown strategy 'my_unheard'"),
    ],
    ids=["its own check", "parameters replaced", "unknown"],
)
def test_one_that_does_not_fit_is_refused_before_the_load(pool: Pool, cases: Any, plan: Any, said: str) -> None:
    case = cases(8, 4)
    assert all(said in message for message in pool.run(2, refused, case.folder, plan))


@pytest.mark.distributed
def test_heads_that_it_cannot_cut_are_refused(pool: Pool, cases: Any) -> None:
    case = cases(6, 3)
    messages = pool.run(2, refused, case.folder, PLAN)
    assert all("does not know of its 3 heads" in message for message in messages)


def test_our_base_class_with_their_methods_is_refused() -> None:
    class Mixed(tp_transformers.strategies.TensorParallelLayer):
        def shard_param(self, module: Any, param: Any, mesh: Any) -> None: ...

    with pytest.raises(PlanError, match="Inherit from transformers' TensorParallelLayer"):
        tp_transformers.strategies.ParallelInterface.register("mixed", Mixed)


def an_embedding(folder: str, reference_file: str) -> dict[str, Any]:
    """Run on every rank: an embedding cut by a style, which gathers; the style is registered by its class."""
    plan = {"model.embed_tokens": "my_embedding", "lm_head": "colwise_rep"}
    interface.ParallelInterface.register("my_embedding", Embedding)
    try:
        model = load(folder, tp_plan=plan)
    finally:
        del interface.ParallelInterface._global_mapping["my_embedding"]
    local = tp_transformers.local_tensor(model.model.embed_tokens.weight)
    return {
        "logits": relative(observe(model)["logits"], torch.load(reference_file)["logits"]),
        "width": (local.shape[1] * model.tp_size, model.config.hidden_size),
    }


@pytest.mark.distributed
def test_an_embedding_is_cut_by_a_registered_class(pool: Pool, cases: Any) -> None:
    case = cases(8, 4)
    for result in pool.run(2, an_embedding, case.folder, case.reference):
        assert result["logits"] < TOLERANCE
        assert len(set(result["width"])) == 1
