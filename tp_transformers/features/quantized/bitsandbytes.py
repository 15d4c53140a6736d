"""bitsandbytes: int8 with a scale per row, and 4 bits (nf4, fp4) with a scale per block of the flattened weight.

X.weight  (out, in) int8        X.SCB  (out) float32
X.weight  (out * in / 2, 1)     X.weight.absmax  (blocks) float32, or uint8 (quantised in blocks themselves)
                                X.weight.quant_map, X.weight.quant_state.bitsandbytes__nf4: values, and JSON
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...slices.composed import reshaped
from ...slices.lazy import LazyTensor, Resident
from .affine import Affine
from .bundle import Bundle, Component, DimMap, StoredValues
from .format import (
    Format,
    Part,
    Tensors,
    bundle,
    described,
    inconsistent,
    multiply_blocks,
    pair_table,
    stored_tensor,
    unpack_pairs,
    unsupported,
    without_values,
)

_STATE = ".quant_state.bitsandbytes__"
_BLOCK, _OUTER_BLOCK = 64, 256
"""Values that share a scale, and scales that share one, in the library; a config does not tell."""
_SCALE = 7.874015718698502e-3
"""1 / 127, rounded as in the library."""


@dataclass(frozen=True)
class BitsAndBytes(Format):
    """Every weight that has an `SCB` or a `quant_state`."""

    title = "bitsandbytes"

    bits: int
    kind: str
    """nf4 or fp4, of 4 bits."""
    is_nested: bool
    """True if the scales of 4 bits are quantised in blocks themselves."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> BitsAndBytes:
        storage = str(settings.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
        if storage != "uint8":
            raise unsupported(f"bitsandbytes in words of {storage}", "one in words of uint8")
        bits, kind = 4 if settings.get("load_in_4bit") else 8, str(settings.get("bnb_4bit_quant_type") or "fp4")
        return cls(bits, kind, bool(settings.get("bnb_4bit_use_double_quant")))

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if len(shape) != 2 or (self.bits == 4 and shape[1] % _BLOCK):
            return {}
        rows, columns = shape
        if self.bits == 8:
            return described(_parts_of_rows(name).values(), shape, dtype)
        count, floats = rows * columns // _BLOCK, partial(without_values, torch.float32)
        state = {"blocksize": _BLOCK, "shape": [rows, columns], "dtype": str(dtype).removeprefix("torch.")}
        result = {
            name: without_values(torch.uint8, rows * columns // 2, 1),
            f"{name}.absmax": without_values(torch.uint8 if self.is_nested else torch.float32, count),
            f"{name}.quant_map": floats(16),
        }
        if self.is_nested:
            state["nested_blocksize"] = _OUTER_BLOCK
            result |= {f"{name}.nested_absmax": floats(-(-count // _OUTER_BLOCK))}
            result |= {f"{name}.nested_quant_map": floats(_OUTER_BLOCK)}
        result[f"{name}{_STATE}{self.kind}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return result

    def read_first(self, tensors: Tensors) -> list[str]:
        return [name for name in tensors if _STATE in name]

    def dequantized(self, tensors: Tensors) -> dict[str, LazyTensor]:
        states = {name.partition(_STATE)[0]: name for name in tensors if _STATE in name}
        result: dict[str, LazyTensor] = {}
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            if name in states:
                result[name] = self._of_blocks(tensors, name, tensors[states[name]])
            elif kind == "weight" and f"{module}.SCB" in tensors:
                decode = Affine(_decode_rows, 8, None, "values", _integers, _scales)
                result[name] = bundle(name, tensors, _parts_of_rows(name), tensor.shape, decode, torch.float32)
            elif not (module in states or name.partition(_STATE)[0] in states or kind in ("SCB", "weight_format")):
                result[name] = tensor
            elif kind == "SCB" and f"{module}.weight" not in tensors:
                raise inconsistent(f"{module}.weight", "no such tensor", f"one for {name}")
        return result

    def _of_blocks(self, tensors: Tensors, name: str, state: LazyTensor) -> Bundle:
        try:
            settings = json.loads(bytes(state.materialize().tolist()))
            (rows, columns), block = map(int, settings["shape"]), int(settings["blocksize"])
            dtype, nested = getattr(torch, settings["dtype"]), int(settings.get("nested_blocksize") or 0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise inconsistent(
                name, f"a quant_state that cannot be read ({error})", "shape, blocksize and dtype"
            ) from None
        if columns % block:
            got = f"bitsandbytes in blocks of {block} that cross the rows of {name}, of {columns} columns"
            raise unsupported(got, "one whose rows consist of blocks")
        per_row = columns // block
        values = stored_tensor(tensors, name, 2, torch.uint8)
        scales = stored_tensor(tensors, f"{name}.absmax", tensors[f"{name}.absmax"].ndim, torch.uint8, torch.float32)
        if values.numel() * 2 != rows * columns or scales.numel() != rows * per_row:
            raise inconsistent(
                name, f"{values.numel()} pairs and {scales.numel()} scales", f"those of {rows} x {columns}"
            )
        by_block, floats = (DimMap(0), DimMap(1, block)), [torch.float32]
        parts: dict[str, Part | Component] = {
            "values": Component(reshaped(values, (rows, columns // 2)), (DimMap(0), DimMap(1, 2)), name),
            "scales": Component(reshaped(scales, (rows, per_row)), by_block, f"{name}.absmax"),
            "map": Part(f"{name}.quant_map", (16,), floats),
        }
        if nested:
            of = torch.arange(rows * per_row, dtype=torch.int32).div(nested, rounding_mode="floor").view(rows, per_row)
            of_dtype = torch.int16 if rows * per_row <= nested << 15 else torch.int32  # for each block, in memory
            parts["of"] = Component(Resident(of.to(of_dtype)), by_block)
            parts["nested_absmax"] = Part(f"{name}.nested_absmax", (-(-rows * per_row // nested),), floats)
            parts["nested_quant_map"] = Part(f"{name}.nested_quant_map", (_OUTER_BLOCK,), floats)
        decode = Blocks(block, float(settings.get("nested_offset") or 0), dtype)
        return bundle(name, tensors, parts, (rows, columns), decode, dtype)

    def as_stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith(".absmax"):
            return tensor.flatten()
        return tensor.reshape(-1, 1) if name.endswith(".weight") and tensor.dtype == torch.uint8 else tensor


def _parts_of_rows(name: str) -> dict[str, Part]:
    return {
        "values": Part(name, (DimMap(0), DimMap(1)), [torch.int8]),
        "scales": Part(f"{name.removesuffix('weight')}SCB", (DimMap(0),), [torch.float32]),
    }


def _decode_rows(stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    return stored["values"].to(torch.float32).mul_(stored["scales"].unsqueeze(1)).mul_(_SCALE)


def _integers(stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    return stored["values"]


def _scales(stored: StoredValues, shape: Sequence[int]) -> tuple[torch.Tensor, int]:
    return stored["scales"].unsqueeze(1) * _SCALE, 0


@dataclass(eq=False)
class Blocks:
    """A `Decode` of 4 bits with a scale per block of columns, in float32.

    `stored` has `values` (rows, columns / 2), with the first of two columns in the high half, `scales`, and `map`.
    """

    block: int
    offset: float
    dtype: torch.dtype
    """Dtype of the decoded values."""
    _table: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)
    """A `map`, and its `pair_table`."""

    def __call__(self, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
        if self._table is None or self._table[0] is not stored["map"]:
            self._table = stored["map"], pair_table(stored["map"], high_first=True)
        return multiply_blocks(unpack_pairs(stored["values"], self._table[1]), self.scales(stored), (self.block,)).to(
            self.dtype
        )

    def scales(self, stored: StoredValues) -> torch.Tensor:
        """The scales (rows, blocks), which may be quantised in blocks themselves."""
        scales = stored["scales"]
        if "of" not in stored:
            return scales
        return stored["nested_quant_map"][scales.long()] * stored["nested_absmax"][stored["of"].long()] + self.offset
