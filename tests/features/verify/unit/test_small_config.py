"""Small configs: small, of the same counts, and of every kind of layer; and models of them that answer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

import tp_transformers
from tests.support.tiers import wide
from tests.support.tiny import MODELS
from tests.support.tiny_mixers import MIXERS
from tp_transformers.features.command_line.models import generating_class, known_class
from tp_transformers.features.verify.small_models import model as probe
from tp_transformers.features.verify.small_models.config import LIMIT, shrink, supported
from tp_transformers.features.verify.small_models.widths import of_kernels
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve
from tp_transformers.plans.yaml_file import available_plans

COUNTS = {
    *("num_attention_heads", "num_key_value_heads", "num_kv_heads", "num_heads", "n_head", "encoder_attention_heads"),
    *("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group"),
    *("topk_group", "first_k_dense_replace", "spatial_merge_size", "relative_attention_num_buckets"),
}

QWEN2_VL = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN2_VL |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
SETTINGS: dict[str, dict[str, Any]] = {  # what the defaults of a class leave open, or have at odds with itself
    "ministral": {"head_dim": 128},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8}},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "qwen2_vl": {"text_config": QWEN2_VL},
    "qwen2_5_vl": {"text_config": QWEN2_VL, "vision_config": {"hidden_size": 1280}},
}


def levels(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    for name, value in config.items():
        if isinstance(value, dict) and name != "per_layer_config":  # fewer layers have fewer
            yield from levels(value)


def outline(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return generating_class(config)._from_config(config)


PLANNED = [name for name in available_plans() if name in CONFIG_MAPPING and (name not in MODELS or MODELS[name].runs)]
"""Some plans fit later releases."""


@pytest.mark.parametrize("model_type", wide(sorted(PLANNED, key=lambda name: name not in SETTINGS), 10))
def test_a_small_config_has_the_same_counts_and_kinds(model_type) -> None:
    config = CONFIG_MAPPING[model_type](**SETTINGS.get(model_type, {}))
    if not known_class(config):
        pytest.skip("a tower without a class of its own")
    before = config.to_dict()
    small = shrink(config)
    assert config.to_dict() == before
    assert type(small) is type(config)
    for whole, level in zip(levels(before), levels(small.to_dict()), strict=True):
        assert all(level[name] == whole[name] for name in COUNTS & whole.keys())
        for name in ("layer_types", "no_rope_layers"):
            assert set(level.get(name) or ()) == set(whole.get(name) or ())
        if whole.get("head_dim") and whole.get("num_attention_heads"):
            fills = [each["hidden_size"] == each["num_attention_heads"] * each["head_dim"] for each in (whole, level)]
            assert fills[0] == fills[1]
    true, model = outline(config), outline(small)
    kinds, all_kinds = ({type(module).__name__ for module in each.modules()} for each in (model, true))
    assert kinds == all_kinds
    assert sum(param.numel() for param in model.parameters()) <= LIMIT
    plan = Plan.for_model(model)
    cut, cut_small = (
        {name: layout and layout.dim for name, layout in resolve(plan, each, 3).layouts.items()}
        for each in (true, model)
    )
    assert cut_small.items() <= cut.items()


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3", "mixtral", "gemma3_text", "deepseek_v3"])
def test_a_wider_small_model_has_a_block_of_columns_for_each_rank(model_type) -> None:
    config = CONFIG_MAPPING[model_type]()
    small = shrink(config, sizes=of_kernels(3))
    assert small.get_text_config().num_attention_heads == config.get_text_config().num_attention_heads
    widths = dict(outline(config).named_parameters())
    for name, param in outline(small).named_parameters():
        for length, true in zip(param.shape, widths[name].shape, strict=True):
            assert length >= min(true, 3 * 64 if param.ndim > 1 else 64), name  # a norm within heads has a head's width
            assert length <= true
            assert (length - true) % 64 == 0, "its last block is as wide"


# Published models: heads whose rotated part must stay even, factors and sections of rotation, widths that differ.
REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "phi-2": ("phi", {"hidden_size": 2560, "num_attention_heads": 32, "partial_rotary_factor": 0.4}),
    "phi-3-128k": (
        "phi3",
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.0] * 48},
            "num_key_value_heads": 8,
            "sliding_window": 262144,
        },
    ),
    "qwen2.5-vl-7b": ("qwen2_5_vl", SETTINGS["qwen2_5_vl"]),
    "gemma-7b": ("gemma", {}),
    "gemma-3": ("gemma3", {"mm_tokens_per_image": 256, "vision_config": {"image_size": 896, "patch_size": 14}}),
    "t5-11b": ("t5", {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_heads": 128, "num_layers": 24}),
    "opt-350m": ("opt", {"hidden_size": 1024, "word_embed_proj_dim": 512, "num_attention_heads": 16}),
    "of characters": ("gptj", {"vocab_size": 100, "n_embd": 64, "n_head": 8, "rotary_dim": 4}),
    "falcon-40b": ("falcon", {"hidden_size": 8192, "num_attention_heads": 128, "new_decoder_architecture": True}),
}


@pytest.mark.parametrize("name", REAL)
def test_a_small_model_of_a_published_one_answers_with_all_it_has(name) -> None:
    model_type, settings = REAL[name]
    small = shrink(CONFIG_MAPPING[model_type](**settings))
    model = probe.make(generating_class(small), small)
    question, prompt, has_image = probe.questions(model)
    assert has_image == hasattr(small, "vision_config")
    seen = probe.Observation()
    probe.observe(model, [question, prompt], seen)
    assert seen.logits.isfinite().all()
    assert seen.tokens is not None
    grown = probe.gradients(model, question)
    unused = {key for key, param in model.named_parameters() if key not in grown or not param.grad.abs().max()}
    assert not {key for key in unused if "vision_tower.head" not in key}  # of SigLIP, which Gemma does not use
    assert seen.trace.calls[-1].name == ""
    assert all(param.std() > 0 for param in model.parameters() if param.numel() > 1)


# Sums and ratios of widths, stages, depths by another name, models in a model, tokens that a config leaves open.
OTHERS = (
    *(
        "dots3_note_text",
        "gemma3n_text",
        "gpt_neox_japanese",
        "hrm_text",
        "janus",
        "llava_next",
        "mllama",
    ),
    *("mobilebert", "molmo2", "muse_glimmer", "paligemma", "t5gemma", "vibevoice_asr", "xlnet", "zamba2"),
)


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS])
def test_a_config_with_constraints_of_its_own_shrinks_too(model_type) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("a later release has it")
    small = shrink(CONFIG_MAPPING[model_type]())
    cls = generating_class(small)
    assert sum(param.numel() for param in outline(small).parameters()) <= LIMIT
    model = probe.make(cls, small)
    question, *_ = probe.questions(model)
    assert probe.answer(model, question).isfinite().all()


# A form of images, or of sound, each: patches with a grid, with positions, tiles, pinpoints, flat ones; mel features.
MEDIA = {
    "blip-2": "pixel_values", "glm4v": "image_grid_thw", "idefics3": "pixel_values", "llava_next": "image_sizes",
    "mllama": "aspect_ratio_ids", "pix2struct": "flattened_patches", "qwen2_audio": "feature_attention_mask",
    "whisper": "input_features",
}  # fmt: skip


@pytest.mark.parametrize(
    "model_type", [name if name == "glm4v" else pytest.param(name, marks=pytest.mark.slow) for name in MEDIA]
)
def test_a_small_model_is_given_images_or_sound(model_type) -> None:
    small = shrink(CONFIG_MAPPING[model_type]())
    model = probe.make(generating_class(small), small)
    question, _, given = probe.questions(model)
    assert given
    assert MEDIA[model_type] in question
    medium = next(name for name in ("pixel_values", "flattened_patches", "input_features") if name in question)
    logits = probe.answer(model, question)
    others = probe.answer(model, {**question, medium: question[medium].flip(0) * 2})
    assert not torch.equal(logits, others)


@pytest.mark.parametrize("model_type", ["idefics2", "xglm", "dinov2", "mamba"])
def test_a_config_that_names_no_heads_shrinks_too(model_type) -> None:
    """Nor a level of one: the perceiver of Idefics 2 has `resampler_n_heads`, XGLM `attention_heads`."""
    config = CONFIG_MAPPING[model_type]()
    small = shrink(config)
    assert outline(small).num_parameters() < outline(config).num_parameters() / 20


def test_a_config_that_cannot_be_shrunk_is_refused() -> None:
    with pytest.raises(tp_transformers.UnsupportedError, match="a small ministral: got TypeError"):
        shrink(CONFIG_MAPPING["ministral"]())  # it has no head_dim
    stops = pytest.raises(tp_transformers.UnsupportedError, match="a small thing: got StopIteration")
    with stops, supported("a small thing"):
        next(iter(()))


def test_heads_that_rotate_are_even_where_others_have_a_width() -> None:
    config = MIXERS["olmo_hybrid"].make(8, 4).config  # its delta net's heads have a width, its attention's have none
    small = shrink(config)
    assert small.hidden_size // small.num_attention_heads % 2 == 0
