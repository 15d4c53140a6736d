"""GGUF files on real ranks, against transformers in one process, which decodes the complete file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Lfm2Config,
    LlamaConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import tp_transformers
from tests.support.comparisons import different_tensors, full_parameters, relative
from tests.support.gguf_files import write_gguf
from tests.support.models import MASK, PROMPTS, bytes_read, load, logits_of
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.features.packed.tiled import DECODED
from tp_transformers.features.packed.weight import packed_weights

NAME = "model.gguf"
SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2}  # a GGUF does not have the other sizes: those of the class hold
Q4_K_M = {
    "attn_output": "Q4_0",
    "ffn_down": "Q6_K",
    "attn_v": "Q8_0",
    "token_embd": "Q8_0",
    "output.": "Q8_0",
    "attn": "Q4_1",
    "ffn": "Q4_0",
}
"""As llama.cpp mixes types in a file; 192 columns are no complete blocks of 256."""
FILES: Mapping[str, tuple[str, Callable[[], Any], Mapping[str, str]]] = {
    "llama": ("llama", lambda: LlamaConfig(**SIZES, head_dim=32), Q4_K_M),
    "llama, tied": ("llama", lambda: LlamaConfig(**{**SIZES, "tie_word_embeddings": True}, head_dim=32), {"w": "F16"}),
    "qwen3": ("qwen3", lambda: Qwen3Config(**SIZES), {"ffn_down": "Q4_K", "ffn": "Q5_0", "attn": "BF16"}),
    "qwen3_moe": (
        "qwen3moe",
        lambda: Qwen3MoeConfig(**SIZES, head_dim=32, **EXPERTS),
        {"ffn_down_exps": "Q4_K", "_exps": "Q4_0", "attn": "Q8_0"},
    ),
    "qwen2_moe": ("qwen2moe", lambda: Qwen2MoeConfig(**SIZES, **EXPERTS), {"attn": "Q4_0", "exps": "Q4_1"}),
    "lfm2": (
        "lfm2",
        lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
        {"shortconv.conv": "F32", "ffn_down": "Q6_K", "w": "Q4_0"},
    ),
    "gemma2": ("gemma2", lambda: Gemma2Config(**SIZES, head_dim=32), {"ffn_down": "Q3_K", "ffn": "Q5_1"}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory):
    """`files(name)`: a folder with a GGUF file."""

    @cache
    def make(name: str) -> Path:
        architecture, config, kinds = FILES[name]
        folder = tmp_path_factory.mktemp("gguf")
        write_gguf(folder / NAME, architecture, config(), kinds)
        return folder

    return make


@pytest.fixture
def file(files: Any, name: str) -> Path:
    """The folder with the file of a test."""
    return files(name)


@pytest.mark.parametrize(
    ("name", "size"),
    wide(
        [
            ("llama", 3),
            ("qwen3_moe", 2),
            ("gemma2", 2),
            ("llama", 1),
            ("llama", 2),
            ("llama, tied", 2),
            ("qwen3", 3),
            ("lfm2", 3),
            ("qwen2_moe", 3),
            ("qwen3_moe", 3),
        ],
        3,
    ),
)
@on_ranks()
def test_ranks_have_the_values_of_one_process(file, size) -> None:
    reference, model = AutoModelForCausalLM.from_pretrained(file, gguf_file=NAME), load(file, gguf_file=NAME)
    assert different_tensors(full_parameters(model), dict(reference.named_parameters())) == []
    assert relative(logits_of(model), logits_of(reference)) < 1e-5  # sums over ranks in another order
    assert model.generation_config == reference.generation_config
    # small: (channels, 1, 3)
    assert all(name.endswith("conv.conv.weight") for name in model.tp_report.fallbacks)
    # Norms are in every rank, and a rank of two has a complete KV head. The header is rounded up, as it is read.
    size_of_header = 1 << 16
    assert size == 1 or bytes_read(model) < 0.75 * (file / NAME).stat().st_size + size_of_header


@pytest.mark.parametrize(
    ("name", "size", "operators"),
    wide(
        [
            ("llama", 3, {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj"}),
            ("qwen2_moe", 3, {"q_proj", "k_proj", "v_proj", "o_proj"}),  # with biases
            ("llama", 2, {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj"}),
            ("qwen3", 2, {"down_proj"}),
            ("qwen3_moe", 2, set()),
        ],
        1,
    ),
)
@on_ranks()
def test_packed_weights_compute_as_dequantised_ones(file, operators) -> None:
    """A packed model beside a dequantised one, both in bfloat16."""
    exact = logits_of(load(file, gguf_file=NAME))
    dense = load(file, gguf_file=NAME, dtype=torch.bfloat16)
    model = load(file, gguf_file=NAME, dtype=torch.bfloat16, tp_dequantize=False)
    with pytest.raises(tp_transformers.UnsupportedError, match="GGUF, which is only read"):
        model.save_pretrained(file / "saved")
    with torch.enable_grad():
        recorded = model(PROMPTS, attention_mask=MASK).logits
    assert torch.equal(recorded, logits_of(model))  # in inference, linears have a shorter forward
    assert model.device == torch.device("cpu"), "that of inputs, also if the embedding stays packed"
    assert relative(logits_of(load(file, gguf_file=NAME, tp_dequantize=False)), exact) < 1e-5
    errors = [relative(logits_of(each).float(), exact) for each in (model, dense)]
    assert 0 < errors[0] < 2 * errors[1]
    assert model.tp_report.share < 0.8 * dense.tp_report.share
    multiplied = {name for name, weight in packed_weights(model).items() if weight.product != DECODED}
    assert {name.split(".")[-2] for name in multiplied} == operators
    products = model.tp_report.products
    assert products.get("int4 operator", 0) == 2 * len(operators)  # of two layers
    assert set(products) <= {"int4 operator", "decoded"}


@pytest.mark.parametrize("name", ["qwen3_moe"])
@on_ranks()
def test_a_save_is_a_checkpoint_of_transformers(file, tmp_path) -> None:
    load(file, gguf_file=NAME).save_pretrained(tmp_path)
    dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(file, gguf_file=NAME)
    assert different_tensors(dict(saved.named_parameters()), dict(reference.named_parameters())) == []


def test_all_ranks_refuse_a_truncated_file(pool, files, tmp_path) -> None:
    content = (files("llama") / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(content[:-40_000])
    error = pool.error(2, partial(load, gguf_file=NAME), str(tmp_path))
    assert error.startswith("CheckpointError")
    assert "The file is truncated; download it again." in error
