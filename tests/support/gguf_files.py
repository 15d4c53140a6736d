"""GGUF files of tiny models, with tensors of random blocks under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

_SCALES = {"Q2_K": slice(80, 84), "Q3_K": slice(108, 110), "Q4_K": slice(0, 4), "Q5_K": slice(0, 4)}
_SCALES |= {"Q6_K": slice(208, 210), "Q4_1": slice(0, 4), "Q5_1": slice(0, 4)}
"""The float16 scales of blocks; those of other types are the first two bytes."""


def write_gguf(path: Path, architecture: str, config: Any, kinds: Mapping[str, str]) -> None:
    """Write a random model of `config`. `kinds`: part of a name -> type of its blocks; other tensors are in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    writer = gguf.GGUFWriter(path, architecture)
    by_key = GGUF_CONFIG_MAPPING.get(config.model_type) or GGUF_CONFIG_MAPPING[config.model_type.removesuffix("_text")]
    for key, attribute in by_key.items():
        value = getattr(config, attribute or "", None)
        if architecture == "lfm2" and key == "attention.head_count_kv":  # 0 for a layer without attention
            counts = [value if kind == "full_attention" else 0 for kind in config.layer_types]
            writer.add_array(f"{architecture}.{key}", counts)
            continue
        if architecture == "lfm2" and attribute == "rms_norm_eps":
            value = config.norm_eps
        value = config.rope_parameters["rope_theta"] if attribute == "rope_theta" else value
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {index}" for index in range(config.vocab_size)])
    state = model.state_dict()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    for name, target in get_gguf_hf_weights_map(model, processor).items():
        if target == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = state[target]
        if "_exps" in name:
            name += ".weight"
            if "gate" in name or "up" in name:
                values = values.chunk(2, 1)["up" in name]
        if "norm" in name and architecture.startswith("gemma"):
            values = values + 1
        if "ffn_gate_inp_shexp" in name:
            values = values[0]
        if "shortconv.conv" in name:
            values = values.squeeze(1)
        kind = next((kind for part, kind in kinds.items() if part in name and values.ndim > 1), "F32")
        _add(writer, name, values.numpy(), gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, values: np.ndarray[Any, Any], kind: Any) -> None:
    try:
        data = gguf.quantize(values, kind)
    except NotImplementedError:
        data = random_blocks(kind, values.shape)
    writer.add_tensor(name, data, raw_dtype=kind)


def random_blocks(kind: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random bytes, with scales that make values of about 1: (..., rows, bytes of a row)."""
    length, nbytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(256, size=(*shape[:-1], shape[-1] // length, nbytes), dtype=np.uint8)
    place = _SCALES.get(kind.name, slice(0, 2))
    scales = random.uniform(0.5, 1, (*blocks.shape[:-1], (place.stop - place.start) // 2)) / 2000
    blocks[..., place] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
