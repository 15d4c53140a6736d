"""Quantised checkpoints as the libraries of the formats make them, of checkpoints in floating point."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import pad
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)

from tests.support.comparisons import read_folder
from tests.support.quantized import Tensors, is_linear, rewrite

GROUP = 32
"""Columns that share a scale; a side of the blocks of FP8."""

Maker = Callable[[Path, Path], Any]
"""(checkpoint in floating point, folder for the quantised one) -> what one process makes of the latter, in float32."""


def float8(folder: Path, target: Path, *, by_block: bool = True) -> Any:
    """transformers' own quantiser, by blocks or by tensors."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = FineGrainedFP8Config(weight_block_size=(GROUP, GROUP) if by_block else None)
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=config))

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if not is_linear(name, tensor):
            return None
        made = quantiser.convert({name: tensor})
        return (
            made
            if by_block
            else {each: value.reshape(()) if "scale" in each else value for each, value in made.items()}
        )

    skipped = ["lm_head", "embed_tokens", "mlp.gate"]
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": skipped}
    rewrite(folder, target, settings | {"weight_block_size": [GROUP, GROUP] if by_block else None}, change)
    return _undone(target, FineGrainedFP8Config(dequantize=True, **({} if by_block else {"weight_block_size": None})))


def mxfp4(folder: Path, target: Path) -> Any:
    """The experts of GPT-OSS, each by compressed-tensors, in transformers' layout; transformers undoes them."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return None
        made = [compress("mxfp4-pack-quantized", weights, each.t().contiguous())[0] for each in tensor]
        blocks = torch.stack([each["weight_packed"] for each in made])
        return {
            f"{name}_blocks": blocks.unflatten(-1, (-1, 16)),
            f"{name}_scales": torch.stack([each["weight_scale"] for each in made]),
        }

    rewrite(folder, target, {"quant_method": "mxfp4"}, change)
    return _undone(target, Mxfp4Config(dequantize=True))


def compressed(folder: Path, target: Path, *, form: str, **weights: Any) -> Any:
    """compressed-tensors in the format `form`; transformers undoes it with the library, or the library alone.

    transformers 5.23 does not pass the zero points of experts on ("Asymmetric quant requires zero-point values").
    """
    pytest.importorskip("compressed_tensors")
    expected: Tensors = {}

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if not is_linear(name, tensor):
            return None
        prefix, (made, expected[name]) = name.removesuffix("weight"), compress(form, weights, tensor)
        return {f"{prefix}{each}": value for each, value in made.items()}

    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }
    rewrite(folder, target, settings, change)
    if not weights.get("symmetric", True):
        return _with(folder, expected)
    return _undone(target, CompressedTensorsConfig(dequantize=True))


def compress(form: str, weights: dict[str, Any], weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The stored tensors of a weight by compressed-tensors, and the values that the library decodes them to."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    is_nv, is_mx = weights["strategy"] == "tensor_group", form.startswith("mx")
    scales = {"scale_dtype": torch.float8_e4m3fn if is_nv else torch.uint8} if is_nv or is_mx else {}
    args = QuantizationArgs(**weights, **scales)
    divisor = generate_gparam(weight.min(), weight.max()).reshape(1) if is_nv else None
    if "group_size" in weights:
        low, high = torch.aminmax(weight.unflatten(1, (-1, weights["group_size"])), dim=-1)
    elif "block_structure" in weights:
        sides = weights["block_structure"]
        counts = [-(-length // side) for length, side in zip(weight.shape, sides, strict=True)]
        padding = [count * side - length for count, side, length in zip(counts, sides, weight.shape, strict=True)]
        blocks = pad(weight, (0, padding[1], 0, padding[0])).view(counts[0], sides[0], counts[1], sides[1])
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif weights["strategy"] == "tensor":
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    else:
        low, high = torch.aminmax(weight, dim=-1, keepdim=True)
    scale, zero = calculate_qparams(low, high, args, global_scale=divisor)
    given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero, "weight_global_scale": divisor}
    if is_nv or is_mx:
        del given["weight_zero_point"]
    compressor = BaseCompressor.get_value_from_registry(form)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = compressor.compress({name: value for name, value in given.items() if value is not None}, scheme)
    state = {name: value for name, value in state.items() if value is not None}
    return state, compressor.decompress(dict(state), scheme)["weight"]


def gptq(folder: Path, target: Path, *, form: str = "gptq", dynamic: dict[str, Any] | None = None, **given: Any) -> Any:
    """GPTQ's layout by gptqmodel, rounded to the nearest; the library's own weights.

    `given` are bits, group_size and desc_act, which the rules `dynamic` change for some modules.
    """
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # of two cores it makes one worker, and needs two
    pytest.importorskip("gptqmodel")
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import dynamic_get
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    expected: Tensors = {}
    settings = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, **given}

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        changes = dynamic_get(dynamic, name.removesuffix(".weight"), default={})
        if not is_linear(name, tensor) or changes is False:
            return None
        rows, columns = tensor.shape
        own = settings | changes
        order = (torch.arange(columns) // own["group_size"]).int()
        order = order[torch.randperm(columns)] if own["desc_act"] else order
        scales, zeros = _grid(tensor, order, own["bits"])
        module = TorchLinear(**own, in_features=columns, out_features=rows)
        module.pack_original(_linear(tensor), scales, zeros, order)
        module.optimize = lambda *args, **kwargs: None  # compiles
        module.post_init()
        expected[name] = module.dequantize_weight().t().clone()
        if form == "gptq":
            convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=own["bits"], group_size=own["group_size"]))
        return {f"{name.removesuffix('weight')}{each}": value for each, value in module.state_dict().items()}

    rules = {} if dynamic is None else {"dynamic": dynamic}
    rewrite(folder, target, {"quant_method": "gptq", **settings, "checkpoint_format": form, **rules}, change)
    return _with(folder, expected)


def awq(folder: Path, target: Path) -> Any:
    """AWQ's layout by gptqmodel, rounded to the nearest; the library's own weights."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    expected: Tensors = {}

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if not is_linear(name, tensor):
            return None
        rows, columns = tensor.shape
        scales, zeros = _grid(tensor, torch.arange(columns) // GROUP, 4)
        sizes = {"in_features": columns, "out_features": rows}
        module = AwqTorchLinear(bits=4, group_size=GROUP, sym=False, desc_act=False, register_buffers=True, **sizes)
        module.pack(_linear(tensor), scales, zeros)
        expected[name] = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, GROUP).t().clone()
        return {f"{name.removesuffix('weight')}{each}": value for each, value in module.state_dict().items()}

    rewrite(folder, target, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, change)
    return _with(folder, expected)


def bitsandbytes(folder: Path, target: Path, **settings: Any) -> Any:
    """bitsandbytes, on a CPU; the library undoes it."""
    pytest.importorskip("bitsandbytes")
    asked = BitsAndBytesConfig(**settings)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=asked, device_map={"": "cpu"}, dtype=torch.float32
    )
    model.save_pretrained(target)
    return model.dequantize(dtype=torch.float32)


def libraries(*names: str) -> str:
    """Names and releases of libraries, for a table."""
    return ", ".join(f"{name} {'.'.join(version(name).split('+')[0].split('.')[:2])}" for name in names)


def _grid(weight: torch.Tensor, group_of: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points (rows, groups) that hold the least and the greatest value of every group."""
    index = group_of.long().expand(weight.shape)
    empty = weight.new_zeros(len(weight), int(group_of.max()) + 1, dtype=torch.float32)
    low, high = (empty.scatter_reduce(1, index, weight.float(), how) for how in ("amin", "amax"))
    scales = ((high - low) / ((1 << bits) - 1)).half().float()
    return scales, torch.round(-low / scales).clamp(1, (1 << bits) - 1)


def _linear(weight: torch.Tensor) -> nn.Linear:
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=False)
    linear.weight.data = weight.float()
    return linear


def _undone(folder: Path, config: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    return model.to(torch.float32)  # of FP8, what is not quantised stays as it is stored


def _with(folder: Path, weights: Tensors) -> Any:
    """The model of a checkpoint, in one process, with other weights."""
    target = folder.parent / "expected"
    target.mkdir()
    tensors = {name: tensor.float() for name, tensor in (read_folder(folder) | weights).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
