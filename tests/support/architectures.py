"""Every architecture that has a plan: a tiny random model of it in any number of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from tests.support import configs
from tests.support.comparisons import gradient_errors, gradients, relative, worst
from tests.support.configs import GRID, IMAGE_TOKEN, PATCH, SHORT, VISION_START, Settings, mixture, plain, qwen_vl, t5
from tests.support.models import (
    HEAD_DIM,
    MASK,
    PROMPTS,
    Case,
    excess_read,
    load,
    save_as_loaded,
    save_reference,
)
from tests.support.needs import needs
from tests.support.sizes import Type, randomize, sized

Variant = tuple[int, int]
"""(query heads, KV heads)."""

GROUPED: tuple[Variant, ...] = ((8, 4), (8, 2), (8, 1), (6, 3), (9, 3))
MULTI_HEAD: tuple[Variant, ...] = ((8, 8), (6, 6), (9, 9))

# fp32 sums in another order.
LOGITS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Architecture(Type):
    """How to make a tiny model of one architecture, and what its plan has to reach."""

    own: Settings = configs.SAME
    """(query heads, KV heads, whether widths are odd) -> arguments of the config beside `sizes`."""
    variants: tuple[Variant, ...] = GROUPED
    share: float = 0.53
    """Largest share of the bytes that one of 2 ranks may hold, in the even variants."""

    def settings(self, heads: int, kv_heads: int, odd: bool) -> dict[str, Any]:
        """Arguments of the config."""
        variant = heads, kv_heads, odd
        return sized(getattr(transformers, self.config), configs.sizes(*variant), self.own(*variant))

    def outline(self) -> Any:
        """A model of even widths without memory."""
        config = getattr(transformers, self.config)(**self.settings(*self.variants[0], False))
        with torch.device("meta"):
            return getattr(transformers, self.model)(config)

    def make(self, heads: int, kv_heads: int) -> PreTrainedModel:
        """A random model, whose norms and biases are random too."""
        odd = heads % 2 == 1 or heads % 4 == 2
        config = getattr(transformers, self.config)(**self.settings(heads, kv_heads, odd))
        torch.manual_seed(0)
        model: PreTrainedModel = randomize(getattr(transformers, self.model)(config), moved=("norm",))
        return model


NARROW: dict[str, Any] = {"head_dim": HEAD_DIM, "sliding_window": 4}
UNDROPPED = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)  # of GPT-2's family alone, they are not 0
BART_IDS = {"eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}
ARCHITECTURES = {
    "llama": Architecture("Llama"),
    "mistral": Architecture("Mistral", plain(sliding_window=4)),
    "mixtral": Architecture("Mixtral", mixture("intermediate_size")),
    "qwen2": Architecture("Qwen2"),
    "qwen2_moe": Architecture("Qwen2Moe", mixture(shared="shared_expert_intermediate_size")),
    "qwen3": Architecture("Qwen3", plain(head_dim=HEAD_DIM)),
    "qwen3_moe": Architecture("Qwen3Moe", mixture(head_dim=HEAD_DIM, mlp_only_layers=[0])),
    "gemma": Architecture("Gemma", plain(head_dim=HEAD_DIM, tie_word_embeddings=True)),
    "gemma2": Architecture("Gemma2", plain(**NARROW)),
    "gemma3_text": Architecture("Gemma3Text", plain(**NARROW)),
    "cohere": Architecture("Cohere", plain(tie_word_embeddings=True)),
    "cohere with q/k norms": Architecture("Cohere", plain(use_qk_norm=True)),
    "cohere2": Architecture("Cohere2", plain(**NARROW)),
    "glm": Architecture("Glm", plain(head_dim=HEAD_DIM, attention_bias=True)),
    "granite": Architecture("Granite"),
    "olmo": Architecture("Olmo"),
    "olmo2": Architecture("Olmo2"),
    "phi": Architecture("Phi"),
    "phi with q/k norms": Architecture("Phi", plain(qk_layernorm=True)),
    "phi3": Architecture("Phi3"),
    "starcoder2": Architecture("Starcoder2"),
    "llama4_text": Architecture("Llama4Text", configs.llama4),
    "gpt_oss": Architecture("GptOss", mixture("intermediate_size", **NARROW)),
    "deepseek_v3": Architecture("DeepseekV3", configs.deepseek, MULTI_HEAD, share=0.58),
    "gpt_neox": Architecture("GPTNeoX", variants=MULTI_HEAD),
    "gpt2": Architecture("GPT2", plain(**SHORT, **UNDROPPED), MULTI_HEAD, head="GPT2LMHeadModel"),
    "bloom": Architecture("Bloom", plain(tie_word_embeddings=True), MULTI_HEAD),
    "falcon": Architecture("Falcon", configs.falcon()),
    "falcon with alibi": Architecture("Falcon", configs.falcon(alibi=True), MULTI_HEAD),
    "opt": Architecture("OPT", configs.opt, MULTI_HEAD),
    "t5": Architecture("T5", t5(), MULTI_HEAD, head="T5ForConditionalGeneration"),
    "t5 gated": Architecture(
        "T5",
        t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        MULTI_HEAD,
        head="T5ForConditionalGeneration",
    ),
    "bart": Architecture("Bart", plain(**SHORT, **BART_IDS), MULTI_HEAD, head="BartForConditionalGeneration"),
    "gemma3": Architecture("Gemma3", configs.gemma3, share=0.60, head="Gemma3ForConditionalGeneration"),
    "ministral": Architecture("Ministral", plain(**NARROW)),
    "olmo3": Architecture("Olmo3", plain(sliding_window=4)),
    "qwen2_vl": Architecture("Qwen2VL", qwen_vl(configs.tower), share=0.60, head="Qwen2VLForConditionalGeneration"),
    "qwen2_5_vl": Architecture(
        "Qwen2_5_VL", qwen_vl(configs.tower_2_5), share=0.60, head="Qwen2_5_VLForConditionalGeneration"
    ),
}
ODD = ("olmo2", "olmo3", "gpt_oss", "deepseek_v3", "bloom", "falcon", "falcon with alibi")
"""Architectures whose plans have strategies of the feature `architectures`."""


def architecture_case(name: str, *values: object, id: str | None = None) -> Any:
    """A case of a parametrization that needs the feature of the architecture `name`, if there is one."""
    return pytest.param(name, *values, id=id, marks=[needs("architectures")] if name in ODD else [])


def make_case(folder: Path, name: str, heads: int, kv_heads: int) -> Case:
    """Write a random checkpoint, and the reference that one process computes from it."""
    model = save_as_loaded(ARCHITECTURES[name].make(heads, kv_heads), folder)
    return save_reference(observe(model), folder)


def observe(model: Any) -> dict[str, Any]:
    """What a model does, in numbers: logits and greedy tokens of a left-padded batch, loss and every gradient."""
    inputs, generated = inputs_of(model)
    with torch.no_grad():
        logits = model(**inputs).logits
    made = model.generate(**generated, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    model.zero_grad()
    labels = inputs.get("decoder_input_ids", inputs["input_ids"])
    given = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    loss = model(**given, labels=labels).loss
    loss.backward()
    lengths = {"context": made.past_key_values.get_seq_length(), "encoder_context": generated["input_ids"].shape[1]}
    return {
        "logits": logits,
        "tokens": made.sequences,
        "loss": loss.detach(),
        "grads": gradients(model),
        "cache": (lengths, cache_bytes(made.past_key_values)),
    }


Observe = Callable[[Any], dict[str, Any]]
"""Model -> "outputs", lists of tensors by name; "tokens"; "bytes" of memory by name; "grads" by parameter."""


def in_float64(observe: Observe) -> Observe:
    """`observe`, of the model in float64; the gradients that it leaves are added."""

    @wraps(observe)
    def observed(model: Any) -> dict[str, Any]:
        from tp_transformers.features.verify.small_models.model import computing_in, convert

        convert(model, torch.float64)
        with computing_in(torch.float64):
            seen = observe(model)
        return {**seen, "grads": gradients(model)}

    return observed


def compare_case(model: Any, case: Case, observe: Observe, saved: str) -> dict[str, Any]:
    """Run on every rank: a loaded model beside one process, and the model saved in the folder `saved`.

    Largest differences of each kind of output, and of a gradient, with its name; whether tokens are the same; shares of
    memory; bytes that were "read", less those held and the headers.
    """
    read = excess_read(model, case.folder)
    seen, expected = observe(model), torch.load(case.reference)
    model.save_pretrained(saved)
    outputs = {name: zip(seen["outputs"][name], whole, strict=True) for name, whole in expected["outputs"].items()}
    return {
        **{name: max(relative(own, whole) for own, whole in pairs) for name, pairs in outputs.items()},
        **{name: nbytes / expected["bytes"][name] for name, nbytes in seen["bytes"].items()},
        "gradient": worst(gradient_errors(model, seen["grads"], expected["grads"])),
        "tokens": torch.equal(seen["tokens"], expected["tokens"]),
        "read": read,
    }


def compare_cases(cases: dict[Any, Case], observe: Observe, saved: str, **options: Any) -> dict[Any, dict[str, Any]]:
    """Run on every rank: `compare_case` of each case, loaded in float64 with `options`."""
    return {
        key: compare_case(load(case.folder, dtype=torch.float64, **options), case, observe, f"{saved}/{key}")
        for key, case in cases.items()
    }


def cache_bytes(cache: Any) -> int:
    """Bytes of memory that a transformers cache keeps alive."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    return sum(tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in (layer.keys, layer.values))


def inputs_of(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments of the forward, arguments of generate) for a left-padded batch, with an image if the model sees."""
    forward, generated = (
        {name: value.to(model.device) for name, value in inputs.items()} for inputs in _inputs_of(model)
    )
    return forward, generated


def _inputs_of(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    text = {"input_ids": PROMPTS, "attention_mask": MASK}
    if model.config.is_encoder_decoder:
        return {**text, "decoder_input_ids": PROMPTS.flip(1)}, text
    if not hasattr(model.config, "vision_config"):
        return text, text
    images = torch.full((2, GRID * GRID // 4), IMAGE_TOKEN)
    start = torch.full((2, 1), VISION_START)
    torch.manual_seed(1)
    seeing = {
        "input_ids": torch.cat([PROMPTS[:, :3], start, images, PROMPTS[:, 3:]], 1),
        "attention_mask": torch.cat(
            [MASK[:, :3], torch.ones(2, 1 + images.shape[1], dtype=torch.long), MASK[:, 3:]], 1
        ),
    }
    is_image = (seeing["input_ids"] == IMAGE_TOKEN).long()
    if model.config.model_type == "gemma3":
        seeing |= {"pixel_values": torch.randn(2, 3, GRID * PATCH, GRID * PATCH), "token_type_ids": is_image}
    else:
        seeing |= {
            "pixel_values": torch.randn(2 * GRID * GRID, 3 * 2 * PATCH * PATCH),
            "image_grid_thw": torch.tensor([[1, GRID, GRID]] * 2),
            "mm_token_type_ids": is_image,
        }
    return seeing, seeing
