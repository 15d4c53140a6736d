"""Each strategy on the modules that it fits, for tests that compare it with the plain module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.pytorch_utils import Conv1D

from tests.support.modules import (
    HIDDEN,
    NORMS,
    TOKENS,
    Add,
    Biased,
    Block,
    ByHead,
    LanguageModel,
    Latent,
    Routed,
    Rules,
    Scale,
    Sinks,
    States,
    WithIdentity,
    gpt_oss_experts,
    llama4_experts,
    mixtral_experts,
    randn,
    randomized,
    routed_inputs,
)
from tp_transformers.seams import features
from tp_transformers.slices.layout import Ranks, Split, heads, packed

TOLERANCE = 1e-12  # float64: only the order of the sums differs
FLOAT32 = 1e-5  # float32: only the order of the sums differs


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


# Cases: strategy -> what it is tried on -> a function that makes the case for a number of ranks.
LINEARS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(10, 14, bias=False),
    "linear with a bias": lambda: nn.Linear(10, 14),
    "conv1d": lambda: Conv1D(14, 10),
}

Cases = dict[str, Callable[[int], Case]]


def last(length: int, size: int) -> tuple[int, Split]:
    """The last dim, of `length`, split evenly."""
    return -1, Ranks(size).split(length)


Cut = Callable[[int], tuple[int, Split]]


def on_each(modules: dict[str, Callable[[], nn.Module]], case: Callable[[nn.Module, int], Case]) -> Cases:
    """The same case with each of some modules."""

    def made(make: Callable[[], nn.Module]) -> Callable[[int], Case]:
        return lambda size: case(make(), size)

    return {label: made(make) for label, make in modules.items()}


def on_linears(name: str, takes: Cut | None = None, leaves: Cut | None = None) -> Cases:
    def case(module: nn.Module, size: int) -> Case:
        return Case(
            module,
            {"": name},
            (randn(3, 4, 10),),
            takes=takes(size) if takes is not None else None,
            leaves=leaves(size) if leaves is not None else None,
        )

    return on_each(LINEARS, case)


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


def on_a_wide_norm(make: Callable[[], nn.Module]) -> Iterator[tuple[str, Callable[[int], Case]]]:
    """A norm over all 24 features of heads that are cut in every way."""
    tolerance = FLOAT32 if isinstance(make(), Olmo2RMSNorm) else TOLERANCE  # transformers' norms compute in float32

    def case(split: Callable[[int], Split] | None) -> Callable[[int], Case]:
        def made(size: int) -> Case:
            own = split(size) if split is not None else None
            cut = (-1, own.scaled(24 // own.length) if own is not None else Ranks(size).split(24))
            rules = {"": ("sharded_norm", {"split": own})}
            return Case(randomized(make()), rules, (randn(2, 5, 24),), takes=cut, leaves=cut, tolerance=tolerance)

        return made

    yield "features", case(None)
    yield "query heads", case(lambda size: heads(6, 6, Ranks(size))[0])
    yield "query heads that do not divide", case(lambda size: heads(8, 8, Ranks(size))[0])
    yield "query heads of KV heads that are shared", case(lambda size: heads(8, 2, Ranks(size))[0])
    yield "KV heads, some of them shared", case(lambda size: heads(8, 2, Ranks(size))[1])
    yield "a KV head that all share", case(lambda size: heads(8, 1, Ranks(size))[1])


def sequence_case(make: Callable[[], nn.Module], length: int) -> Callable[[int], Case]:
    """A norm of sequences that are cut."""

    def made(size: int) -> Case:
        cut = (1, Ranks(size).split(length))
        return Case(randomized(make()), {"": "sequence_parallel"}, (randn(2, length, 6),), takes=cut, leaves=cut)

    return made


def sinks_case(name: str) -> Callable[[int], Case]:
    """A parameter of heads under a strategy of its own."""

    def made(size: int) -> Case:
        rules = {"": "local_params", "sinks": (name, {"split": heads(7, 7, Ranks(size))[0]})}
        cut = (1, Ranks(size).split(7))
        return Case(Sinks(7), rules, (randn(2, 7, 4),), takes=cut, leaves=cut)

    return made


def alibi_case(alibi: tuple[int, ...] | None, mask: tuple[int, ...] | None) -> Callable[[int], Case]:
    def made(size: int) -> Case:
        split = heads(7, 7, Ranks(size))[0]
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
            split = {"split": heads(5, 5, Ranks(size))[0]}
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
        cut = [("cut", CUT_GPT_OSS)] if "architectures" in features() else []
        for label, rules in (*cut, ("whole", whole_experts(CUT_GPT_OSS))):
            yield f"GPT-OSS, {implementation}, {label}", case(gpt_oss_experts, rules, dtype, implementation)
        # Two blocks of 8: the third rank holds none of either expert's features.
        yield f"Mixtral, {implementation}, narrow", case(mixtral_experts, CUT_MIXTRAL, dtype, 5, 12, implementation)
    yield "Llama 4, cut", lambda size: Case(llama4_experts(), CUT_LLAMA4, (randn(5 * 3, HIDDEN),))
    yield "Llama 4, whole", lambda size: Case(llama4_experts(), whole_experts(CUT_LLAMA4), (randn(5 * 3, HIDDEN),))


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
    "colwise": on_linears("colwise", leaves=lambda size: last(14, size)),
    "colwise_rep": on_linears("colwise_rep"),
    "colwise_gather_output": on_linears("colwise_gather_output"),
    "rowwise": {
        **on_linears("rowwise", takes=lambda size: last(10, size)),
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
        **on_each(
            LINEARS,
            lambda module, size: Case(
                module, {"": "packed_colwise"}, (randn(3, 10),), leaves=(-1, packed([Ranks(size).split(7)] * 2))
            ),
        ),
        "parts of different lengths": lambda size: Case(
            nn.Linear(10, 14),
            {"": ("packed_colwise", {"parts": (5, 9)})},
            (randn(3, 10),),
            leaves=(-1, packed([Ranks(size).split(5), Ranks(size).split(9)])),
        ),
        "a block": lambda size: Case(
            Block(nn.Linear(6, 22), nn.Linear(11, 6), is_packed=True),
            {"up": "packed_colwise", "down": "rowwise"},
            (randn(5, 6),),
        ),
    },
    "packed_rowwise": on_each(
        LINEARS,
        lambda module, size: Case(
            module, {"": "packed_rowwise"}, (randn(3, 10),), takes=(-1, packed([Ranks(size).split(5)] * 2))
        ),
    ),
    "local_colwise": {
        **in_a_block("local_colwise", "local_rowwise"),
        "an embedding": lambda size: Case(
            nn.Embedding(9, 7), {"": "local_colwise"}, (torch.tensor([[8, 0], [3, 3]]),), {}, None, last(7, size)
        ),
        "one parameter a feature": lambda size: Case(
            Scale(7), {"": "local_colwise"}, (randn(3, 7),), takes=last(7, size), leaves=last(7, size)
        ),
    },
    "local_rowwise": {
        **in_a_block("local_colwise", "local_rowwise", "gather"),
        **{f"{label}, summed": case for label, case in in_a_block("colwise", "local_rowwise", "all_reduce").items()},
    },
    "local_packed_colwise": in_a_block("local_packed_colwise", "local_rowwise", is_packed=True),
    "local_packed_rowwise": on_each(
        {
            "linears": lambda: Block(nn.Linear(6, 14), nn.Linear(14, 6)),
            "conv1d": lambda: Block(Conv1D(14, 6), Conv1D(6, 14)),
            "a block that returns a tuple": lambda: Block(nn.Linear(6, 14), nn.Linear(14, 6), returns_more=True),
        },
        lambda module, size: Case(
            module,
            {"": "gather", "up": "local_packed_colwise", "down": "local_packed_rowwise"},
            (randn(3, 6),),
        ),
    ),
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
    "moe_tp_experts": {name: of for name, of in on_experts() if "whole" not in name or "expert_parallel" in features()},
    "moe_all_to_all": {
        "tokens that all ranks have": lambda size: Case(
            Routed(mixtral_experts(5), HIDDEN, 5), {"experts": "moe_all_to_all"}, (randn(TOKENS, HIDDEN),)
        ),
    },
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
        f"{label}, {length} tokens": sequence_case(make, length)
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
    "colwise_loss": on_each(LINEARS, lambda module, size: Case(module, {"": "colwise_loss"}, (randn(3, 10),))),
    "loss_parallel": {
        "without labels": lambda size: Case(
            LanguageModel(10, 7), {"": "loss_parallel", "head": "colwise_loss"}, (randn(3, 10),)
        ),
    },
    "sharded_norm": {
        **{f"{name}, {label}": case for name, make in NORMS.items() for label, case in on_a_wide_norm(make)},
        "LayerNorm without a bias": dict(on_a_wide_norm(lambda: nn.LayerNorm(24, bias=False)))["features"],
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
            leaves=last(10, size),
        ),
    },
    "local_params": {f"a parameter that is {name}": sinks_case(name) for name in ("colwise", "local_colwise")},
    "replicate": on_each(
        {**LINEARS, "layer norm": lambda: nn.LayerNorm(10)},
        lambda module, size: Case(module, {"": "replicate"}, (randn(3, 10),)),
    ),
    "replicate_once": {
        "added to a sum": lambda size: Case(
            nn.Sequential(Block(nn.Linear(6, 11), nn.Linear(11, 6)), Add(6)),
            {"": "gather", "0.up": "local_colwise", "0.down": "local_rowwise", "1": "replicate_once"},
            (randn(3, 6),),
        ),
    },
    "replicated_with_grad_allreduce": on_a_norm_of_heads("replicated_with_grad_allreduce"),
}
