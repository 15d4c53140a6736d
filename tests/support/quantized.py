"""Quantised checkpoints in their published layouts, made of checkpoints in floating point with plain torch."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.comparisons import read_folder

Tensors = dict[str, torch.Tensor]
Change = Callable[[str, torch.Tensor], Tensors | None]


def rewrite(folder: str | Path, target: Path, settings: Mapping[str, Any], change: Change) -> None:
    """Write a checkpoint again in one file, with what `change` makes of its tensors; None leaves one alone."""
    target.mkdir(parents=True)
    tensors: Tensors = {}
    for name, tensor in read_folder(folder).items():
        made = change(name, tensor)
        tensors |= {name: tensor} if made is None else made
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    for path in Path(folder).glob("generation_config.json"):
        shutil.copy(path, target)
    config = json.loads((Path(folder) / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": dict(settings)}))


def mxfp4(folder: str | Path, target: Path) -> Tensors:
    """Experts in MXFP4, of random values: (experts, in, out) -> blocks (experts, out, in / 32, 16) and scales.

    What they are is left to transformers.
    """

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return None
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 124, blocks.shape[:-1], dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    rewrite(folder, target, {"quant_method": "mxfp4"}, change)
    return {}


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """(rows, n) of unsigned values -> (rows, ceil(n * bits / 32)) int32: value i stands from bit i * `bits` on."""
    words = torch.zeros(len(values), -(-values.shape[1] * bits // 32) + 1, dtype=torch.int64)
    for index, column in enumerate(values.long().unbind(1)):
        word, offset = divmod(index * bits, 32)
        words[:, word] |= (column << offset) & 0xFFFFFFFF
        words[:, word + 1] |= column << offset >> 32
    words = words[:, :-1]
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)


def compressed(
    folder: str | Path, target: Path, *, bits: int = 4, group: int | None = None, symmetric: bool = True
) -> Tensors:
    """The linears in `pack-quantized`, of random values; returns what their weights are, in the dtype of the scales."""
    expected: Tensors = {}
    half = 1 << (bits - 1)

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if not is_linear(name, tensor):
            return None
        rows, columns = tensor.shape
        values = torch.randint(-half, half, (rows, columns))
        scales = torch.rand(rows, columns // group if group else 1).add(0.5).div(50 * half).to(tensor.dtype)
        zeros = torch.zeros_like(scales) if symmetric else torch.randint_like(scales, -half, half)
        each = group or columns
        expected[name] = (values.to(tensor.dtype) - zeros.repeat_interleave(each, 1)) * scales.repeat_interleave(
            each, 1
        )
        made = {
            f"{name}_packed": pack(values + half, bits),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor([rows, columns]),
        }
        return made if symmetric else made | {f"{name}_zero_point": pack(zeros.t() + half, bits).t()}

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    rewrite(folder, target, settings, change)
    return expected


def small_groups(folder: str | Path, target: Path, *, form: str) -> Tensors:
    """The linears in NVFP4, MXFP4 or MXFP8 of compressed-tensors; returns what their weights are, in bfloat16."""
    expected: Tensors = {}
    group, bits = 16 if form.startswith("nv") else 32, 8 if form == "mxfp8-quantized" else 4
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((table, -table)).bfloat16()

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if not is_linear(name, tensor):
            return None
        rows, columns = tensor.shape
        made: Tensors = {}
        if bits == 8:
            made[name] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
            values = made[name].bfloat16()
        else:
            indices = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
            made[f"{name}_packed"] = indices[:, ::2] | indices[:, 1::2] << 4
            values = table[indices.long()]
        if group == 16:
            made[f"{name}_scale"] = torch.rand(rows, columns // group).add(1).to(torch.float8_e4m3fn)
            made[f"{name}_global_scale"] = torch.tensor([37.0])
            scales = made[f"{name}_scale"].bfloat16() / torch.tensor([37.0])
        else:
            made[f"{name}_scale"] = torch.randint(119, 123, (rows, columns // group), dtype=torch.uint8)
            scales = torch.ldexp(torch.ones(1), made[f"{name}_scale"].int() - 127)
        expected[name] = (values * scales.repeat_interleave(group, 1)).bfloat16()
        return made

    strategy = "tensor_group" if group == 16 else "group"
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group}
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    rewrite(folder, target, settings, change)
    return expected


def modelopt(folder: str | Path, target: Path, *, form: str = "fp8") -> Tensors:
    """The linears in ModelOpt's FP8 by tensors or by rows, or NVFP4, of random values; returns what the weights are.

    The config does not say so: `hf_quant_config.json` does.
    """
    expected: Tensors = {}
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((table, -table))

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if not is_linear(name, tensor):
            return None
        rows, columns = tensor.shape
        made: Tensors = {f"{name.removesuffix('weight')}input_scale": torch.tensor(0.02)}
        if form == "nvfp4":
            indices = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
            made[name] = indices[:, ::2] | indices[:, 1::2] << 4
            made[f"{name}_scale"] = torch.rand(rows, columns // 16).add(1).to(torch.float8_e4m3fn)
            made[f"{name}_scale_2"] = torch.tensor(0.003)
            scales = (made[f"{name}_scale"].float() * 0.003).repeat_interleave(16, 1)
            expected[name] = (table[indices.long()] * scales).to(tensor.dtype)
            return made
        made[name] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        made[f"{name}_scale"] = torch.rand(rows).add(1) / 100 if form == "fp8 by rows" else torch.tensor(0.013)
        expected[name] = (made[name].float() * made[f"{name}_scale"].reshape(-1, 1)).to(tensor.dtype)
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            made[f"{name.removesuffix('weight')}{name[-13]}_scale"] = torch.tensor(1.0)
        return made

    rewrite(folder, target, {}, change)
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    named = {"quant_algo": form.partition(" ")[0].upper(), "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (target / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": named}))
    return expected


def unit(bits: int) -> tuple[int, int]:
    """The fewest values that fill words without a rest, and the number of words."""
    common = math.gcd(bits, 32)
    return 32 // common, bits // common


def gptq(
    folder: str | Path,
    target: Path,
    *,
    bits: int = 4,
    group: int = 32,
    desc_act: bool = False,
    version: str = "gptq",
    is_random: bool = True,
) -> Tensors:
    """The linears in GPTQ, of random values or the nearest; returns what their weights are, in the scales' dtype."""
    expected: Tensors = {}

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if not is_linear(name, tensor):
            return None
        rows, columns = tensor.shape
        count = -(-columns // group)
        values, scales, zeros = _random(rows, columns, count, bits) if is_random else _nearest(tensor, group, bits)
        order = (torch.arange(columns) // group).int()
        order = order[torch.randperm(columns)] if desc_act else order
        expected[name] = (values - zeros[:, order]).half() * scales[:, order]
        stored = zeros - 1 if version == "gptq" else zeros
        prefix = name.removesuffix("weight")
        return {
            f"{prefix}qweight": pack(values, bits).t(),
            f"{prefix}qzeros": pack(stored.t(), bits),
            f"{prefix}scales": scales.t(),
            f"{prefix}g_idx": order,
        }

    settings = {"bits": bits, "group_size": group, "desc_act": desc_act, "checkpoint_format": version}
    rewrite(folder, target, {"quant_method": "gptq", **settings}, change)
    return expected


def awq(folder: str | Path, target: Path, *, group: int = 32, is_random: bool = True) -> Tensors:
    """The linears in AWQ, of random values or the nearest; returns what their weights are, in the scales' dtype."""
    expected: Tensors = {}

    def words(values: torch.Tensor) -> torch.Tensor:
        """(n, out) -> (n, out / 8): the even features of eight, then the odd ones."""
        return pack(values.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if not is_linear(name, tensor):
            return None
        rows, columns = tensor.shape
        values, scales, zeros = _random(rows, columns, columns // group, 4) if is_random else _nearest(tensor, group, 4)
        spread = [each.repeat_interleave(group, 1) for each in (scales, zeros)]
        expected[name] = (values - spread[1]).half() * spread[0]
        prefix = name.removesuffix("weight")
        return {
            f"{prefix}qweight": words(values.t()),
            f"{prefix}qzeros": words(zeros.t()),
            f"{prefix}scales": scales.t(),
        }

    rewrite(folder, target, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}, change)
    return expected


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """True for a weight that is quantised."""
    return tensor.ndim == 2 and not any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate."))


def _random(rows: int, columns: int, groups: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales and zero points; the latter from 1 on, and (rows, groups)."""
    values = torch.randint(0, 1 << bits, (rows, columns))
    scales = torch.rand(rows, groups).add(0.5).div(50 << bits).half()
    return values, scales, torch.randint(1, 1 << bits, (rows, groups))


def _nearest(weight: torch.Tensor, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, nearest to a weight."""
    low, high = torch.aminmax(weight.float().unflatten(1, (-1, group)), dim=-1)
    scales = ((high - low) / ((1 << bits) - 1)).half()
    zeros = torch.round(-low / scales).clamp(1, (1 << bits) - 1)
    spread = [each.repeat_interleave(group, 1) for each in (scales.float(), zeros)]
    return (weight / spread[0] + spread[1]).round().clamp(0, (1 << bits) - 1).long(), scales, zeros.long()
