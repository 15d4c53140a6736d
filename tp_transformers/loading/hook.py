"""`enable()` and `disable()`: the only file that patches transformers, and that knows which releases it fits.

What stands in for the patched functions is in `pretrained`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any

import transformers
from transformers import PreTrainedModel, modeling_utils
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto import modeling_auto  # noqa: F401 - defines the Auto classes
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils.loading_report import LoadStateDictInfo

from ..errors import UnsupportedError, describe
from .from_pretrained import find_quantizer, from_pretrained, load_pretrained_model, resolve_files

OLDEST, FIRST_UNSUPPORTED = (5, 6), (6, 0)
"""The versions of transformers that the hook is made for: OLDEST <= version < FIRST_UNSUPPORTED."""

_SEAM_ARGUMENTS = ["model", "state_dict", "checkpoint_files", "load_config"]
_FILES_ARGUMENTS = [
    "pretrained_model_name_or_path",
    "variant",
    "gguf_file",
    "use_safetensors",
    "user_agent",
    "is_remote_code",
    "transformers_explicit_filename",
    "download_kwargs",
    "tqdm_class",
]
_QUANTIZER_ARGUMENTS = ["config", "quantization_config", "device_map", "weights_only", "user_agent"]
_SEAM_CONFIG = {
    "pretrained_model_name_or_path",
    "sharded_metadata",
    "weight_mapping",
    "dtype_plan",
    "ignore_mismatched_sizes",
}
_SEAM_INFO = {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors"}


_originals: dict[tuple[Any, str], Any] = {}


class enable:  # noqa: N801 - used as a function, returns its own context manager
    """Let `from_pretrained(..., tp_plan=...)` load through this package; calling it again changes nothing.

    As a context manager it puts back on exit what it found:

        with tp_transformers.enable():
            model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")

    Raises UnsupportedError where the installed transformers is not one that the hook fits; nothing is patched then.
    """

    def __init__(self) -> None:
        self._turned_on = not _originals
        if self._turned_on:
            _check_transformers()
            _patch(PreTrainedModel, "_load_pretrained_model", load_pretrained_model)
            _patch(modeling_utils, "_get_resolved_checkpoint_files", resolve_files)
            _patch(modeling_utils, "get_hf_quantizer", find_quantizer)
            for cls in (PreTrainedModel, *_auto_classes()):
                _patch(cls, "from_pretrained", from_pretrained)

    def __enter__(self) -> enable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._turned_on:
            disable()


def disable() -> None:
    """Put back exactly what `enable()` replaced; models that are loaded stay as they are."""
    while _originals:
        (owner, name), original = _originals.popitem()
        setattr(owner, name, original)


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a class or static method, or a module's function; the replacement gets the original function first."""
    descriptor = vars(owner)[name]
    _originals[owner, name] = descriptor
    original = getattr(descriptor, "__func__", descriptor)

    @wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, patched if original is descriptor else type(descriptor)(patched))


def _auto_classes() -> list[type]:
    """Every Auto class for models; each has a `from_pretrained` of its own."""
    classes = [_BaseAutoModelClass]
    for cls in classes:
        classes.extend(cls.__subclasses__())
    return [cls for cls in classes if "from_pretrained" in cls.__dict__]


def _check_transformers() -> None:
    """Raise UnsupportedError unless the installed transformers has the seam that the hook is made for."""
    version = transformers.__version__
    problems = []
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) < FIRST_UNSUPPORTED:
        problems.append("another version")
    found = list(inspect.signature(PreTrainedModel._load_pretrained_model).parameters)
    if found[: len(_SEAM_ARGUMENTS)] != _SEAM_ARGUMENTS:
        problems.append(f"_load_pretrained_model({', '.join(found)})")
    found = list(inspect.signature(modeling_utils._get_resolved_checkpoint_files).parameters)
    if found != _FILES_ARGUMENTS:
        problems.append(f"_get_resolved_checkpoint_files({', '.join(found)})")
    found = list(inspect.signature(modeling_utils.get_hf_quantizer).parameters)
    if found[: len(_QUANTIZER_ARGUMENTS)] != _QUANTIZER_ARGUMENTS:
        problems.append(f"get_hf_quantizer({', '.join(found)})")
    for cls, needed in ((LoadStateDictConfig, _SEAM_CONFIG), (LoadStateDictInfo, _SEAM_INFO)):
        lacking = needed - {info.name for info in dataclasses.fields(cls)}
        if lacking:
            problems.append(f"{cls.__name__} without {', '.join(sorted(lacking))}")
    if problems:
        raise UnsupportedError(
            describe(
                "tp_transformers.enable()",
                got=f"transformers {version} with {'; '.join(problems)}",
                expected=f"transformers >= {_dotted(OLDEST)}, < {_dotted(FIRST_UNSUPPORTED)}",
                fix="Nothing was patched. Install a supported transformers, or a newer tp_transformers.",
            )
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
