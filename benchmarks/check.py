"""Compare loaded shards with the checkpoint, read by safetensors' own reader and sliced independently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from tp_transformers import full_tensor
from tp_transformers.features.packed.weight import packed_weights

from .checkpoints import BLOCKS, EXPONENTS, FP8_BLOCK, SCALE, files
from .memory import local


class WrongResultError(Exception):
    """A load whose values differ from the checkpoint; it is not timed."""


def check(model: Any, folder: Path, *, rank: int, size: int, collectives: bool) -> int:
    """Compare every parameter and persistent buffer of `model` with the checkpoint; returns their number.

    Args:
        model: loaded by transformers or by this package, on rank `rank` of `size`.
        folder: the checkpoint.
        collectives: True if the other ranks exist: gather and compare each full tensor (collective). Otherwise compare
            this rank's shard with the slice of its layout.

    Raises:
        WrongResultError: with the tensors that differ, that were not loaded, or that the checkpoint lacks.
    """
    faults = []
    with ExitStack() as stack:
        expected = reference(folder, stack)
        packed = packed_weights(model)
        found = model.state_dict(keep_vars=True) if not packed else dict(model.named_parameters())
        faults += [f"{name}: not in the checkpoint" for name in sorted(found.keys() - expected.keys())]
        faults += [f"{name}: not in the model" for name in sorted(expected.keys() - found.keys())]
        for name in sorted(found.keys() & expected.keys()):
            tensor = found[name]
            whole = expected[name]()
            if name in packed:
                value = packed[name].decoded().cpu()
            else:
                value = (full_tensor(tensor) if collectives else local(tensor)).cpu()
            if not collectives or name in packed:
                whole = _shard(whole, tensor, rank, size)
            if value.dtype != whole.dtype or value.shape != whole.shape or not torch.equal(value, whole):
                faults.append(f"{name}: differs from the checkpoint")
    if faults:
        shown = "\n  ".join(faults[:10])
        raise WrongResultError(f"rank {rank}: {len(faults)} of {len(expected)} tensors are wrong:\n  {shown}")
    return len(expected)


def reference(folder: Path, stack: ExitStack) -> Mapping[str, Callable[[], Tensor]]:
    """{name in the model: function that reads the full tensor}; the files stay open as long as `stack`."""
    stored = {}
    for file in files(folder):
        opened = stack.enter_context(safe_open(file, framework="pt"))
        stored |= {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
    return dict(_merged(_dequantised(stored)))


def _dequantised(stored: Mapping[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """Replace quantised tensors by their dequantised bf16 weights, computed with plain arithmetic."""
    found = {}
    for name, read in stored.items():
        if name.endswith(BLOCKS):
            whole = name.removesuffix(BLOCKS)
            found[whole] = partial(_of_pairs, read, stored[whole + EXPONENTS])
        elif name + SCALE in stored:
            found[name] = partial(_of_float8, read, stored[name + SCALE])
        elif not name.endswith((SCALE, EXPONENTS)):
            found[name] = read
    return found


def _of_float8(values: Callable[[], Tensor], scales: Callable[[], Tensor]) -> Tensor:
    """Dequantise (n, m) float8 with one scale per block."""
    weight = values()
    spread = scales().repeat_interleave(FP8_BLOCK, 0)[: len(weight)].repeat_interleave(FP8_BLOCK, 1)
    return (weight.float() * spread[:, : weight.shape[1]]).bfloat16()


def _of_pairs(blocks: Callable[[], Tensor], exponents: Callable[[], Tensor]) -> Tensor:
    """Dequantise (experts, out, in / 32, 16) pairs of values, low half first, to (experts, in, out)."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((table, -table))
    made = []
    for pairs, powers in zip(blocks(), exponents(), strict=True):  # one expert at a time: float32 takes more memory
        values = torch.stack((table[(pairs & 0xF).int()], table[(pairs >> 4).int()]), -1).flatten(-2)
        made.append((values * torch.exp2(powers.float() - 127).unsqueeze(-1)).flatten(-2).bfloat16().T.contiguous())
    return torch.stack(made)


_EXPERT = re.compile(r"(.+)\.block_sparse_moe\.experts\.0\.w1\.weight")


def _merged(stored: Mapping[str, Callable[[], Tensor]]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Merge Mixtral's experts as in the model: gate_up_proj (experts, gate then up, in), down_proj."""
    for name, read in stored.items():
        if match := _EXPERT.fullmatch(name):
            layer = match[1]
            yield f"{layer}.mlp.experts.gate_up_proj", partial(_stack, stored, layer, "w1", "w3")
            yield f"{layer}.mlp.experts.down_proj", partial(_stack, stored, layer, "w2")
        elif ".block_sparse_moe.experts." not in name:
            yield name.replace(".block_sparse_moe.", ".mlp."), read


def _stack(stored: Mapping[str, Callable[[], Tensor]], layer: str, *parts: str) -> Tensor:
    prefix = f"{layer}.block_sparse_moe.experts"
    count = sum(name.startswith(prefix) and name.endswith(".w1.weight") for name in stored)
    first = stored[f"{prefix}.0.{parts[0]}.weight"]()
    whole = first.new_empty(count, len(parts), *first.shape)  # filled, not stacked: once is much already
    for expert in range(count):
        for index, part in enumerate(parts):
            whole[expert, index] = stored[f"{prefix}.{expert}.{part}.weight"]()
    return whole.flatten(1, 2)


def _shard(whole: Tensor, tensor: Tensor, rank: int, size: int) -> Tensor:
    """The slice of the full tensor that a rank should hold, by the layout's ranges or the DTensor's placement."""
    shard = getattr(tensor, "tp_shard", None)
    if shard is not None:
        if shard.layout is None:
            return whole
        ranges = shard.layout.split.ranges[rank]
        return torch.cat(
            [whole.narrow(shard.layout.dim, start, stop - start) for start, stop in ranges], shard.layout.dim
        )
    placement = tensor.placements[-1] if isinstance(tensor, DTensor) else None
    if not hasattr(placement, "dim"):
        return whole
    groups = whole.chunk(getattr(placement, "split_factor", 1), placement.dim)
    return torch.cat([group.chunk(size, placement.dim)[rank] for group in groups], placement.dim)
