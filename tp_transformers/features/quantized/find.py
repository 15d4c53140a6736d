"""Detection of the quantised format of a checkpoint, from its config or from its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .awq import Awq
from .bitnet import BitNet
from .bitsandbytes import BitsAndBytes
from .compressed import Compressed
from .float8 import Float8
from .format import Format, Quantization, Tensors, refuse_other, unsupported
from .gptq import Gptq
from .modelopt import ModelOpt, settings_beside
from .mxfp4 import Mxfp4

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

REMEDIES: Mapping[str, str] = {
    "torchao": "Load the checkpoint in floating point with quantization_config=TorchAoConfig(...), or this one without "
    "tp_plan.",
}
"""Unsupported method -> the fix in its error, if there is a better one than another checkpoint."""


def take_quantization(
    config: Any, requested: Any, *, folder: Path | None = None, known: Quantization | None = None
) -> Quantization | None:
    """Remove the quantisation settings from a model's `config` and return them; None if there are none.

    `requested` is the caller's `quantization_config` argument of `from_pretrained`; `folder`: of a local checkpoint;
    `known`: the quantisation of all files of a kind.

    Raises UnsupportedError on a format that is not in FORMATS, and if `requested` asks for anything but
    dequantisation of this format or quantisation with torchao.
    """
    settings: dict[str, Any] = dict(known.settings) if known is not None else {}
    sub_config = None
    for key in (None, *getattr(config, "sub_configs", ())):
        candidate: Any = config if key is None else getattr(config, key, None)
        if not settings:
            settings, sub_config = _settings(getattr(candidate, "quantization_config", None)), key
        if "quantization_config" in vars(candidate or object):
            del candidate.quantization_config
    settings = settings or (settings_beside(folder) if folder is not None else {})
    method, requested_settings = _method(settings), _settings(requested)
    if not settings and method_of(requested) == "torchao":
        return None
    if requested_settings and not (settings and method == _method(requested_settings) and _dequantises(requested)):
        raise refuse_other(_method(requested_settings))
    if not settings:
        return None
    if known is not None:
        return known
    if method not in FORMATS:
        titles = dict.fromkeys(kind.title for kind in FORMATS.values())
        raise unsupported(method, f"one in floating point, or in {', '.join(titles)}", REMEDIES.get(method))
    return Quantization(FORMATS[method].of(settings), settings, sub_config)


def recognised(tensors: Tensors, names: Collection[str]) -> Quantization | None:
    """The quantisation that the tensors of a checkpoint show, if its config has none; `names`: those of the model."""
    return Quantization(ModelOpt(), {"quant_method": "modelopt"}) if ModelOpt.is_format_of(tensors, names) else None


def method_of(quantization: Any) -> str:
    """Return the method's name in a quantization_config."""
    return _method(_settings(quantization))


def _dequantises(requested: Any) -> bool:
    """Return True for a quantization_config that requests dequantisation."""
    return bool(requested.get("dequantize") if isinstance(requested, dict) else getattr(requested, "dequantize", False))


def _settings(quantization: Any) -> dict[str, Any]:
    """Convert a quantization_config (a dict, an object of transformers or None) to a dict."""
    if quantization is None or isinstance(quantization, dict):
        return quantization or {}
    return dict(quantization.to_dict())


def _method(settings: Mapping[str, Any] | None) -> str:
    """Return the method's name in a config: gptq, awq, ..."""
    if not settings:
        return "nothing"
    bits = next((f"bitsandbytes ({name[8:]})" for name in ("load_in_4bit", "load_in_8bit") if settings.get(name)), None)
    method = settings.get("quant_method")
    return bits or str(getattr(method, "value", method))
