"""Other people's functions of parameters: as in one process on every kind of parameter, or refused by name."""

from __future__ import annotations

import copy
import traceback
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.models import load
from tests.support.on_ranks import on_ranks
from tests.support.parameter_functions import DIRECT, FUNCTIONS, OF_OTHERS, UTILS
from tests.support.tiers import wide
from tp_transformers.strategies import shard_of

KINDS: dict[str, tuple[tuple[int, int], str]] = {
    "plain shard": ((9, 3), "model.layers.0.self_attn.q_proj"),
    "DTensor, of columns": ((8, 4), "model.layers.0.mlp.down_proj"),
    "shared KV head": ((8, 1), "model.layers.0.self_attn.k_proj"),
    "plain, of columns": ((9, 3), "model.layers.0.self_attn.o_proj"),
    "DTensor": ((8, 4), "model.layers.0.self_attn.q_proj"),
    "replicated": ((9, 3), "model.layers.0.input_layernorm"),
    "embedding": ((9, 3), "model.embed_tokens"),
}
"""Of a Llama with so many query and KV heads on 2 ranks, a module with such a weight."""

TOLERANCE = 1e-4
"""fp32: gradients are sums over ranks, in another order."""


def _case(model: nn.Module, path: str) -> tuple[nn.Module, Tensor]:
    """The module at `path`, and what it is given; column-parallel in, full out, or the other way round."""
    module = model.get_submodule(path)
    torch.manual_seed(7)
    if isinstance(module, nn.Embedding):
        return module, torch.arange(6).reshape(2, 3)
    shape = shard.shape if (shard := shard_of(module.weight)) is not None else module.weight.shape
    x = torch.randn(2, 3, shape[-1])
    return module, x


def _seen(value: Any) -> Any:
    """The full values of what a function returned."""
    if isinstance(value, list | tuple):
        return [_seen(each) for each in value]
    if isinstance(value, Tensor):
        found = value.full_tensor() if isinstance(value, DTensor) else tp_transformers.full_tensor(value)
        return found.detach().as_subclass(Tensor).double()
    return value


def run(model: nn.Module, path: str, names: list[str]) -> dict[str, Any]:
    """By name of a function, the full values of its results and of the parameters after it, or its error."""
    found: dict[str, Any] = {}
    for name in names:
        copied = copy.deepcopy(model)
        module, x = _case(copied, path)
        strategy = getattr(module, "tp_strategy", None)
        if strategy is not None:
            around = _Ends(strategy, module)
            module.register_forward_pre_hook(around.cut)
            module.register_forward_hook(around.join)
        torch.manual_seed(5)
        try:
            result = FUNCTIONS[name](module, x)
            found[name] = [_seen(result), [_seen(param) for _, param in sorted(module.named_parameters())]]
        except Exception as error:
            trace = "".join(traceback.format_exception(error)[-4:])
            found[name] = (
                type(error).__name__,
                isinstance(error, tp_transformers.TensorParallelError),
                str(error),
                trace,
            )
    return found


class _Ends:
    """Hooks that cut a full input where a module wants its features, and gather an output that is cut; not traced."""

    def __init__(self, strategy: Any, module: nn.Module) -> None:
        shard = shard_of(module.weight)
        self.shard, self.dim = shard, None if shard is None or shard.layout is None else shard.layout.dim
        self.is_linear = isinstance(module, nn.Linear)

    @torch.compiler.disable
    def cut(self, module: nn.Module, args: Any) -> Any:
        if not self.is_linear or self.dim != 1:
            return None
        return (_own_features(args[0], self.shard),)

    @torch.compiler.disable
    def join(self, module: nn.Module, args: Any, output: Tensor) -> Any:
        if not self.is_linear or self.dim != 0:
            return None
        return _AllFeatures.apply(output, self.shard)


def _own_features(x: Tensor, shard: Any) -> Tensor:
    return torch.cat([x[..., start:stop] for start, stop in shard.layout.split.ranges[shard.group.rank]], -1)


class _AllFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, shard: Any) -> Tensor:
        ctx.shard = shard
        columns = type(shard)((shard.shape[0], output.numel() // output.shape[-1]), shard.layout, shard.group)
        return columns.full(output.reshape(-1, output.shape[-1]).T.contiguous()).T.reshape(*output.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        own = _own_features(grad, ctx.shard)
        shared = ctx.shard.layout.split.shared(ctx.shard.group.rank)
        for part in shared:  # whose gradients the module adds up
            own[..., part.local : part.local + part.length] /= len(part.ranks)
        return own, None


def run_loaded(folder: str, path: str, names: list[str]) -> dict[str, Any]:
    """Runs on every rank."""
    return run(load(folder), path, names)


def _difference(found: Any, expected: Any) -> float:
    if isinstance(expected, list):
        return max((_difference(*pair) for pair in zip(found, expected, strict=True)), default=0.0)
    if isinstance(expected, Tensor):
        if found.shape != expected.shape:
            return float("inf")
        if not torch.equal(found.isnan(), expected.isnan()):
            return float("inf")
        found, expected = found.nan_to_num(), expected.nan_to_num()
        scale = max(float(expected.abs().max()), 1e-3) if expected.numel() else 1.0
        return float((found - expected).abs().max()) / scale if expected.numel() else 0.0
    return 0.0 if found == expected else float("inf")


def verdict(ranks: list[Any], expected: Any) -> str:
    """`right`, `as one process: ERROR`, `refused: TEXT`, or `WRONG: ...`."""
    if isinstance(expected, tuple):
        same = all(isinstance(found, tuple) and found[0] == expected[0] for found in ranks)
        return f"as one process: {expected[0]}" if same else f"WRONG: {ranks[0]}"
    if all(isinstance(found, tuple) for found in ranks):
        if all(found[1] and found[2] == ranks[0][2] for found in ranks):
            return f"refused: {ranks[0][2]}"
        return f"WRONG: {ranks[0][0]}: {ranks[0][2]}\n{ranks[0][3]}"
    if any(isinstance(found, tuple) for found in ranks):
        return f"WRONG: some ranks raise {next(found for found in ranks if isinstance(found, tuple))}"
    worst = max(_difference(found, expected) for found in ranks)
    return f"right ({worst:.0e})" if worst < TOLERANCE else f"WRONG: off by {worst:.2g}"


@pytest.mark.parametrize("kind", wide(KINDS, 1))
def test_functions_of_parameters_are_right_or_refused(pool, cases, kind) -> None:
    heads, path = KINDS[kind]
    folder = cases(*heads, num_hidden_layers=1).folder
    names = list(FUNCTIONS)
    expected = run(AutoModelForCausalLM.from_pretrained(folder), path, names)
    ranks = pool.run(2, run_loaded, folder, path, names)
    rows = {name: verdict([found[name] for found in ranks], expected[name]) for name in names}
    print(f"\n{kind}, {path} of a Llama with {heads[0]} query and {heads[1]} KV heads on 2 ranks")
    for name, text in rows.items():
        print(f"  {name:40} {text}")
    assert not [name for name, text in rows.items() if text.startswith("WRONG")]


def test_every_function_of_torch_has_a_row() -> None:
    given = {name.partition(" ")[0] for name in UTILS}
    assert set(nn.utils.__all__) - given <= OF_OTHERS
    assert len(DIRECT) >= 14


@on_ranks(2, (8, 4))
def test_a_parametrization_is_compiled_after_a_graph_break(folder) -> None:
    """torch.compile then skips the code of the forwards of all modules, and traces what they call."""
    path, name, look_up = "model.layers.0.self_attn.q_proj", "utils.parametrize, torch.compile", nn.Embedding.forward

    def looked_up(module: nn.Embedding, ids: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return look_up(module, ids)

    with mock.patch.object(nn.Embedding, "forward", looked_up):
        module, ids = _case(load(folder), "model.embed_tokens")
        torch.compile(module, backend="eager")(ids)
    expected, found = (
        run(model, path, [name])[name] for model in (AutoModelForCausalLM.from_pretrained(folder), load(folder))
    )
    assert _difference(found, expected) < TOLERANCE, found
