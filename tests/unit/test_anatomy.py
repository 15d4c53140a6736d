"""The parts of a model, asked of models of transformers on the meta device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.support.architectures import ARCHITECTURES
from tp_transformers import anatomy
from tp_transformers.features.data_parallel import fsdp
from tp_transformers.features.infer import seen
from tp_transformers.features.mixers import strategies
from tp_transformers.features.planner import kv_cache
from tp_transformers.features.sequence import rewrite


@cache
def outline(name: str) -> Any:
    """A model of `ARCHITECTURES`, without memory."""
    return ARCHITECTURES[name].outline()


# -- names


@pytest.mark.parametrize(
    ("name", "prefix", "tied"),
    [
        ("llama", "model", {}),
        ("gpt2", "transformer", {"lm_head.weight": "transformer.wte.weight"}),
        ("llama4_text", "model", {}),  # its class declares the prefix of a larger model
        (
            "t5",
            "",
            dict.fromkeys(
                ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), "shared.weight"
            ),
        ),
    ],
)
def test_the_base_model_and_what_is_tied(name, prefix, tied) -> None:
    assert anatomy.base_prefix(outline(name)) == prefix
    assert anatomy.tied_parameters(outline(name)) == tied
    assert anatomy.tied_parameters(nn.Linear(1, 1)) == {}


def test_untied_parameters_are_tied_no_more() -> None:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(outline("gpt2").config)
    anatomy.untie(model, "lm_head.weight")
    assert anatomy.tied_parameters(model) == {}


def test_names_of_layers() -> None:
    name = "model.layers.10.experts.3.w1"
    assert anatomy.fold_layers(name) == "model.layers.*.experts.*.w1"
    assert anatomy.layer_number(name) == 10
    assert anatomy.layer_number("lm_head") is None
    assert list(anatomy.names_around("model.norm")) == ["model.norm", "model"]
    values = [("layers.0.mlp", True), ("layers.1.mlp", False), ("norm", True), ("layers.2.mlp", True)]
    assert anatomy.folded(values) == {
        "layers.*.mlp": {True: ["layers.0.mlp", "layers.2.mlp"], False: ["layers.1.mlp"]},
        "norm": {True: ["norm"]},
    }


# -- linears


def answers(name: str, question: Any) -> dict[str, Any]:
    """{folded name: the answer} of the modules of a model that have one."""
    found = ((anatomy.fold_layers(path), question(module)) for path, module in outline(name).named_modules())
    return {path: answer for path, answer in found if answer}


def test_features_of_linears_and_embeddings() -> None:
    found = answers("gpt2", anatomy.features)
    assert found == {
        "transformer.wte": (199, 64),
        "transformer.wpe": (16, 64),
        "transformer.h.*.attn.c_attn": (64, 192),
        "transformer.h.*.attn.c_proj": (64, 64),
        "transformer.h.*.mlp.c_fc": (64, 96),
        "transformer.h.*.mlp.c_proj": (96, 64),
        "lm_head": (64, 199),
    }
    assert answers("gpt2", anatomy.is_transposed).keys() == {name for name in found if ".h." in name}
    assert answers("gpt2", strategies.has_inputs_first).keys() == found.keys() - {"lm_head"}
    norm = outline("gpt2").transformer.ln_f
    assert anatomy.features(norm) is None
    assert (anatomy.input_width(norm), anatomy.output_width(norm)) == (0, 0)
    projection = outline("gpt2").transformer.h[0].attn.c_attn
    assert (anatomy.input_width(projection), anatomy.output_width(projection)) == (64, 192)


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("llama", set()),
        ("mixtral", {"experts"}),
        ("gpt_oss", {"experts"}),
        ("deepseek_v3", {"experts"}),
        ("bloom", set()),
    ],
)
def test_experts(name, experts) -> None:
    found = answers(name, anatomy.holds_experts)
    assert {path.rpartition(".")[2] for path in found} == experts
    assert answers(name, seen.stacked_experts) == {}
    transposed = answers(name, strategies.has_inputs_first).keys() & found.keys()
    assert bool(transposed) == (name == "gpt_oss")


# -- attention


@pytest.mark.parametrize(
    ("name", "heads", "cross"),
    [
        ("llama", {"model.layers.*.self_attn": (8, 4)}, set()),
        ("gpt2", {"transformer.h.*.attn": (8, 8)}, set()),
        ("bloom", {"transformer.h.*.self_attention": (8, 8)}, set()),
        ("falcon", {"transformer.h.*.self_attention": (8, 4)}, set()),
        (
            "bart",
            dict.fromkeys(
                (
                    "model.encoder.layers.*.self_attn",
                    "model.decoder.layers.*.self_attn",
                    "model.decoder.layers.*.encoder_attn",
                ),
                (8, 8),
            ),
            {"model.decoder.layers.*.encoder_attn"},
        ),
        (
            "t5",
            dict.fromkeys(
                (
                    "encoder.block.*.layer.*.SelfAttention",
                    "decoder.block.*.layer.*.SelfAttention",
                    "decoder.block.*.layer.*.EncDecAttention",
                ),
                (8, 8),
            ),
            {"decoder.block.*.layer.*.EncDecAttention"},
        ),
        (
            "gemma3",
            {
                "model.vision_tower.encoder.layers.*.self_attn": (4, 4),
                "model.language_model.layers.*.self_attn": (8, 4),
            },
            set(),
        ),
    ],
)
def test_attention_and_its_heads(name, heads, cross) -> None:
    model = outline(name)
    found = {path: module for path, module in model.named_modules() if anatomy.is_attention(module)}
    around = {path for path, module in found.items() if kv_cache.is_around_attention(module)}
    assert bool(around) == (name == "t5"), "T5's layers are called attention too"
    counts = {
        anatomy.fold_layers(path): anatomy.head_counts(module, anatomy.attention_config(module, model))
        for path, module in found.items()
        if path not in around
    }
    assert counts == heads
    assert {path for path in heads if anatomy.is_cross_attention(path)} == cross


CROSS = ["crossattention", "cross_attn", "EncDecAttention", "encoder_attn", "text_cross_attn"]
CROSS += ["crossattention.self", "crossattention.attention", "encoder_decoder_attention.attention"]
OTHERS = ["self_attn", "SelfAttention", "sequence_attn", "attention", "attention.self", "attention.attention"]


@pytest.mark.parametrize("own", [*CROSS, *OTHERS])
def test_names_of_cross_attention(own) -> None:
    assert anatomy.is_cross_attention(f"encoder.layers.0.{own}") == (own in CROSS)


def test_the_config_around_a_module() -> None:
    modules = dict(outline("gemma3").named_modules())
    config = outline("gemma3").config
    assert anatomy.config_around(modules, "model.language_model.layers.0.self_attn.q_proj") is config.text_config
    assert anatomy.config_around(modules, "model.vision_tower.encoder.layers.0.mlp.fc1") is config.vision_config
    assert anatomy.config_around(modules, "lm_head") is config


# -- norms

RMS = ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"]
LAYER = ["transformer.h.*.ln_1", "transformer.h.*.ln_2", "transformer.ln_f"]


@pytest.mark.parametrize(("name", "found", "are_rms"), [("llama", RMS, True), ("gpt2", LAYER, False)])
def test_norms(name, found, are_rms) -> None:
    assert list(answers(name, anatomy.is_norm)) == found
    assert list(answers(name, rewrite.is_norm_of_tokens)) == found
    assert list(answers(name, seen.is_norm_of_one_tensor)) == found
    assert list(answers(name, lambda module: anatomy.is_norm(module) and anatomy.is_rms_norm(module, (8,)))) == (
        found if are_rms else []
    )
    epsilons = {anatomy.epsilon(module) for module in outline(name).modules() if anatomy.is_norm(module)}
    assert epsilons == {1e-6 if are_rms else 1e-5}
    assert anatomy.epsilon(nn.Linear(1, 1)) is None


def test_norms_that_not_every_question_is_about() -> None:
    """Cohere's norm of heads has a number for every feature of every head, OLMo's has none."""
    heads = {"model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"}
    known = answers("cohere with q/k norms", anatomy.is_norm).keys()
    assert known - answers("cohere with q/k norms", rewrite.is_norm_of_tokens).keys() == heads
    assert answers("cohere with q/k norms", seen.is_norm_of_one_tensor).keys() == known
    assert list(answers("olmo", rewrite.is_norm_of_tokens)) == RMS
    assert answers("olmo", seen.is_norm_of_one_tensor) == {}
    assert not anatomy.is_rms_norm(outline("olmo").model.norm, ())


# -- layers


@pytest.mark.parametrize(
    ("name", "stacks"),
    [
        ("llama", ["model.layers"]),
        ("gpt2", ["transformer.h"]),
        ("bart", ["model.encoder.layers", "model.decoder.layers"]),
        ("t5", ["encoder.block", "decoder.block"]),  # whose layers are lists in them
        ("gemma3", ["model.vision_tower.encoder.layers", "model.language_model.layers"]),
    ],
)
def test_stacks_and_the_layers_in_them(name, stacks) -> None:
    model = outline(name)
    found = dict(anatomy.stacks(model))
    assert list(found) == stacks
    members = [layer for stack in found.values() for layer in stack]
    assert set(fsdp.layers_of(model)) >= set(members)  # a tower's embedding is not split either
