"""Every architecture for which transformers declares a plan, on the meta device: which load with it, which do not.

`pytest -s` prints the report.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.support.fractions import largest_fraction
from tests.support.needs import needs
from tests.support.tiers import wide
from tp_transformers import PlanError
from tp_transformers.features.verify.small_models.config import shrink
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve

LAYERS = 4

SETTINGS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8}},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "lfm2_moe": {"layer_types": ["full_attention"] * LAYERS, "num_hidden_layers": LAYERS},
    "ministral": {"head_dim": 64},
}
"""What a default config needs to become a model."""

NO_MODEL = "its default config alone is no model"
NOT_LOADED = {
    # transformers' side: a part of a larger model that is not built by itself, or a config without its sizes.
    **dict.fromkeys(
        (
            "cohere_compass_text",
            "deepseek_ocr2_encoder",
            "deepseek_ocr2_text",
            "diffusion_gemma_text",
            "dots1",
            "ernie4_5_vl_moe_text",
            "ernie4_5_vl_moe_vision",
            "gemma3n_text",
            "hunyuan_vl_text",
            "llama4",
            "nemotron",
            "neomme",
            "paddleocr_vl_text",
            "qwen3_omni_moe_talker_text",
            "qwen4_exp_text",
            "t5_gemma_module",
            "t5gemma2_decoder",
            "t5gemma2_text",
        ),
        NO_MODEL,
    ),
    # Plans that would compute something else, or leave everything where it is.
    "doge": "model.layers.*.self_attn.A: it computes on sharded heads",
    "dots3_note_vision_encoder": "shards a matrix of blocks.*, so that each of 2 ranks would hold 100% of the model",
    "esmc": "layers.*.self_attn.k_norm.weight: it computes on sharded heads",
    "gemma4_vision": "a Gemma4ClippableLinear is no linear or embedding",
    "glm5_next_text": "o_proj leave their features sharded, k_proj, q_proj, v_proj do not",
    "gpt_oss": "shards a matrix of model.layers.*",
    "inkling2_loop_text": "gate_up_proj and down_proj would be sharded along different features",
    "inkling2_text": "gate_up_proj and down_proj would be sharded along different features",
    "inkling_text": "gate_up_proj and down_proj would be sharded along different features",
    "muse_spark": "shards a matrix of model.audio_tower.layers.*, model.vision_tower.layers.*",
    "phi4_multimodal": "shards a matrix of model.embed_tokens_extend.audio_embed.encoder.encoders.*",
}
"""model_type -> why its declared plan does not load it, in what we say of it, in one release of transformers or all."""

ONLY_EVEN = {
    *("axk2", "codegen", "gpt_neox", "hy_v4", "hy_v4_vl_text", "muse_glimmer_vision", "muse_glimmer"),
    "ernie4_5_vl_moe_vision",  # declared by transformers 5.20
}
"""Architectures whose attention is not recognised: 2 ranks, which divide their heads, will do, 3 will not."""

ONLY_A_HEAD = ("bamba", "dbrx", "diffllama", "falcon_h1", "gpt_oss", "hunyuan_v1_dense", "lfm2")
"""Architectures for which transformers declares how to cut the lm_head, and nothing else."""


def configs() -> Iterator[type[PreTrainedConfig]]:
    """The config classes that declare a plan for their base model."""
    models = Path(transformers.__file__).parent / "models"
    for file in sorted(models.glob("*/configuration_*.py")):
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for value in vars(module).values():
            is_config = inspect.isclass(value) and issubclass(value, PreTrainedConfig)
            if is_config and value.__module__ == module.__name__ and getattr(value, "base_model_tp_plan", None):
                yield value


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that is loaded with such a config. Raises LookupError where there is none."""
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_MAPPING,
    ):
        try:
            found = mapping[type(config)]
        except (KeyError, ValueError):
            continue
        return found[0] if isinstance(found, tuple) else found
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    for value in vars(module).values():
        is_model = inspect.isclass(value) and issubclass(value, PreTrainedModel)
        if (
            is_model
            and getattr(value, "config_class", None) is type(config)
            and not value.__name__.endswith("PreTrainedModel")
        ):
            return value
    raise LookupError(f"no class for {type(config).__name__}")


def build(cls: type[PreTrainedConfig]) -> PreTrainedModel:
    """A model of few layers on the meta device."""
    config = cls(**SETTINGS.get(cls.model_type, {}))
    for name in ("num_hidden_layers", "num_layers", "depth"):
        if isinstance(getattr(config, name, None), int) and getattr(config, name) > LAYERS:
            setattr(config, name, LAYERS)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if isinstance(getattr(config, name, None), list):
            with suppress(AttributeError):  # some are computed
                setattr(config, name, getattr(config, name)[:LAYERS])
    with torch.device("meta"):
        return model_class(config)._from_config(config)


def declared_plan(model: PreTrainedModel) -> Plan | None:
    """The plan that transformers declares, also where there is one of ours."""
    model_type, model.config.model_type = model.config.model_type, "none"
    try:
        return Plan.for_model(model)
    finally:
        model.config.model_type = model_type


def outcome(model: PreTrainedModel, size: int) -> str:
    """ "ok" and the share of the largest rank, or why the declared plan does not load the model."""
    plan = declared_plan(model)
    if plan is None:
        return "there is no plan"
    try:
        resolution = resolve(plan, model, size)
    except PlanError as error:
        return str(error)
    share = largest_fraction(model, resolution.layouts, size)
    return f"ok, {share:.2f} of the bytes; {'; '.join(resolution.notes) or 'every layer is cut'}"


PARTS = 4


@pytest.mark.parametrize("part", wide(range(PARTS), 1))
def test_every_declared_plan_loads_or_says_why_not(part) -> None:
    report: dict[str, str] = {}
    for cls in islice(configs(), part, None, PARTS):
        try:
            model = build(cls)
        except Exception as error:  # whatever transformers raises where a config is no model
            report[cls.model_type] = f"{NO_MODEL}: {type(error).__name__}: {error}"
            continue
        report[cls.model_type] = outcome(model, 2)
        if report[cls.model_type].startswith("ok") and not outcome(model, 3).startswith("ok"):
            report[cls.model_type] += "; not on 3 ranks: " + outcome(model, 3)
    print(*(f"{name}: {text}" for name, text in sorted(report.items())), sep="\n")
    loaded = {name for name, text in report.items() if text.startswith("ok")}
    print(f"{len(loaded)} of {len(report)} declared plans load their architecture")
    for name in sorted(report.keys() - loaded):
        assert NOT_LOADED.get(name, "no reason is known") in report[name], f"{name}: {report[name]}"
    assert {name for name in loaded if "not on 3 ranks" in report[name]} <= ONLY_EVEN
    assert len(loaded) > 0.8 * sum(NO_MODEL not in text for text in report.values())


@needs("refusals")
@pytest.mark.parametrize("name", ONLY_A_HEAD)
def test_plans_that_cut_only_the_head_are_refused_or_told(name) -> None:
    cls = transformers.CONFIG_MAPPING[name]
    text = outcome(build(cls), 2)
    if text == "there is no plan":  # some releases of transformers declare nothing at all
        return
    if text.startswith("ok"):  # few layers are less than three quarters of the model
        assert "replicates 4 of 4 model.layers.*: " in text
    else:
        assert "so that each of 2 ranks would hold" in text
        assert "allow_replicated=True" in text


def test_a_query_projection_that_makes_gates_as_well_is_cut_by_its_heads() -> None:
    config = transformers.Qwen3NextConfig(
        num_attention_heads=8, num_key_value_heads=2, head_dim=16, num_hidden_layers=4
    )
    with torch.device("meta"):
        model = transformers.Qwen3NextForCausalLM(config)
    plan = declared_plan(model)
    resolution = resolve(plan, model, 3)
    heads = resolution.attention["model.layers.3.self_attn"]
    assert (heads.query.widths, heads.kv.widths) == ((2, 2, 4), (1, 1, 1))
    layout = resolution.layouts["model.layers.3.self_attn.q_proj.weight"]
    assert layout.split.widths == (64, 64, 128)  # a query and a gate of 16 features each, for every head


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="transformers has no Gemma 4 yet")
@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        # Gemma 4 26B-A4B: full attention has 2 heads of keys, which are its values too.
        ({"num_attention_heads": 16, "num_key_value_heads": 8, "attention_k_eq_v": True}, (16, 2)),
        # Gemma 4 E2B: later layers take keys and values of earlier ones.
        ({"num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 2}, (8, 1)),
    ],
)
def test_attention_without_projections_of_its_own_is_cut_by_complete_heads(settings, heads) -> None:
    layers = ["sliding_attention", "full_attention"] * 2
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(
            transformers.Gemma4TextConfig(
                **{"num_hidden_layers": 4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, **settings},
                layer_types=layers,
                num_global_key_value_heads=2 if "attention_k_eq_v" in settings else None,
            )
        )
    plan = declared_plan(model)
    for size in (2, 3, 5, 6, 7):
        found = resolve(plan, model, size).attention["model.layers.3.self_attn"]
        assert (found.query.length, found.kv.length) == heads
        assert sum(found.query.widths) == heads[0]
        assert min(found.kv.widths) == 1 == max(found.kv.widths)
        assert found.query.is_complete


@pytest.mark.skipif(not hasattr(transformers, "LongcatFlashConfig"), reason="transformers has no LongCat yet")
def test_identity_experts_of_a_declared_plan_share_their_output() -> None:
    config = shrink(transformers.LongcatFlashConfig())
    with torch.device("meta"):
        model = transformers.LongcatFlashForCausalLM(config)
    plan = Plan.for_model(model)
    strategies = resolve(plan, model, 2).module_strategies
    kinds = [type(strategy).__name__ for name, strategy in strategies.items() if name.endswith("identity_expert")]
    assert kinds == ["IdentityExpertParallel"] * config.num_layers
