"""Each strategy alone, on one module, held against the plain module: forward, input and parameter gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import GptOssConfig, Llama4TextConfig, MixtralConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.pytorch_utils import Conv1D

import tp_transformers
from tests.support.models import relative
from tests.support.tiers import wide
from tp_transformers import TensorParallelLayer
from tp_transformers.plans.bind import Resolution
from tp_transformers.ranks.collectives import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region
from tp_transformers.ranks.mesh import join
from tp_transformers.slices.layout import Layout, Split, even, heads, packed
from tp_transformers.strategies import STRATEGIES, ColwiseParallel, ParamShard, SequenceParallel, attach, take

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-12  # float64: only the order of the sums differs
FLOAT32 = 1e-5  # float32: only the order of the sums differs

Rules = dict[str, Any]
"""Module or parameter -> its strategy, or its strategy's name, or either with options of `bind`."""


def shard_module(module: nn.Module, rules: Rules, group: Any) -> nn.Module:
    """What the loader does to a model, here to any module; "" names the module itself."""
    local = copy.deepcopy(module)
    modules = dict(local.named_modules())
    module_strategies, param_strategies = {}, {}
    for name, rule in rules.items():
        strategy, options = rule if isinstance(rule, tuple) else (rule, {})
        strategy = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
        if name in modules:
            module_strategies[name] = strategy.bind(modules[name], group.size, name=name, **options)
            module_strategies[name].check(modules[name])
        else:
            owner = name.rpartition(".")[0]
            param_strategies[name] = strategy.bind(modules[owner], group.size, name=name, **options)
            module_strategies.setdefault(owner, TensorParallelLayer())
    shards: dict[str, dict[str, ParamShard]] = {name: {} for name in modules}
    for name, param in list(local.named_parameters()):
        owner, _, param_type = name.rpartition(".")
        if owner in module_strategies:
            param_strategies.setdefault(name, module_strategies[owner])
        shard = Resolution({}, param_strategies, {}, {}).shard(name, param.shape, group)
        own = take(param.detach(), shard.layout, group.rank).clone()
        modules[owner]._parameters[param_type] = shard.wrap(own, requires_grad=True)
        shards[owner][param_type] = shard
    for name, strategy in module_strategies.items():
        attach(modules[name], strategy, shards[name], group.device_mesh)
    return local


@dataclass
class Case:
    """A module under a strategy, and what it is called with."""

    module: nn.Module
    rules: Rules
    inputs: tuple[Tensor, ...]
    keywords: dict[str, Tensor] = field(default_factory=dict)
    takes: tuple[int, Split] | None = None
    """The dim along which the first input arrives cut, and how; None if it arrives whole."""
    leaves: tuple[int, Split] | None = None
    """The same of the output."""
    tolerance: float = TOLERANCE


def own_part(x: Tensor, cut: tuple[int, Split] | None, rank: int) -> Tensor:
    """What `rank` has of `x`."""
    if cut is None:
        return x
    return x.index_select(cut[0], torch.tensor(held(cut[1], rank), dtype=torch.int))


def held(split: Split, rank: int) -> list[int]:
    return [index for start, stop in split.ranges[rank] for index in range(start, stop)]


def whole_gradient(grad: Tensor, like: Tensor, cut: tuple[int, Split] | None, group: Any) -> Tensor:
    """The sum of the gradients that the ranks have of their parts."""
    if cut is None:
        return grad
    total = torch.zeros_like(like).index_add(cut[0], torch.tensor(held(cut[1], group.rank), dtype=torch.int), grad)
    dist.all_reduce(total)
    return total


def first_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def compare(case: Case, group: Any, by_keyword: str | None) -> dict[str, float]:
    """The largest relative difference of the output and of every gradient between the split and the plain module."""
    reference = [x.clone().requires_grad_(x.is_floating_point()) for x in case.inputs]
    expected = case.module(*reference, **case.keywords)
    torch.manual_seed(1)
    weights = torch.randn_like(first_of(expected))
    (first_of(expected) * weights).sum().backward()

    local = shard_module(case.module, case.rules, group)
    given = [own_part(x, case.takes if not i else None, group.rank).clone() for i, x in enumerate(case.inputs)]
    given = [x.requires_grad_(x.is_floating_point()) for x in given]
    before = [dict(module.__dict__) for module in local.modules()]
    called = ((), {by_keyword: given[0]}) if by_keyword else (given, {})
    output = local(*called[0], **called[1], **case.keywords)
    # The forward leaves the module as it was.
    for module, attributes in zip(local.modules(), before, strict=True):
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[name] is value for name, value in attributes.items())
    assert all(hasattr(param, "tp_shard") for param in local.parameters())

    # Where several ranks compute the same part of the output, each has a share of its gradient.
    own_weights = own_part(weights, case.leaves, group.rank)
    if case.leaves is not None:
        split = case.leaves[1]
        holders = [[other for other in range(group.size) if i in held(split, other)] for i in held(split, group.rank)]
        shares = [(other.index(group.rank) + 1) / sum(range(1, len(other) + 1)) for other in holders]
        shape = [1] * weights.ndim
        shape[case.leaves[0]] = -1
        own_weights = own_weights * torch.tensor(shares, dtype=weights.dtype).view(shape)
    (first_of(output) * own_weights).sum().backward()

    differences = {"output": relative(first_of(output), own_part(first_of(expected), case.leaves, group.rank))}
    if isinstance(expected, tuple):
        assert isinstance(output, tuple)
        differences["others"] = relative(output[1], expected[1])
    for i, (own, plain) in enumerate(zip(given, reference, strict=True)):
        if own.is_floating_point():
            grad = whole_gradient(own.grad, plain, case.takes if not i else None, group)
            differences[f"input {i}"] = relative(grad, plain.grad)
    for name, param in case.module.named_parameters():
        mine = local.get_parameter(name)
        assert torch.equal(tp_transformers.full_tensor(mine), param)
        differences[name] = relative(tp_transformers.full_tensor(mine, mine.grad), param.grad)
    case.module.zero_grad()
    # Without gradients, a forward takes other ways.
    with torch.no_grad():
        silent = first_of(local(*called[0], **called[1], **case.keywords))
    differences["without gradients"] = relative(silent, first_of(output).detach())
    return differences


def run_cases(name: str) -> dict[str, tuple[float, dict[str, float]]]:
    """Every case of a strategy: its tolerance and its differences."""
    group = join()
    results = {}
    for label, make in CASES[name].items():
        torch.manual_seed(0)
        case = make(group.size)
        case.module.to(case.inputs[0].dtype if case.inputs[0].is_floating_point() else torch.float64)
        keyword = "input" if isinstance(case.module, nn.Linear | nn.Embedding) else None
        for by_keyword in (None, keyword) if keyword else (None,):
            results[f"{label}{' by keyword' if by_keyword else ''}"] = case.tolerance, compare(case, group, by_keyword)
    return results


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# Modules.


class Block(nn.Module):
    """down(relu(up(x)) * scale), as an MLP; `returns` says what else it returns."""

    def __init__(self, up: nn.Module, down: nn.Module, *, is_packed: bool = False, returns_more: bool = False) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.is_packed, self.returns_more = is_packed, returns_more

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.up(x))
        if self.is_packed:
            gate, up = y.chunk(2, -1)
            y = gate * up
        y = self.down(y)
        return (y, x.detach().sum()) if self.returns_more else y


class Decoder(nn.Module):
    """A layer of a norm and a block, and a norm after it; returns all that stands between them, as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.norm, self.end = nn.Identity(), nn.LayerNorm(6), nn.LayerNorm(6)
        self.block = Block(nn.Linear(6, 11), nn.Linear(11, 6), returns_more=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        first = self.entry(x)
        second = first + self.block(self.norm(first))[0]
        last = self.end(second)
        return last, (first, second, last)


class States(nn.Module):
    """Everything that a decoder returns, as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, x: Tensor) -> Tensor:
        last, states = self.decoder(x)
        return torch.cat([last, *states], -1)


class LanguageModel(nn.Module):
    """An output embedding alone."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, vocabulary)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(x)


class Scale(nn.Module):
    """x * weight + bias, feature by feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class Add(nn.Module):
    """x + weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class ByHead(nn.Module):
    """Apply a norm to every head of (batch, heads * width) features."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.width = norm, width

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(-1, (-1, self.width))).flatten(-2)


class Biased(nn.Module):
    """Scores of (batch, heads, queries, keys) with biases that are made for all heads, as in BLOOM and Falcon."""

    def forward(self, scores: Tensor, *, alibi: Any = None, attention_mask: Any = None) -> Tensor:
        batch, heads = scores.shape[:2]
        if alibi is not None:
            scores = scores * alibi.view(batch, heads, 1, -1)
        return scores if attention_mask is None else scores + attention_mask


class Sinks(nn.Module):
    """Scores of (batch, heads, keys), to which every head adds a parameter of its own."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, scores: Tensor) -> Tensor:
        return scores * self.sinks[:, None]


class Latent(nn.Module):
    """What is peculiar to latent attention: a rotary key for all heads, beside the latent that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.compress, self.expand = nn.Linear(6, 5 + 3), nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        latent, key = self.compress(x).split([5, 3], -1)
        return self.expand(latent) * key.square().sum(-1, keepdim=True)


class WithIdentity(nn.Module):
    """Two experts, one of which returns its input."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.expert, self.identity = expert, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return 0.3 * self.expert(x) + 0.7 * self.identity(x)


class Routed(nn.Module):
    """A router and its experts."""

    def __init__(self, experts: nn.Module, hidden: int, count: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(hidden, count), experts

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        return self.experts(x, ids, weights)


def randomized(module: nn.Module) -> nn.Module:
    """Experts and norms leave their parameters empty, or at one."""
    with torch.no_grad():
        for param in module.parameters():
            param.normal_(std=0.5)
    return module


HIDDEN, TOKENS = 16, 7


def mixtral_experts(count: int = 5, width: int = 20, implementation: str = "eager") -> nn.Module:
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=width, num_local_experts=count)
    config._experts_implementation = implementation
    return randomized(MixtralExperts(config))


def gpt_oss_experts(implementation: str = "eager") -> nn.Module:
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=20, num_local_experts=5)
    config._experts_implementation = implementation
    return randomized(GptOssExperts(config))


def llama4_experts() -> nn.Module:
    config = Llama4TextConfig(hidden_size=HIDDEN, intermediate_size=20, num_local_experts=5)
    return randomized(Llama4TextExperts(config))


def routed_inputs(dtype: torch.dtype, count: int = 5) -> tuple[Tensor, ...]:
    """(hidden states, expert ids, routing weights) of 7 tokens, two experts a token."""
    ids = torch.stack([torch.randperm(count)[:2] for _ in range(TOKENS)])
    return torch.randn(TOKENS, HIDDEN, dtype=dtype), ids, torch.rand(TOKENS, 2, dtype=dtype)


# Cases: strategy -> what it is tried on -> a function that makes the case for a number of ranks.

LINEARS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(10, 14, bias=False),
    "linear with a bias": lambda: nn.Linear(10, 14),
    "conv1d": lambda: Conv1D(14, 10),
}

Cases = dict[str, Callable[[int], Case]]


def on_linears(name: str, **cuts: Callable[[int], tuple[int, Split]]) -> Cases:
    def case(make: Callable[[], nn.Module]) -> Callable[[int], Case]:
        return lambda size: Case(
            make(), {"": name}, (randn(3, 4, 10),), **{key: cut(size) for key, cut in cuts.items()}
        )

    return {label: case(make) for label, make in LINEARS.items()}


def on_an_embedding(name: str, **options: Any) -> Cases:
    ids = torch.tensor([[0, 3, 22, 11], [5, 3, 17, 8]])
    return {
        "embedding": lambda size: Case(nn.Embedding(23, 7, **options), {"": name}, (ids,)),
        "embedding with padding": lambda size: Case(nn.Embedding(23, 7, padding_idx=3, **options), {"": name}, (ids,)),
    }


def in_a_block(up: Rules | str, down: Rules | str, around: str = "gather", *, is_packed: bool = False) -> Cases:
    """The pair of strategies within a block that `around` makes whole."""
    rules = {"": around, "up": up, "down": down}
    width = 22 if is_packed else 11

    def case(first: nn.Module, second: nn.Module, **options: Any) -> Case:
        return Case(Block(first, second, is_packed=is_packed, **options), rules, (randn(2, 5, 6),))

    return {
        "linears": lambda size: case(nn.Linear(6, width), nn.Linear(11, 6)),
        "linears without biases": lambda size: case(nn.Linear(6, width, bias=False), nn.Linear(11, 6, bias=False)),
        "conv1d": lambda size: case(Conv1D(width, 6), Conv1D(6, 11)),
        "a block that returns a tuple": lambda size: case(nn.Linear(6, width), nn.Linear(11, 6), returns_more=True),
    }


def on_a_rms_norm(make: Callable[[], nn.Module], tolerance: float) -> Iterator[tuple[str, Callable[[int], Case]]]:
    """A norm over all 24 features of heads that are cut in every way."""

    def case(split: Callable[[int], Split] | None) -> Callable[[int], Case]:
        def made(size: int) -> Case:
            own = split(size) if split is not None else None
            cut = (-1, own.scaled(24 // own.length) if own is not None else even(24, size))
            rules = {"": ("sharded_norm", {"split": own})}
            return Case(randomized(make()), rules, (randn(2, 5, 24),), takes=cut, leaves=cut, tolerance=tolerance)

        return made

    yield "features", case(None)
    yield "query heads", case(lambda size: heads(6, 6, size)[0])
    yield "query heads that do not divide", case(lambda size: heads(8, 8, size)[0])
    yield "query heads of KV heads that are shared", case(lambda size: heads(8, 2, size)[0])
    yield "KV heads, some of them shared", case(lambda size: heads(8, 2, size)[1])
    yield "a KV head that all share", case(lambda size: heads(8, 1, size)[1])


def alibi_case(alibi: tuple[int, ...] | None, mask: tuple[int, ...] | None) -> Callable[[int], Case]:
    def made(size: int) -> Case:
        split = heads(7, 7, size)[0]
        keywords = {
            name: randn(*shape) for name, shape in (("alibi", alibi), ("attention_mask", mask)) if shape is not None
        }
        cut, rules = (1, split), {"": ("alibi", {"split": split})}
        return Case(Biased(), rules, (randn(2, 7, 3, 4),), keywords, takes=cut, leaves=cut)

    return made


def on_a_norm_of_heads(name: str) -> Cases:
    """A norm within every head, between layers that are cut by heads."""

    def case(norm: Callable[[], nn.Module]) -> Callable[[int], Case]:
        def made(size: int) -> Case:
            split = {"split": heads(5, 5, size)[0]}
            block = nn.Sequential(nn.Linear(6, 20), ByHead(randomized(norm()), 4), nn.Linear(20, 6))
            return Case(block, {"0": ("colwise", split), "1.norm": name, "2": ("rowwise", split)}, (randn(2, 6),))

        return made

    return {"layer norm": case(lambda: nn.LayerNorm(4)), "RMS norm": case(lambda: nn.RMSNorm(4, eps=1e-6))}


CUT_MIXTRAL = {"": "moe_tp_experts", "gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
CUT_LLAMA4 = {"": "moe_tp_experts", "gate_up_proj": "packed_rowwise", "down_proj": "colwise"}
CUT_GPT_OSS = {
    "": "moe_tp_experts",
    "gate_up_proj": ("rowwise", {"unit": 16}),
    "gate_up_proj_bias": ("rowwise", {"unit": 16}),
    "down_proj": "colwise",
    "down_proj_bias": "replicate_once",
}
IMPLEMENTATIONS = ["eager", *sorted({"grouped_mm", "batched_mm"} & set(ALL_EXPERTS_FUNCTIONS.valid_keys()))]


def whole_experts(rules: Rules) -> Rules:
    return {name: rule if name == "" else "local" for name, rule in rules.items()}


def on_experts() -> Iterator[tuple[str, Callable[[int], Case]]]:
    def case(experts: Callable[..., nn.Module], rules: Rules, dtype: torch.dtype, *args: Any) -> Callable[[int], Case]:
        tolerance = TOLERANCE if dtype == torch.float64 else FLOAT32
        return lambda size: Case(experts(*args), rules, routed_inputs(dtype), tolerance=tolerance)

    for implementation in IMPLEMENTATIONS:
        # Grouped and batched matmuls are made for float32 and less.
        dtype = torch.float64 if implementation == "eager" else torch.float32
        for label, rules in (("cut", CUT_MIXTRAL), ("whole", whole_experts(CUT_MIXTRAL))):
            yield f"Mixtral, {implementation}, {label}", case(mixtral_experts, rules, dtype, 5, 20, implementation)
        for label, rules in (("cut", CUT_GPT_OSS), ("whole", whole_experts(CUT_GPT_OSS))):
            yield f"GPT-OSS, {implementation}, {label}", case(gpt_oss_experts, rules, dtype, implementation)
        # Two blocks of 8: the third rank holds none of either expert's features.
        yield f"Mixtral, {implementation}, narrow", case(mixtral_experts, CUT_MIXTRAL, dtype, 5, 12, implementation)
    for label, rules in (("cut", CUT_LLAMA4), ("whole", whole_experts(CUT_LLAMA4))):
        yield (
            f"Llama 4, {label}",
            lambda size, rules=rules: Case(llama4_experts(), rules, (randn(5 * 3, HIDDEN),)),
        )


def on_local_experts(count: int, implementation: str = "eager") -> Callable[[int], Case]:
    """Whole experts within a block that is made whole; the router has a part of its gradient on every rank."""
    rules = {"": "gather", "router": "replicated_with_grad_allreduce", "experts": "local"}
    return lambda size: Case(
        Routed(mixtral_experts(count, implementation=implementation), HIDDEN, count), rules, (randn(TOKENS, HIDDEN),)
    )


def on_a_decoder(lengths: tuple[int, ...] = (1, 2, 5, 6, 7), block: Rules | None = None) -> Iterator[tuple[str, Any]]:
    """Sequences of any length, down to none on some ranks, through a whole decoder."""
    local = {"block": "sequence_gather", "block.up": "local_colwise", "block.down": "local_rowwise"}
    rules = {
        "": "sequence_states",
        "entry": "sequence_scatter",
        "norm": "sequence_parallel",
        "end": "sequence_parallel_rep",
        **(block or local),
    }
    rules = {f"decoder.{name}".rstrip("."): strategy for name, strategy in rules.items()}
    for length in lengths:
        yield f"{length} tokens", lambda size, length=length: Case(randomized(States()), rules, (randn(2, length, 6),))


CASES: dict[str, Cases] = {
    "colwise": on_linears("colwise", leaves=lambda size: (-1, even(14, size))),
    "colwise_rep": on_linears("colwise_rep"),
    "colwise_gather_output": on_linears("colwise_gather_output"),
    "rowwise": {
        **on_linears("rowwise", takes=lambda size: (-1, even(10, size))),
        **on_an_embedding("rowwise"),
    },
    "rowwise_rep": on_linears("rowwise_rep"),
    "rowwise_split_input": on_linears("rowwise_split_input"),
    "embedding_rowwise": {
        **on_an_embedding("embedding_rowwise"),
        "scaled by frequency": lambda size: Case(
            nn.Embedding(23, 7, scale_grad_by_freq=True), {"": "embedding_rowwise"}, (torch.tensor([[1, 1, 20, 4]]),)
        ),
    },
    "embedding_colwise": on_an_embedding("embedding_colwise"),
    "packed_colwise": {
        label: lambda size, make=make: Case(
            make(), {"": "packed_colwise"}, (randn(3, 10),), leaves=(-1, packed([even(7, size)] * 2))
        )
        for label, make in LINEARS.items()
    }
    | {
        "parts of different lengths": lambda size: Case(
            nn.Linear(10, 14),
            {"": ("packed_colwise", {"parts": (5, 9)})},
            (randn(3, 10),),
            leaves=(-1, packed([even(5, size), even(9, size)])),
        ),
        "a block": lambda size: Case(
            Block(nn.Linear(6, 22), nn.Linear(11, 6), is_packed=True),
            {"up": "packed_colwise", "down": "rowwise"},
            (randn(5, 6),),
        ),
    },
    "packed_rowwise": {
        label: lambda size, make=make: Case(
            make(), {"": "packed_rowwise"}, (randn(3, 10),), takes=(-1, packed([even(5, size)] * 2))
        )
        for label, make in LINEARS.items()
    },
    "local_colwise": {
        **in_a_block("local_colwise", "local_rowwise"),
        "an embedding": lambda size: Case(
            nn.Embedding(9, 7), {"": "local_colwise"}, (torch.tensor([[8, 0], [3, 3]]),), leaves=(-1, even(7, size))
        ),
        "one parameter a feature": lambda size: Case(
            Scale(7), {"": "local_colwise"}, (randn(3, 7),), takes=(-1, even(7, size)), leaves=(-1, even(7, size))
        ),
    },
    "local_rowwise": {
        **in_a_block("local_colwise", "local_rowwise", "gather"),
        **{f"{label}, summed": case for label, case in in_a_block("colwise", "local_rowwise", "all_reduce").items()},
    },
    "local_packed_colwise": in_a_block("local_packed_colwise", "local_rowwise", is_packed=True),
    "local_packed_rowwise": {
        label: lambda size, first=first, second=second, returns_more=returns_more: Case(
            Block(first(), second(), returns_more=returns_more),
            {"": "gather", "up": "local_packed_colwise", "down": "local_packed_rowwise"},
            (randn(3, 6),),
        )
        for label, first, second, returns_more in (
            ("linears", lambda: nn.Linear(6, 14), lambda: nn.Linear(14, 6), False),
            ("conv1d", lambda: Conv1D(14, 6), lambda: Conv1D(6, 14), False),
            ("a block that returns a tuple", lambda: nn.Linear(6, 14), lambda: nn.Linear(14, 6), True),
        )
    },
    "gather": in_a_block("local_colwise", "local_rowwise", "gather"),
    "all_reduce": in_a_block("colwise", "local_rowwise", "all_reduce"),
    "local": {
        "linear": lambda size: Case(nn.Linear(10, 14), {"": "local"}, (randn(3, 10),)),
        "convolution": lambda size: Case(nn.Conv1d(6, 10, 3), {"": "local"}, (randn(2, 6, 9),)),
        "5 experts": on_local_experts(5),
        "3 experts": on_local_experts(3),
        "experts whose tokens are sorted": lambda size: Case(
            nn.Sequential(llama4_experts()), {"": "gather", "0": "local"}, (randn(5 * 3, HIDDEN),)
        ),
    },
    "moe_tp_experts": dict(on_experts()),
    "moe_identity_expert": {
        "beside an expert that is cut": lambda size: Case(
            WithIdentity(Block(nn.Linear(6, 11), nn.Linear(11, 6))),
            {
                "": "moe_tp_experts",
                "expert.up": "local_colwise",
                "expert.down": "local_rowwise",
                "identity": "moe_identity_expert",
            },
            (randn(3, 6),),
        ),
    },
    "sequence_parallel": {
        f"{label}, {length} tokens": lambda size, make=make, length=length: Case(
            randomized(make()),
            {"": "sequence_parallel"},
            (randn(2, length, 6),),
            takes=(1, even(length, size)),
            leaves=(1, even(length, size)),
        )
        for label, make in (
            ("layer norm", lambda: nn.LayerNorm(6)),
            ("RMS norm", lambda: nn.RMSNorm(6, eps=1e-6)),
        )
        for length in (5, 6, 7)
    },
    **{name: dict(on_a_decoder((5,))) for name in ("sequence_scatter", "sequence_parallel_rep", "sequence_states")},
    "sequence_gather": dict(on_a_decoder()),
    "sequence_whole": dict(
        on_a_decoder(block={"block": "sequence_whole", "block.up": "colwise", "block.down": "rowwise"})
    ),
    "colwise_loss": {
        label: lambda size, make=make: Case(make(), {"": "colwise_loss"}, (randn(3, 10),))
        for label, make in LINEARS.items()
    },
    "loss_parallel": {
        "without labels": lambda size: Case(
            LanguageModel(10, 7), {"": "loss_parallel", "head": "colwise_loss"}, (randn(3, 10),)
        ),
    },
    "sharded_norm": {
        # Transformers' norms compute in float32.
        **{f"Olmo2RMSNorm, {label}": case for label, case in on_a_rms_norm(lambda: Olmo2RMSNorm(24), FLOAT32)},
        **{f"RMSNorm, {label}": case for label, case in on_a_rms_norm(lambda: nn.RMSNorm(24, eps=1e-6), TOLERANCE)},
    },
    "alibi": {
        "(batch * heads, 1, keys)": alibi_case((14, 1, 4), (2, 1, 3, 4)),
        "(batch, heads, 1, keys)": alibi_case((2, 7, 1, 4), None),
        "biases that are in the mask already": alibi_case(None, (2, 7, 3, 4)),
    },
    "mla_kv_a_proj": {
        "latent attention": lambda size: Case(
            Latent(),
            {
                "compress": ("mla_kv_a_proj", {"config": SimpleNamespace(qk_rope_head_dim=3)}),
                "expand": "colwise",
            },
            (randn(2, 6),),
            leaves=(-1, even(10, size)),
        ),
    },
    "local_params": {
        f"a parameter that is {name}": lambda size, name=name: Case(
            Sinks(7),
            {"": "local_params", "sinks": (name, {"split": heads(7, 7, size)[0]})},
            (randn(2, 7, 4),),
            takes=(1, even(7, size)),
            leaves=(1, even(7, size)),
        )
        for name in ("colwise", "local_colwise")
    },
    "replicate": {
        label: lambda size, make=make: Case(make(), {"": "replicate"}, (randn(3, 10),))
        for label, make in (*LINEARS.items(), ("layer norm", lambda: nn.LayerNorm(10)))
    },
    "replicate_once": {
        "added to a sum": lambda size: Case(
            nn.Sequential(Block(nn.Linear(6, 11), nn.Linear(11, 6)), Add(6)),
            {"": "gather", "0.up": "local_colwise", "0.down": "local_rowwise", "1": "replicate_once"},
            (randn(3, 6),),
        ),
    },
    "replicated_with_grad_allreduce": on_a_norm_of_heads("replicated_with_grad_allreduce"),
}


def test_every_strategy_is_here_by_name() -> None:
    assert sorted(CASES) == sorted(STRATEGIES)


@pytest.mark.parametrize("size", wide([3, 2], 1))
@pytest.mark.parametrize("name", CASES)
def test_strategy_matches_the_plain_module(pool: Any, name: str, size: int) -> None:
    everything = pool.run(size, run_cases, name, timeout=60)
    for rank, results in enumerate(everything):
        wrong = {
            label: {key: value for key, value in differences.items() if value >= tolerance}
            for label, (tolerance, differences) in results.items()
        }
        assert not any(wrong.values()), (rank, {label: keys for label, keys in wrong.items() if keys})


def run_shared_heads() -> list[float]:
    """A packed query-key-value weight whose KV heads are replicated: every rank ends with the whole gradient."""
    group = join()
    query, kv = heads(8, 2, group.size)
    from tp_transformers.slices.layout import packed

    layout = Layout(0, packed([query, kv, kv]))
    weight = torch.arange(12.0, dtype=torch.float64).reshape(12, 1)
    shard = ParamShard(weight.shape, layout, group)
    local = shard.wrap(take(weight, layout, group.rank).clone(), requires_grad=True)
    # Every rank adds its rank + 1 to the gradient of all that it holds.
    (shard.view(local) * (group.rank + 1)).sum().backward()
    return tp_transformers.full_tensor(local, local.grad).flatten().tolist()


def test_gradients_of_shared_indices_are_summed_over_their_holders(pool: Any) -> None:
    # 4 ranks: KV head 0 on ranks 0 and 1 (1 + 2), KV head 1 on ranks 2 and 3 (3 + 4).
    expected = [1.0, 1, 2, 2, 3, 3, 4, 4, 3, 7, 3, 7]
    for result in pool.run(4, run_shared_heads):
        assert result == expected


def run_groups_of_different_ranks() -> list[list[float]]:
    """KV heads that only some ranks share, then one that all of them do, then the first again."""
    group = join()
    results = []
    for kv in (2, 1, 2):
        shard = ParamShard(torch.Size([kv]), Layout(0, heads(8, kv, group.size)[1]), group)
        local = shard.wrap(torch.ones(1), requires_grad=True)
        (shard.view(local) * (group.rank + 1)).sum().backward()
        results.append(tp_transformers.full_tensor(local, local.grad).tolist())
    return results


def test_heads_may_be_shared_by_some_ranks_and_then_by_others(pool: Any) -> None:
    # 3 ranks: KV head 0 of 2 on ranks 0 and 1 (1 + 2), KV head 1 on rank 2 (3); that of 1 on all (1 + 2 + 3).
    for results in pool.run(3, run_groups_of_different_ranks, timeout=60):
        assert results == [[3, 3], [6], [3, 3]]


def run_collectives() -> list[float]:
    group = join()
    rank, size, process_group = group.rank, group.size, group.process_group
    widths = tuple(range(1, size + 1))
    results = []

    # f: identity forward, sum backward.
    x = torch.full((2, 3), float(rank + 1), requires_grad=True)
    y = copy_to_region(x, process_group)
    (y * (rank + 1)).sum().backward()
    results += [relative(y, x.detach()), relative(x.grad, torch.full((2, 3), float(sum(widths))))]
    # g: sum forward, identity backward; the input is left as it was.
    x = torch.full((2, 3), float(rank + 1), requires_grad=True)
    y = reduce_from_region(x, process_group)
    (y * 5).sum().backward()
    results += [relative(y, torch.full((2, 3), float(sum(widths)))), relative(x.grad, torch.full((2, 3), 5.0))]
    results.append(float((x != rank + 1).any()))
    # Gather and scatter are each other's backward, along any dim.
    for dim in (0, 1, -1):
        whole = torch.arange(2.0 * 3 * sum(widths)).reshape(2, 3, sum(widths)).movedim(-1, dim)
        start = sum(widths[:rank])
        part = whole.narrow(dim, start, widths[rank])
        x = part.clone().requires_grad_()
        y = gather_from_region(x, widths, process_group, dim=dim)
        (y * whole).sum().backward()
        results += [relative(y, whole), relative(x.grad, part)]
        x = whole.clone().requires_grad_()
        y = scatter_to_region(x, widths, process_group, dim=dim)
        (y * part).sum().backward()
        results += [relative(y, part), relative(x.grad, whole)]
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_and_their_backward(pool: Any, size: int) -> None:
    for results in pool.run(size, run_collectives):
        assert max(results) == 0


def run_dtensor_output() -> bool:
    group = join()
    torch.manual_seed(0)
    module = nn.Linear(6, 7)
    x = torch.randn(2, 6)
    results = []
    for layouts in (None, Replicate()):
        local = shard_module(module, {"": ColwiseParallel(output_layouts=layouts, use_local_output=False)}, group)
        output = local(x)
        assert isinstance(output, DTensor)
        results.append(torch.allclose(output.full_tensor(), module(x), atol=1e-6))
    return all(results)


def test_outputs_can_stay_dtensors(pool: Any) -> None:
    assert all(pool.run(2, run_dtensor_output))


def run_dtensor_inputs(name: str, is_cut: bool) -> dict[str, float]:
    """A whole input, or one that torch.chunk cut, arrives as a DTensor; its gradient is one too."""
    group = join()
    torch.manual_seed(0)
    module = nn.Linear(10, 6).double()
    x = randn(2, 10)
    reference = x.clone().requires_grad_()
    expected = module(reference)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    local = shard_module(module, {"": name}, group)
    given = distribute_tensor(x, group.device_mesh, [Shard(1) if is_cut else Replicate()]).requires_grad_()
    output = local(given)
    if name == "colwise":
        output = gather_from_region(output, even(6, group.size).widths, group.process_group)
    (output * weights).sum().backward()
    return {
        "output": relative(output, expected),
        "input": relative(given.grad.full_tensor(), reference.grad),
        "weight": relative(tp_transformers.full_tensor(local.weight, local.weight.grad), module.weight.grad),
    }


@pytest.mark.parametrize("size", wide([3, 2], 1))
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", ["colwise", "colwise_rep", "rowwise", "rowwise_rep", "packed_rowwise"])
def test_inputs_may_be_dtensors(pool: Any, name: str, is_cut: bool, size: int) -> None:
    for differences in pool.run(size, run_dtensor_inputs, name, is_cut, timeout=60):
        assert max(differences.values()) < TOLERANCE, differences


def run_sequence_of_dtensors(length: int, form: str) -> dict[str, float]:
    """A norm on a sequence that arrives whole, cut or as a plain tensor, and leaves as a DTensor."""
    group = join()
    torch.manual_seed(0)
    module = randomized(nn.LayerNorm(6)).double()
    x = randn(2, length, 6)
    reference = x.clone().requires_grad_()
    expected = module(reference)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    local = shard_module(module, {"": SequenceParallel(use_local_output=False)}, group)
    cut = distribute_tensor(x, group.device_mesh, [Replicate() if form == "whole" else Shard(1)])
    given = (cut.to_local() if form == "plain" else cut).detach().clone().requires_grad_()
    output = local(given)
    assert isinstance(output, DTensor)
    assert output.placements == (Shard(1),)
    assert output.shape == x.shape
    differences = {"output": relative(output.full_tensor(), expected)}
    own_weights = distribute_tensor(weights, group.device_mesh, [Shard(1)]).to_local()
    (output.to_local() * own_weights).sum().backward()
    if form != "plain":
        differences["input"] = relative(given.grad.full_tensor(), reference.grad)
    for name, param in module.named_parameters():
        mine = local.get_parameter(name)
        differences[name] = relative(tp_transformers.full_tensor(mine, mine.grad), param.grad)
    return differences


@pytest.mark.parametrize("form", ["whole", "cut", "plain"])
@pytest.mark.parametrize("length", wide([4, 5, 6], 2))  # 4 tokens on 3 ranks: the last one has none
def test_sequences_leave_as_dtensors_of_their_length(pool: Any, length: int, form: str) -> None:
    for size in (2, 3):
        for differences in pool.run(size, run_sequence_of_dtensors, length, form, timeout=60):
            assert max(differences.values()) < TOLERANCE, differences


def run_sequence_that_no_placement_describes() -> None:
    group = join()
    local = shard_module(nn.LayerNorm(6), {"": SequenceParallel(use_local_output=False)}, group)
    with pytest.raises(ValueError, match=r"sequence cut into \[3, 2, 2\]; use use_local_output=True"):
        local(torch.ones(1, even(7, 3).widths[group.rank], 6))


def test_a_sequence_that_no_placement_describes_is_refused_on_all_ranks(pool: Any) -> None:
    pool.run(3, run_sequence_that_no_placement_describes, timeout=60)


def run_forward_that_raises() -> str:
    group = join()

    class Picky(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

    local = shard_module(Picky(4, 4), {"": "rowwise"}, group)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            local(torch.ones(1, 2))
        assert local.bias is not None
        assert isinstance(local.weight, DTensor)
    dist.barrier()
    return type(local.weight).__name__


def test_a_forward_that_raises_leaves_the_module_whole(pool: Any) -> None:
    assert pool.run(2, run_forward_that_raises) == ["DTensor", "DTensor"]
