"""Torch's styles as strategies: what they cut, what they are called, and what is said of plans that have them wrong."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

import tp_transformers
from tests.support.comparisons import relative
from tests.support.models import llama_config, load, observe
from tests.support.needs import needs
from tp_transformers import PlanError
from tp_transformers.features.peft import shard as adapters
from tp_transformers.plans import Plan, Rule
from tp_transformers.plans.bind import resolve
from tp_transformers.slices.layout import Layout, chunked
from tp_transformers.strategies import STRATEGIES, State

ATTENTION, MLP, HEAD = "model.layers.*.self_attn", "model.layers.*.mlp", "lm_head"
COLWISE, ROWWISE = ColwiseParallel(), RowwiseParallel()
KEPT = ColwiseParallel(use_local_output=False)

attention: dict[str, Any] = {f"{ATTENTION}.{name}_proj": COLWISE for name in "qkv"} | {f"{ATTENTION}.o_proj": ROWWISE}
mlp: dict[str, Any] = {f"{MLP}.gate_proj": COLWISE, f"{MLP}.up_proj": COLWISE, f"{MLP}.down_proj": ROWWISE}


class Doubling(ColwiseParallel):
    """Communicates in its own way, and cuts as torch does."""

    @staticmethod
    def _prepare_output_fn(layouts: Any, local: Any, mod: Any, outputs: Any, mesh: Any) -> Any:
        return ColwiseParallel._prepare_output_fn(layouts, local, mod, outputs, mesh)


class Own(ParallelStyle):
    """Nobody knows what it cuts."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module


class OwnColwise(ColwiseParallel):
    """Nor here."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        """Cuts nothing."""


def llama(heads: int = 8, kv_heads: int = 4, **settings: Any) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(llama_config(heads, kv_heads, **settings))


def mixtral() -> MixtralForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.device("meta"):
        return MixtralForCausalLM(MixtralConfig(num_hidden_layers=1, vocab_size=32, num_local_experts=2, **sizes))


@pytest.fixture
def named() -> Iterator[str]:
    """A style that has a name."""
    STRATEGIES.register_strategy("torch_colwise", COLWISE)
    yield "torch_colwise"
    del STRATEGIES["torch_colwise"]


def test_parameters_are_cut_as_torch_cuts_them() -> None:
    plan = {
        **mlp,
        f"{MLP}.gate_proj": KEPT,
        f"{MLP}.up_proj": Doubling(use_local_output=False),
        "model.embed_tokens": ColwiseParallel(output_layouts=Replicate()),
        "lm_head": RowwiseParallel(input_layouts=Replicate()),
        "model.norm": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
    }
    model = llama(mlp_bias=True)
    layouts = resolve(Plan.from_dict(plan), model, 3).layouts
    cut = Layout(0, chunked(100, 3))
    assert layouts["model.layers.0.mlp.gate_proj.weight"] == layouts["model.layers.1.mlp.up_proj.bias"] == cut
    assert layouts["model.layers.0.mlp.down_proj.weight"] == Layout(1, chunked(100, 3))
    assert layouts["model.layers.0.mlp.down_proj.bias"] is None
    assert layouts["model.embed_tokens.weight"] == Layout(1, chunked(64, 3))
    assert layouts["lm_head.weight"] == Layout(1, chunked(64, 3))
    assert layouts["model.norm.weight"] is None


def test_a_style_is_called_by_what_is_special_about_it() -> None:
    styles = {
        ColwiseParallel(): "torch.ColwiseParallel()",
        RowwiseParallel(input_layouts=Replicate(), use_local_output=False): (
            f"torch.RowwiseParallel(input_layouts={Replicate()!r}, use_local_output=False)"
        ),
        SequenceParallel(): "torch.SequenceParallel()",
        Doubling(): "torch.Doubling(",
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()): "torch.PrepareModuleInput(input",
    }
    plan = Plan.from_dict({str(number): style for number, style in enumerate(styles)})
    for name, expected in zip(plan.as_dict().values(), styles.values(), strict=True):
        assert name.startswith(expected)


def test_a_rule_and_a_name_may_stand_for_a_style(named) -> None:
    for strategy in (COLWISE, named):
        plan = Plan("mine", (Rule(f"{MLP}.gate_proj", strategy), *Plan.from_dict(mlp).rules[1:]))
        layouts = resolve(plan, llama(), 2).layouts
        assert layouts["model.layers.0.mlp.gate_proj.weight"] == Layout(0, chunked(100, 2))


def test_a_plan_keeps_a_style_as_it_was() -> None:
    style = ColwiseParallel()
    plan = Plan.from_dict({**mlp, f"{MLP}.up_proj": style})
    style.output_layouts = (Replicate(),)
    strategies = resolve(plan, llama(), 2).module_strategies
    assert strategies["model.layers.0.mlp.up_proj"].signature.leaves is State.FEATURES


def test_on_one_rank_styles_are_nothing(cases) -> None:
    case = cases(8, 4)
    model = load(case.folder, LlamaForCausalLM, tp_plan={**attention, **mlp})
    assert relative(observe(model)["logits"], torch.load(case.reference)["logits"]) < 1e-6


def test_norms_of_heads_may_be_cut_along_the_heads() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=1, vocab_size=32, head_dim=16, **sizes))
    norm = SequenceParallel(sequence_dim=2, use_local_output=True)
    plan = Plan.from_dict({**attention, f"{ATTENTION}.q_norm": norm, f"{ATTENTION}.k_norm": norm})
    assert (
        resolve(plan, model, 2).param_strategies["model.layers.0.self_attn.q_norm.weight"].signature.gradient
        is State.PARTIAL
    )


WRONG: dict[str, tuple[Any, ...]] = {
    "a class": ({HEAD: ColwiseParallel}, "the class ColwiseParallel (an object is ColwiseParallel())"),
    "a name": ({HEAD: "ColwiseParallel"}, "torch's style is an object, ColwiseParallel(...), which a plan in "),
    "a name called": ({HEAD: "RowwiseParallel()"}, "and ours is called 'rowwise'"),
    "a name of neither": ({HEAD: "PrepareModuleInput"}, "which a plan in Python can hold)"),
    "heads that do not divide": (attention, "9 heads, and cannot split them for 2 ranks", lambda: llama(9, 3), 2),
    "KV heads that do not": (attention, "2 heads, and cannot split them for 4 ranks", lambda: llama(8, 2), 4),
    "more ranks than heads": (attention, "4 ranks are more than the query heads", lambda: llama(2, 2), 4),
    "a norm": ({"model.norm": COLWISE}, "for nn.Linear and nn.Embedding, not for a LlamaRMSNorm"),
    "experts": (
        {f"{MLP}.experts": ROWWISE},
        "not for a MixtralExperts; use a strategy's name, such as 'row",
        mixtral,
        2,
    ),
    "a parameter of experts": (
        {f"{MLP}.experts.down_proj": ROWWISE},
        "name the module, model.layers.*.mlp.experts: torch.RowwiseParallel()",
        mixtral,
        2,
    ),
    "a weight": ({"lm_head.weight": COLWISE}, "name the module, lm_head"),
    "a block along the sequence": ({MLP: SequenceParallel()}, "not for a LlamaMLP with modules of its own"),
    "a sequence that is whole": ({"model.norm": SequenceParallel()}, "which no rule shards before it"),
    "ids taken for parts": ({"model.embed_tokens": ROWWISE}, "give it input_layouts=Replicate()"),
    "embeddings of parts": ({"model.embed_tokens": COLWISE}, "the hidden features, of which what follows takes all"),
    "embeddings of parts, by name": ({"model.embed_tokens": "colwise"}, "use 'embedding_rowwise' or 'emb"),
    "a head of parts": ({HEAD: COLWISE}, "each rank would return its own shard of the output"),
    "half a pair": ({f"{MLP}.up_proj": COLWISE}, "down_proj, which takes as many, expects all of them"),
    "parts that torch loses track of": (mlp, "100 features do not divide by 3 ranks, and torch takes", llama, 3),
    "parts cut in two ways": (
        {**mlp, f"{MLP}.down_proj": "rowwise"},
        "the same features are split differently",
        llama,
        3,
    ),
    "tied, cut in two ways": (
        {"model.embed_tokens": "embedding_rowwise", HEAD: ColwiseParallel(output_layouts=Replicate())},
        "they are sharded differently",
        lambda: llama(tie_word_embeddings=True),
        3,
    ),
    "two sums": (
        {
            "model.layers.*": "gather",
            **{f"{ATTENTION}.{name}_proj": "local_colwise" for name in "qkv"},
            f"{ATTENTION}.o_proj": "local_rowwise",
            **mlp,
        },
        "down_proj: it sums its output, and model.layers.* sums again",
    ),
    "a style of one's own": ({f"{MLP}.up_proj": Own()}, "with torch's parallelize_module(module, mesh, style)"),
    "a cut of one's own": ({f"{MLP}.up_proj": OwnColwise()}, "OwnColwise is a style of its own"),
    "parts": ({f"{MLP}.up_proj": {"strategy": COLWISE, "parts": 2}}, "takes no parts"),
    "a unit": ({f"{MLP}.up_proj": {"strategy": COLWISE, "unit": 2}}, "takes no unit"),
}
"""(plan, part of the message; the model and the number of ranks if they are others than `llama` and 2)."""


CHECKED = {"half a pair", "parts that torch loses track of", "parts cut in two ways"}
"""Cases of WRONG that refusals finds."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[needs("refusals")] if case in CHECKED else []) for case in WRONG]
)
def test_wrong_uses_are_told_before_anything_is_loaded(case) -> None:
    plan, message, model, size = (*WRONG[case], llama, 2)[:4]
    with pytest.raises(PlanError) as caught:
        resolve(Plan.from_dict(plan), model(), size)
    assert message in str(caught.value)


def test_what_makes_parts_of_the_sequence_lets_it_be_cut() -> None:
    scatter = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
    )
    plan = Plan.from_dict({"model.layers.1": scatter, "model.norm": SequenceParallel(use_local_output=True)})
    assert resolve(plan, llama(), 2).layouts["model.norm.weight"] is None


def test_adapters_on_styles_are_refused() -> None:
    layer = nn.Linear(4, 4)
    layer.tp_strategy = Rule("layer", COLWISE).instance.bind(layer, 2, name="layer")  # type: ignore[arg-type,union-attr]
    with pytest.raises(tp_transformers.UnsupportedError, match=r"a layer with the strategy torch.ColwiseParallel\(\)"):
        adapters.strategies_of(layer)
