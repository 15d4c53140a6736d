"""Checkpoints in float8 with a scale a block, made of checkpoints in floating point."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.comparisons import read_folder

NOT_CONVERTED = ["lm_head", "mlp.gate", "embed_tokens"]


def quantize(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float8_e4m3fn, and the scales of its blocks: (ceil(n / block), ceil(m / block))."""
    rows, columns = (-(-length // size) for length, size in zip(weight.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = padded.view(rows, block[0], columns, block[1]).abs().amax((1, 3)) / 448
    scales = scales.clamp_min(1e-8)
    return (weight / spread(scales, weight.shape, block)).to(torch.float8_e4m3fn), scales


def spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """For every element of a matrix of `shape` the scale of its block."""
    whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole[: shape[0], : shape[1]]


def quantize_folder(
    folder: str | Path, target: Path, block: tuple[int, int] | None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Quantise the linears of a checkpoint; returns what they are, dequantised in float32, and all other tensors.

    `block=None` is one scale a weight, and one for its activations.
    """
    target.mkdir(parents=True)
    tensors, expected = {}, {}
    for name, tensor in read_folder(folder).items():
        expected[name] = tensors[name] = tensor
        if tensor.ndim != 2 or any(f"{part}." in name for part in NOT_CONVERTED):
            continue
        size = block or (tensor.shape[0], tensor.shape[1])
        tensors[name], scales = quantize(tensor.float(), size)
        expected[name] = tensors[name].float() * spread(scales, tensor.shape, size)
        tensors[f"{name}_scale_inv"] = scales if block else scales.reshape(())
        if block is None:
            tensors[name.replace(".weight", ".activation_scale")] = torch.tensor(0.5)
    names = sorted(tensors)
    # The scales of a weight may stand in another file than its values.
    weight_map = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name].contiguous() for name in names if weight_map[name] == file}, target / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((Path(folder) / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic" if block else "static",
        "weight_block_size": block,
        "modules_to_not_convert": NOT_CONVERTED,
        **settings,
    }
    for path in Path(folder).glob("generation_config.json"):
        shutil.copy(path, target)
    (target / "config.json").write_text(json.dumps(config))
    return expected
