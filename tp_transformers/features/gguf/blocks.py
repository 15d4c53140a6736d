"""GGUF (llama.cpp): blocks of 32 or 256 columns, each with its scales, under the names of a transformers model.

[header.py](header.py) reads the file. The package `gguf` decodes blocks, as transformers does.

llama.cpp renames tensors, and changes some: it interleaves the halves of Llama's rotary query and key rows, separates
the experts' gate and up projections, adds 1 to Gemma's norms, ... transformers undoes that with one processor per
architecture, from complete tensors. Here, rows and experts are slices, and read as such; the processor gets the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import UnsupportedError
from ...slices.composed import concat
from ...slices.lazy import Deferred, LazyTensor
from ..quantized.affine import Affine
from ..quantized.bundle import Bundle, Component, Decode, DimMap, StoredValues
from ..quantized.format import Format, Shapes, Tensors
from .header import ARCHITECTURE, Blocks

_ROTARY = re.compile(r"\.attn_[qk]\.weight$")
_EXPERTS = re.compile(r"(.*\.ffn_(gate|up|down)_exps)\.weight$")

_PROCESSED: Mapping[str, str | None] = {
    "gemma2": r"norm\.weight$",
    "gemma3": r"norm\.weight$",
    "lfm2": r"shortconv\.conv\.weight$",
    "llama": r"\.attn_[qk]\.bias$",
    "mamba": r"ssm_conv1d\.weight$|ssm_a$",
    "minimax-m2": None,
    "nemotron": r"norm\.weight$",
    "qwen2moe": r"ffn_gate_inp_shexp",
    "qwen3moe": r"ffn_gate_inp_shexp",
    "t5": None,
    "t5encoder": None,
}
"""Architecture -> the tensors that its processor changes, but for rotary rows and experts. Of others: all tensors."""


def _names(architecture: str, processor: Any, names: Iterable[str], layers: int) -> dict[str, str]:
    """Name in the file -> name in the model, for the `names` of a model with `layers`; two may have the same one.

    llama.cpp names the tensors of several classes of a model, so the names without their first modules count too.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next((key for key, value in MODEL_ARCH_NAMES.items() if value == architecture), None)
    if arch is None:
        fix = "Update the package (pip install -U gguf), or load safetensors files."
        expected = "one that the installed package gguf knows"
        raise UnsupportedError("gguf_file", got=f"the architecture {architecture}", expected=expected, fix=fix)
    known = get_tensor_name_map(arch, layers)
    result: dict[str, str] = {}
    relative = {name: ("", name) for name in names}
    while relative:
        found: dict[str, str] = {}
        for prefix, name in relative.values():
            name = processor.preprocess_name(name)
            stem, _, kind = name.rpartition(".")
            stem, kind = (stem, f".{kind}") if kind in ("weight", "bias") else (name, "")
            in_file = known.get_name(stem)
            if in_file is None:
                processor.perform_fallback_tensor_mapping(found, kind, prefix, name)
            else:
                found[in_file + kind] = prefix + name
        result = found | result
        relative = {
            name: (f"{prefix}{first}.", rest)
            for name, (prefix, inner) in relative.items()
            for first, _, rest in [inner.partition(".")]
            if rest
        }
    return result


def _processed(processor: Any, name: str, tensor: LazyTensor) -> torch.Tensor:
    """The tensor as transformers' processor gives it back."""
    results: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
    values = tensor.materialize().float().numpy()
    value = processor.process(weights=values, name=name, parsed_parameters=results).weights
    (value,) = results["tensors"].values() or (torch.from_numpy(value.copy()),)
    return value


def _rotary_rows(name: str, tensor: LazyTensor, head: int) -> Bundle:
    """The rows of heads in transformers' order: the first half of the rotary rows, then the second."""
    if isinstance(tensor, Bundle):
        (key, component), decode = next(iter(tensor.components.items())), tensor.decode
    else:
        key, component, decode = "values", Component(tensor, (DimMap(0), DimMap(1)), name), _values
    order = partial(_by_halves, head)
    components = {key: Component(component.tensor, (DimMap(0, head, head), component.dims[1]), name)}
    in_order = (
        decode.with_rows(order) if isinstance(decode, Affine) else lambda stored, shape: order(decode(stored, shape))
    )
    return Bundle(components, tensor.shape, tensor.dtype, in_order)


def _by_halves(head: int, values: torch.Tensor) -> torch.Tensor:
    """(rows, columns), rows of complete heads."""
    return values.view(-1, head // 2, 2, values.shape[-1]).transpose(1, 2).reshape(values.shape)


def _values(stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    return stored["values"]


def gguf_conversion(architecture: str, config: Any) -> list[Any] | None:
    """transformers' conversions for the tensors of a GGUF file; None for an architecture that has a processor."""
    try:
        from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, is_gguf_arch_supported
    except ImportError:  # before 5.24
        return None
    if not is_gguf_arch_supported(architecture):
        return None
    conversions: list[Any] = get_gguf_conversion_mapping(architecture, config)
    return conversions


def gguf_processor(architecture: str, config: Any) -> tuple[Any, bool]:
    """transformers' processor for the decoded tensors of a GGUF file; False if it changes none of them."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    kind = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    return kind(config=config.to_dict()), kind is not TensorProcessor


BLOCKS = "blocks"
"""The name of a weight's stored tensor."""


@dataclass(frozen=True)
class Gguf(Format):
    """Every tensor that is stored in blocks."""

    title = "GGUF"
    is_written = False

    def dequantized(self, tensors: Tensors) -> dict[str, LazyTensor]:
        return {
            name: _bundle(name, tensor) if isinstance(tensor, Blocks) else tensor for name, tensor in tensors.items()
        }

    def named(self, model: PreTrainedModel, tensors: Tensors, shapes: Shapes) -> tuple[Tensors, Sequence[Any]]:
        """See `Format.named`; tensors that transformers does not read, such as `rope_freqs.weight`, are left out."""
        first: Any = next(iter(tensors.values()))
        stored: Any = next(iter(first.components.values())).tensor if isinstance(first, Bundle) else first
        architecture: str = stored.source.metadata[ARCHITECTURE]
        conversion = gguf_conversion(architecture, model.config)
        if conversion is not None:
            return tensors, conversion
        processor, changes = gguf_processor(architecture, model.config)
        changed = _PROCESSED.get(architecture, "" if changes else None)
        names = _names(architecture, processor, shapes, model.config.num_hidden_layers)
        by_target: dict[str, list[LazyTensor]] = {}
        for name in sorted(tensors):  # gate before up
            experts = _EXPERTS.match(name)
            target = names.get(experts[1] if experts else name)
            if target is not None:
                tensor = tensors[name]
                if architecture == "llama" and _ROTARY.search(name):
                    heads = "num_attention_heads" if ".attn_q." in name else "num_key_value_heads"
                    tensor = _rotary_rows(name, tensor, len(tensor) // getattr(model.config, heads))
                elif changed is not None and not experts and re.search(changed, name):
                    process = partial(_processed, processor, name, tensor)
                    tensor = Deferred(process, shape=shapes[target], dtype=tensor.dtype)
                by_target.setdefault(target, []).append(tensor)
        return {name: found[0] if len(found) == 1 else concat(found, 1) for name, found in by_target.items()}, []


def _bundle(name: str, blocks: Blocks) -> Bundle:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(blocks.kind)
    length, nbytes = GGML_QUANT_SIZES[kind]
    *leading, width = blocks.shape
    dims = (*map(DimMap, range(len(leading))), DimMap(len(leading), length, nbytes))
    shape = (*leading, width // nbytes * length)
    decode: Decode = partial(_decode, kind)
    if kind.name in _FOUR_BITS:
        integers, scales = partial(_integers, nbytes), partial(_by_group, _FOUR_BITS[kind.name], nbytes)
        decode = Affine(decode, 4, 32, BLOCKS, integers, scales, adds=kind.name != "Q4_0")
    return Bundle({BLOCKS: Component(blocks, dims, name)}, shape, torch.float32, decode)


def _decode(kind: Any, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    from gguf import dequantize

    blocks = stored[BLOCKS]
    values = torch.from_numpy(dequantize(blocks.cpu().contiguous().numpy(), kind))
    return values.view(*shape).to(blocks.device)


def _integers(nbytes: int, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    """(rows, columns) uint8: the last bytes of a block have the low halves of as many integers, then the high ones.

    Q4_0 and Q4_1 have 16 such bytes, Q4_K four times 32.
    """
    blocks = stored[BLOCKS].reshape(-1, nbytes)
    pairs = blocks[:, -16:] if nbytes < 32 else blocks[:, -128:].reshape(-1, 4, 32)
    return torch.stack((pairs & 0xF, pairs >> 4), -2).reshape(*shape)


def _by_group(
    scales: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | int]],
    nbytes: int,
    stored: StoredValues,
    shape: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor | int]:
    scale, zero = scales(stored[BLOCKS].reshape(-1, nbytes))
    zero = zero.reshape(shape[0], -1) if isinstance(zero, torch.Tensor) else zero
    return scale.reshape(shape[0], -1), zero


def _halves(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """The float16 numbers at the beginning of each block, (blocks, count) in float32."""
    return blocks[:, : 2 * count].contiguous().view(torch.float16).float()


def _scales_q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, int]:
    return _halves(blocks, 1), 8


def _scales_q4_1(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale, value = _halves(blocks, 2).unbind(1)
    return scale, value


def _scales_q4_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 scales and minima of a block, of 6 bits each, are packed in 12 bytes, and scaled once more."""
    low, mid, high = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, (high & 0xF) | (low >> 6) << 4), 1)
    minima = torch.cat((mid & 63, (high >> 4) | (mid >> 6) << 4), 1)
    scale, minimum = _halves(blocks, 2).split(1, 1)
    return scale * scales, -minimum * minima


_FOUR_BITS: Mapping[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | int]]] = {
    "Q4_0": _scales_q4_0,
    "Q4_1": _scales_q4_1,
    "Q4_K": _scales_q4_k,
}
"""Types with integers of 4 bits, which an operator multiplies -> scales and zero points, or values of 0, of a block."""
