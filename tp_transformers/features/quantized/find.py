"""Quantisation of a checkpoint: its format, found in the config or in the tensors, and what its tensors mean."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...checkpoint.conversion.convert import Conversion, convert, renamer
from ...errors import size
from ...loading.request import LoadRequest
from ...loading.storage import Encoding, Tensors
from ...logs import get_logger
from ...marks import untyped
from ...slices.lazy import LazyTensor
from .bitnet import BitNet
from .bitsandbytes import BitsAndBytes
from .bundle import Decoded
from .compressed import Compressed
from .float8 import Float8
from .format import Format, Locate, check_read, of_weights, refuse_other, stored_names, unsupported
from .modelopt import ModelOpt, settings_beside
from .mxfp4 import Mxfp4
from .words import Awq, Gptq

logger = get_logger(__name__)

FORMATS: Mapping[str, type[Format]] = {
    "awq": Awq,
    "bitnet": BitNet,
    "bitsandbytes (4bit)": BitsAndBytes,
    "bitsandbytes (8bit)": BitsAndBytes,
    "compressed-tensors": Compressed,
    "fp8": Float8,
    "gptq": Gptq,
    "modelopt": ModelOpt,
    "mxfp4": Mxfp4,
}
"""Quantisation method in a config -> format."""

_TORCHAO = (
    "Load the checkpoint in floating point with quantization_config=TorchAoConfig(...), or this one without tp_plan."
)


@dataclass(frozen=True)
class Quantization(Encoding):
    """The quantisation settings of a model's config."""

    format: Format
    settings: Mapping[str, Any]
    sub_config: str | None = None
    """Name of the sub-config that has the settings; None for the model's config itself."""

    @classmethod
    def find(
        cls,
        config: Any,
        requested: Any,
        *,
        folder: Path | None = None,
        known: Encoding | None = None,
        device: torch.device | None = None,
    ) -> Encoding | None:
        """See `Encoding.find`.

        Raises UnsupportedError on a format that is not in FORMATS, and if `requested` asks for anything but
        dequantisation of this format or quantisation with torchao.
        """
        settings: dict[str, Any] = dict(known.settings) if isinstance(known, cls) else {}
        sub_config = None
        for key in (None, *getattr(config, "sub_configs", ())):
            candidate: Any = config if key is None else getattr(config, key, None)
            if not settings:
                settings, sub_config = _settings(getattr(candidate, "quantization_config", None)), key
            if "quantization_config" in vars(candidate or object):
                del candidate.quantization_config
        settings = settings or (settings_beside(folder) if folder is not None else {})
        method, wanted = _method(settings), _method(_settings(requested))
        if wanted != "nothing" and not (settings and method == wanted and _dequantises(requested)):
            if not settings and wanted == "torchao":
                return None
            raise refuse_other(wanted)
        if not settings or known is not None:
            return known
        if method not in FORMATS:
            titles = dict.fromkeys(kind.title for kind in FORMATS.values())
            fix = _TORCHAO if method == "torchao" else None
            raise unsupported(method, f"one in floating point, or in {', '.join(titles)}", fix)
        return cls(FORMATS[method].of(settings), settings, sub_config)

    @classmethod
    def find_in(cls, tensors: Tensors, names: Collection[str]) -> Encoding | None:
        """See `Encoding.find_in`: only ModelOpt's checkpoints may lack a config."""
        return cls(ModelOpt(), {"quant_method": "modelopt"}) if ModelOpt.is_format_of(tensors, names) else None

    @classmethod
    def check_plain(cls, tensors: Tensors, conversion: Conversion, missing: Collection[str]) -> None:
        check_read(tensors, conversion.unread, missing)

    def recognised(self, tensors: Tensors, names: Collection[str]) -> Encoding:
        return self

    def read_first(self, tensors: Tensors) -> list[str]:
        return self.format.read_first(tensors)

    def convert(
        self, model: PreTrainedModel, tensors: Tensors, shapes: Mapping[str, torch.Size], request: LoadRequest
    ) -> Conversion:
        """See `Encoding.convert`. Quantised tensors keep the names of the original checkpoint."""
        entries = request.config.weight_mapping
        form = self.format.located(model, locator(model, shapes, entries))
        stays_packed = request.options.get("tp_dequantize") is False
        if stays_packed and not form.is_packable:
            fix = "Load it with tp_dequantize=True."
            raise unsupported(f"{form.title}, to stay packed", "weights to dequantise", fix)
        decoded: Tensors = form.dequantized(of_weights(tensors, shapes))
        named = form.named(model, decoded, shapes)
        decoded, entries = (decoded, entries) if named is None else named
        conversion = convert(model, decoded, shapes, entries)
        check_read(decoded, conversion.unread, shapes.keys() - conversion.expressions.keys())
        if named is not None:  # a save writes the names of the model's class
            untyped(model)._weight_conversions = None
        elif stays_packed:
            encoding = {name for tensor in decoded.values() for name in stored_names(tensor)}
            conversion.beside = {
                name: tensor
                for name, tensor in tensors.items()
                if name not in encoding and decoded.get(name) is not tensor
            }
        return conversion

    def is_decoded(self, expression: LazyTensor) -> bool:
        """True if some of it is decoded from tensors that are read first."""
        meta = torch.empty(expression.shape, device="meta")
        return any(isinstance(step, Decoded) for step, _ in expression.read_steps(meta))

    def log(self, stored: int, held: int, *, is_kept: bool) -> None:
        logger.log(
            logging.INFO if is_kept else logging.WARNING,
            "the checkpoint is in %s, and %s: of %s in its files, this rank makes %s in memory",
            self.format.title,
            "stays packed" if is_kept else "dequantised while it is loaded, without tp_dequantize=False or --packed",
            size(stored),
            size(held),
        )

    def put_into(self, config: Any) -> None:
        """Write the settings into `config`."""
        target = config if self.sub_config is None else getattr(config, self.sub_config)
        target.quantization_config = dict(self.settings)


def locator(model: PreTrainedModel, shapes: Mapping[str, torch.Size], entries: Sequence[Any] | None) -> Locate:
    """Find the module of `model` for a module of the checkpoint."""
    rename, linear = renamer(model, shapes, entries), nn.Linear(1, 1, device="meta")
    modules = dict(model.named_modules())

    def locate(module: str) -> tuple[str, nn.Module]:
        weight, pattern = rename(f"{module}.weight")
        name = weight.rpartition(".")[0]
        return name, linear if pattern is not None else modules.get(name, linear)

    return locate


def _dequantises(requested: Any) -> bool:
    """Return True for a quantization_config that requests dequantisation; not all of them convert that to a dict."""
    return bool(requested.get("dequantize") if isinstance(requested, dict) else getattr(requested, "dequantize", False))


def _settings(quantization: Any) -> dict[str, Any]:
    """Convert a quantization_config (a dict, an object of transformers or None) to a dict."""
    if quantization is None or isinstance(quantization, dict):
        return quantization or {}
    return dict(quantization.to_dict())


def _method(settings: Mapping[str, Any]) -> str:
    """Return the method's name in a config: gptq, awq, ..."""
    if not settings:
        return "nothing"
    bits = next((f"bitsandbytes ({name[8:]})" for name in ("load_in_4bit", "load_in_8bit") if settings.get(name)), None)
    method = settings.get("quant_method")
    return bits or str(getattr(method, "value", method))
