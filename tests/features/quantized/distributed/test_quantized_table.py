"""Every format on the models that it is published for, on 1 to 4 ranks, as its own library made the checkpoint.

`RECORD=1` writes what was measured to tests/data/quantised.json, of which `python -m tests.support.readme` makes
a sentence of the page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, Qwen3Config, Qwen3MoeConfig

import tp_transformers
from tests.support import quantisers
from tests.support.comparisons import different_tensors, full_parameters, read_folder, relative
from tests.support.models import MASK, PROMPTS, headers, llama_config, load, logits_of
from tests.support.quantisers import libraries
from tp_transformers.features.packed.weight import packed_weights

pytestmark = pytest.mark.slow

RECORD = Path(__file__).parents[3] / "data" / "quantised.json"
TOLERANCE = 1e-5  # fp32 sums in another order
RANKS = (1, 2, 3, 4)

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 128,  # 4 groups
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("Llama, 4 and 231 groups", lambda: llama_config(4, 4, **SIZES, intermediate_size=231 * 32)),
    "wide llama": (
        "Llama, 4 and 231 blocks of 64",
        lambda: llama_config(4, 4, **{**SIZES, "hidden_size": 256, "head_dim": 64}, intermediate_size=231 * 64),
    ),
    "qwen3": ("Qwen3, 93 groups", lambda: Qwen3Config(**SIZES, intermediate_size=93 * 32)),
    "qwen3_moe": (
        "Qwen3-MoE, 3 experts of 67 groups",
        lambda: Qwen3MoeConfig(
            **{**SIZES, **EXPERTS, "num_hidden_layers": 1},
            num_experts=3,
            moe_intermediate_size=67 * 32,
            intermediate_size=128,
        ),
    ),
    "gpt_oss": (
        "GPT-OSS, 3 experts of 90 blocks",
        lambda: GptOssConfig(
            **{**SIZES, **EXPERTS},
            num_local_experts=3,
            intermediate_size=2880,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
    "deepseek_v3": (
        "DeepSeek-V3, 4 experts of 71 groups",
        lambda: DeepseekV3Config(
            **{**SIZES, **EXPERTS, "head_dim": 32},
            intermediate_size=71 * 32,
            moe_intermediate_size=71 * 32,
            q_lora_rank=64,
            kv_lora_rank=32,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=32,
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        ),
    ),
}
_TRANSFORMERS, _COMPRESSED, _GPTQ, _BNB = ("transformers",), ("compressed-tensors",), ("gptqmodel",), ("bitsandbytes",)
_DENSE, _MIXED, _ALL = ("llama", "qwen3"), ("llama", "qwen3_moe"), ("llama", "qwen3", "qwen3_moe", "deepseek_v3")
_GROUPS = {"strategy": "group", "group_size": quantisers.GROUP}
_BYTES = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
_FLOAT4, _NF4 = {"num_bits": 4, "type": "float"}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_RULES = {
    "-:.*k_proj": {},
    "+:.*down_proj": {"bits": 8, "group_size": 16},
    ".*o_proj": {"bits": 2, "desc_act": True},
}


def _packed(form: str, **weights: Any) -> quantisers.Maker:
    return partial(quantisers.compressed, form=form, **weights)


FORMATS: dict[str, tuple[tuple[str, ...], quantisers.Maker, tuple[str, ...]]] = {
    "FP8 by blocks": (_TRANSFORMERS, quantisers.float8, _ALL),
    "FP8 by tensors": (_TRANSFORMERS, partial(quantisers.float8, by_block=False), _DENSE),
    "MXFP4": (("transformers", "compressed-tensors"), quantisers.mxfp4, ("gpt_oss",)),
    "pack-quantized int4": (_COMPRESSED, _packed("pack-quantized", num_bits=4, symmetric=True, **_GROUPS), _ALL),
    "pack-quantized int4, zero points": (
        _COMPRESSED,
        _packed("pack-quantized", num_bits=4, symmetric=False, **_GROUPS),
        _ALL,
    ),
    "pack-quantized int8 by rows": (_COMPRESSED, _packed("pack-quantized", **_BYTES), _MIXED),
    "int-quantized": (_COMPRESSED, _packed("int-quantized", **_BYTES), _DENSE),
    "float-quantized": (_COMPRESSED, _packed("float-quantized", type="float", **_BYTES), _MIXED),
    "nvfp4-pack-quantized": (
        _COMPRESSED,
        _packed("nvfp4-pack-quantized", **_FLOAT4, strategy="tensor_group", group_size=16),
        _DENSE,
    ),
    "mxfp4-pack-quantized": (_COMPRESSED, _packed("mxfp4-pack-quantized", **_FLOAT4, **_GROUPS), ("llama",)),
    "mxfp8-quantized": (_COMPRESSED, _packed("mxfp8-quantized", num_bits=8, type="float", **_GROUPS), ("llama",)),
    "GPTQ": (_GPTQ, quantisers.gptq, _ALL),
    "GPTQ 8 bits, act-order, v2": (
        _GPTQ,
        partial(quantisers.gptq, bits=8, desc_act=True, form="gptq_v2"),
        ("llama", "qwen3", "qwen3_moe"),
    ),
    "GPTQ with rules for modules (`dynamic`)": (_GPTQ, partial(quantisers.gptq, dynamic=_RULES), _MIXED),
    "AWQ": (_GPTQ, quantisers.awq, _ALL),
    "bitsandbytes int8": (_BNB, partial(quantisers.bitsandbytes, load_in_8bit=True), _DENSE),
    "bitsandbytes nf4": (_BNB, partial(quantisers.bitsandbytes, **_NF4), ("wide llama",)),
    "bitsandbytes nf4, scales quantised too": (
        _BNB,
        partial(quantisers.bitsandbytes, **_NF4, bnb_4bit_use_double_quant=True),
        ("wide llama",),
    ),
}
"""Libraries that made the checkpoint, how, and the models."""
CASES = [(form, model) for form, (_, _, models) in FORMATS.items() for model in models]


def observe(folder: str, reference: str) -> dict[str, Any]:
    """What a rank holds dequantised, and what it reads, holds and computes packed."""
    expected = torch.load(reference)
    model = load(folder, dtype=torch.float32)
    differ = different_tensors(full_parameters(model), expected["weights"])
    shards = {name: param.tp_shard for name, param in model.named_parameters()}
    del model
    packed = load(folder, dtype=torch.float32, tp_dequantize=False)
    tokens = packed.generate(PROMPTS, attention_mask=MASK, max_new_tokens=8, do_sample=False)
    return {
        "differ": differ,
        "error": relative(logits_of(packed), expected["logits"]),
        "tokens": torch.equal(tokens, expected["tokens"]),
        "read": packed.tp_report.bytes_read + packed.tp_report.mapped - headers(folder),
        "shard": shard_in_files(folder, packed),
        "packed": {
            name: (weight.nbytes, shards[name].layout is not None) for name, weight in packed_weights(packed).items()
        },
        "fallbacks": packed.tp_report.fallbacks,
    }


def shard_in_files(folder: str, model: Any) -> int:
    """Bytes of a rank's packed weights, and of its other shards in the dtypes of the files."""
    held = packed_weights(model)
    stored = {name: tensor.dtype for name, tensor in read_folder(folder).items()}
    dense = {name: param for name, param in model.named_parameters() if name not in held}
    nbytes = sum(
        tp_transformers.local_tensor(param).numel() * stored.get(name, param.dtype).itemsize
        for name, param in dense.items()
    )
    return nbytes + sum(weight.nbytes for weight in held.values())


@pytest.mark.parametrize(("form", "name"), CASES)
def test_ranks_do_what_one_process_does(pool, tmp_path, form, name) -> None:
    made_by, make, _ = FORMATS[form]
    title, config = MODELS[name]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    reference = make(tmp_path / "plain", tmp_path / "packed").eval()
    seen = {
        "weights": {key: value.detach() for key, value in reference.named_parameters()},
        "logits": logits_of(reference),
        "tokens": reference.generate(PROMPTS, attention_mask=MASK, max_new_tokens=8, do_sample=False),
    }
    torch.save(seen, tmp_path / "reference.pt")
    found = {size: pool.run(size, observe, str(tmp_path / "packed"), str(tmp_path / "reference.pt")) for size in RANKS}
    whole = {key: nbytes for key, (nbytes, _) in found[1][0]["packed"].items()}
    row = {"format": form, "by": libraries(*made_by), "model": title, "error": 0.0, "read": 0.0, "held": {}}
    for size, ranks in found.items():
        for rank in ranks:
            assert rank["differ"] == []
            assert rank["fallbacks"] == ()
            assert rank["tokens"]
            cut = {key: nbytes for key, (nbytes, is_cut) in rank["packed"].items() if is_cut or size == 1}
            share = sum(cut.values()) / sum(whole[key] for key in cut)
            row["error"] = max(row["error"], rank["error"])
            row["read"] = max(row["read"], rank["read"] / rank["shard"])
            row["held"][str(size)] = max(row["held"].get(str(size), 0), share)
    print(row)
    assert row["error"] < TOLERANCE
    # `g_idx` says how others are cut, so that every rank reads all of it: 4 bytes for the 64 or 128 of a column.
    assert row["read"] <= (1.05 if "GPTQ" in form else 1.01)
    assert all(share <= 1 / int(size) + 0.03 for size, share in row["held"].items())
    if os.environ.get("RECORD"):
        rows = {(each["format"], each["model"]): each for each in json.loads(RECORD.read_text())}
        rows[form, title] = row
        order = [(form, MODELS[model][0]) for form, model in CASES]
        RECORD.write_text(json.dumps([rows[key] for key in order if key in rows], indent=1) + "\n")
