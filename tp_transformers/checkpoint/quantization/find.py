"""Detection of the quantised format of a checkpoint from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UnsupportedError
from .awq import Awq
from .bitsandbytes import BitsAndBytes
from .compressed import Compressed
from .float8 import Float8
from .format import Format, Quantization, refused
from .gptq import Gptq
from .mxfp4 import Mxfp4

FORMATS: Mapping[str, type[Format]] = {
    "awq": Awq,
    "bitsandbytes (4bit)": BitsAndBytes,
    "bitsandbytes (8bit)": BitsAndBytes,
    "compressed-tensors": Compressed,
    "fp8": Float8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
"""Quantisation method in a config -> format."""

REMEDIES: Mapping[str, str] = {
    "torchao": "Load the checkpoint in floating point with quantization_config=TorchAoConfig(...), or this one without "
    "tp_plan.",
}
"""Unsupported method -> the fix in its error, if there is a better one than another checkpoint."""


def take_quantization(config: Any, asked: Any) -> Quantization | None:
    """Remove the quantisation settings from a model's `config` and return them; None if there are none.

    `asked` is the caller's `quantization_config` argument of `from_pretrained`.

    Raises UnsupportedError on a format that is not in FORMATS, and on an `asked` that requests anything but
    dequantisation of this format or quantisation with torchao.
    """
    found: dict[str, Any] = {}
    part = None
    for key in (None, *getattr(config, "sub_configs", ())):
        each: Any = config if key is None else getattr(config, key, None)
        if not found:
            found, part = _settings(getattr(each, "quantization_config", None)), key
        if "quantization_config" in vars(each or object):
            del each.quantization_config
    method, wanted = _method(found), _settings(asked)
    if not found and method_of(asked) == "torchao":
        return None
    if wanted and not (found and method == _method(wanted) and _undoes(asked)):
        raise UnsupportedError(
            "from_pretrained",
            got=f"tp_plan with quantization_config for {_method(wanted)}",
            expected="weights in floating point",
            fix="Leave out quantization_config: quantised weights are dequantised; others only torchao quantises.",
        )
    if not found:
        return None
    if method not in FORMATS:
        titles = dict.fromkeys(kind.title for kind in FORMATS.values())
        raise refused(method, f"one in floating point, or in {', '.join(titles)}", REMEDIES.get(method))
    return Quantization(FORMATS[method].of(found), found, part)


def method_of(quantization: Any) -> str:
    """Return the method's name in a quantization_config."""
    return _method(_settings(quantization))


def _undoes(asked: Any) -> bool:
    """Return True for a quantization_config that requests dequantisation."""
    return bool(asked.get("dequantize") if isinstance(asked, dict) else getattr(asked, "dequantize", False))


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
