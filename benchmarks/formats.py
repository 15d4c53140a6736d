"""Random tensors of checkpoints: in floating point, and in the layouts of quantised formats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

GROUP = 128
MXFP4 = "mxfp4"
LINEARS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""Ends of the names of linears, which are quantised; MXFP4 has experts instead."""
# The 16 values of nf4, as bitsandbytes has them.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def stored(name: str, shape: tuple[int, ...], dtype: torch.dtype, form: str = "") -> Tensors:
    """The tensors that a checkpoint has of a parameter; `form`: a name of FORMATS, or "" for floating point."""
    if form == MXFP4 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {f"{name}{part}": value for part, value in mxfp4(*shape).items()}
    if form not in ("", MXFP4) and name.endswith(LINEARS):
        made = FORMATS[form][0](*shape)
        return {f"{name.removesuffix('weight')}{part}": value for part, value in made.items()}
    # Of norms, and of a bias by which states are alike: else a token's experts depend on how products are rounded.
    is_one = "norm" in name or name.endswith("o_proj.bias")
    return {name: torch.ones(shape, dtype=dtype) if is_one else weights(shape).to(dtype)}


def weights(shape: tuple[int, ...]) -> torch.Tensor:
    """bf16 of random signs and magnitudes between 2^-7 and 2^-6: as small as weights, and none zero."""
    count = math.prod(shape)
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    bits.view(torch.int16).bitwise_and_(0x007F - 0x8000).bitwise_or_(120 << 7)  # the exponent is set
    return bits.view(torch.bfloat16)[:count].view(shape)


def gptq(rows: int, columns: int) -> Tensors:
    """4 bits, groups of 128, zero points."""
    return {
        "qweight": _words(columns // 8, rows),
        "qzeros": _words(columns // GROUP, rows // 8),
        "scales": _scales(columns // GROUP, rows).half(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }


def awq(rows: int, columns: int) -> Tensors:
    """4 bits, groups of 128, zero points."""
    return {
        "qweight": _words(columns, rows // 8),
        "qzeros": _words(columns // GROUP, rows // 8),
        "scales": _scales(columns // GROUP, rows).half(),
    }


def int4(rows: int, columns: int) -> Tensors:
    """compressed-tensors `pack-quantized`, groups of 128, symmetric."""
    values = torch.randint(1, 16, (rows, columns), dtype=torch.uint8)  # of mean 8, which is 0
    return {
        "weight_packed": (values[:, ::2] | values[:, 1::2] << 4).view(torch.int32),
        "weight_scale": _scales(rows, columns // GROUP).bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }


def int8(rows: int, columns: int) -> Tensors:
    """compressed-tensors `int-quantized`, a scale per row."""
    return {
        "weight": torch.randint(-127, 128, (rows, columns), dtype=torch.int8),
        "weight_scale": _scales(rows, 1).bfloat16() / 16,
    }


def fp8(rows: int, columns: int) -> Tensors:
    """float8_e4m3fn in blocks of 128 x 128."""
    return {
        "weight": (_bytes(rows, columns) & 0xBF).view(torch.float8_e4m3fn),  # below 2
        "weight_scale_inv": _scales(-(-rows // GROUP), -(-columns // GROUP)) * 2,
    }


def bnb_int8(rows: int, columns: int) -> Tensors:
    """bitsandbytes' int8, a scale per row."""
    return {
        "weight": torch.randint(-127, 128, (rows, columns), dtype=torch.int8),
        "SCB": _scales(rows) * 8,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def nf4(rows: int, columns: int) -> Tensors:
    """bitsandbytes' nf4, blocks of 64."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    return {
        "weight": _bytes(rows * columns // 2, 1),
        "weight.absmax": _scales(rows * columns // 64) * 8,
        "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def mxfp4(experts: int, columns: int, rows: int) -> Tensors:
    """Two values a byte, an exponent for every 32."""
    blocks = (experts, rows, columns // 32, 16)
    return {"_blocks": _bytes(*blocks), "_scales": torch.randint(117, 120, blocks[:-1], dtype=torch.uint8)}


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def _scales(*shape: int) -> torch.Tensor:
    return (torch.rand(*shape) + 0.5) * 4e-3


def _compressed(form: str, bits: int, group: int | None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if group else "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"all": {"targets": ["Linear"], "weights": weights | {"group_size": group}}},
        "ignore": ["lm_head", "re:.*block_sparse_moe.gate$"],
    }


FORMATS: dict[str, tuple[Callable[..., Tensors], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "int4": (int4, _compressed("pack-quantized", 4, GROUP)),
    "int8": (int8, _compressed("int-quantized", 8, None)),
    "bnb int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "fp8": (
        fp8,
        {
            "quant_method": "fp8",
            "weight_block_size": [GROUP, GROUP],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", "embed_tokens"],
        },
    ),
    MXFP4: (mxfp4, {"quant_method": MXFP4}),
}
"""Format -> (the stored tensors of a linear of this many rows and columns, the settings in the config)."""
