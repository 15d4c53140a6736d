"""The private API of transformers that this package uses, and a check that it exists.

Public are the names in `transformers.__all__` and the module `transformers.utils`. A test lets no other module import
anything else, but for late imports of features that it lists.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from transformers import PreTrainedModel, core_model_loading, modeling_utils
from transformers.core_model_loading import (
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import custom_object_save, get_class_from_dynamic_module
from transformers.generation.streamers import BaseStreamer
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_utils import LoadStateDictConfig, get_state_dict_dtype, str_to_torch_dtype
from transformers.models.auto import modeling_auto
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.hub import extract_commit_hash
from transformers.utils.loading_report import LoadStateDictInfo

from .errors import UnsupportedError

__all__ = [
    "BaseStreamer",  # base of the streamers that receive tokens, one per rank
    "ForCausalLMLoss",  # the only loss that loss parallelism replaces
    "LoadStateDictConfig",  # argument of the weight load
    "LoadStateDictInfo",  # result of the weight load
    "WeightRenaming",  # renaming of tensors in the model's weight conversions
    "auto_classes",
    "build_glob_alternation",  # matches a tensor's name to its conversion, as transformers does
    "check",
    "core_model_loading",  # its conversion operations, which are reimplemented on slices
    "custom_object_save",  # saves the custom code of a model's repository
    "dot_natural_key",  # the order in which transformers processes the tensors of one conversion
    "extract_commit_hash",  # commit of a file in the Hub cache
    "get_class_from_dynamic_module",  # a class of a repository's custom code, once it is trusted
    "get_keys_to_not_convert",  # modules that a quantiser leaves as they are unless its config lists them
    "get_state_dict_dtype",  # dtype="auto" for weights that are streamed from the Hub
    "modeling_utils",  # two of its functions are replaced
    "rename_source_key",  # maps a checkpoint tensor's name to its name in the model
    "revert_weight_conversion",  # maps names and shapes back to the checkpoint's for saved files
    "should_convert_module",  # modules that a quantised config leaves in floating point
    "str_to_torch_dtype",  # dtype names in safetensors headers
]

OLDEST, FIRST_UNSUPPORTED = (5, 6), (6, 0)
"""Supported versions of transformers: OLDEST <= version < FIRST_UNSUPPORTED."""

METHODS = {
    "_load_pretrained_model": "replaced by our load",
    "_adjust_missing_and_unexpected_keys": "the load's report leaves out the keys that a class ignores",
    "_from_config": "a model on the meta device",
}
"""Private methods of PreTrainedModel -> their use."""

_ARGUMENTS: Mapping[tuple[Any, str], tuple[str, ...]] = {
    (PreTrainedModel, "_load_pretrained_model"): ("model", "state_dict", "checkpoint_files", "load_config"),
    (modeling_utils, "_get_resolved_checkpoint_files"): (
        *("pretrained_model_name_or_path", "variant", "gguf_file", "use_safetensors", "user_agent"),
        *("is_remote_code", "transformers_explicit_filename", "download_kwargs", "tqdm_class"),
    ),
    (modeling_utils, "get_hf_quantizer"): ("config", "quantization_config", "device_map", "weights_only", "user_agent"),
}
"""First parameters of the functions that `enable()` replaces."""

_FIELDS: Mapping[type, set[str]] = {
    LoadStateDictConfig: {
        *("pretrained_model_name_or_path", "sharded_metadata", "weight_mapping", "dtype_plan"),
        "ignore_mismatched_sizes",
    },
    LoadStateDictInfo: {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors"},
}
"""Fields that the load of this package reads or returns."""


def check() -> None:
    """Raise UnsupportedError unless the installed transformers has the private API that this package uses."""
    version = transformers.__version__
    problems = []
    if not OLDEST <= tuple(int(number) for number in version.split(".")[:2]) < FIRST_UNSUPPORTED:
        problems.append("another version")
    problems += [f"no {name}" for name in METHODS if not hasattr(PreTrainedModel, name)]
    problems += ["no _BaseAutoModelClass"] if not hasattr(modeling_auto, "_BaseAutoModelClass") else []
    for (owner, name), needed in _ARGUMENTS.items():
        function: Callable[..., Any] | None = getattr(owner, name, None)
        parameters = tuple(inspect.signature(function).parameters) if function is not None else ()
        if parameters[: len(needed)] != needed:
            problems.append(f"{name}({', '.join(parameters)})")
    for cls, fields in _FIELDS.items():
        lacking = fields - {info.name for info in dataclasses.fields(cls)}
        if lacking:
            problems.append(f"{cls.__name__} without {', '.join(sorted(lacking))}")
    if problems:
        got = f"transformers {version} with {'; '.join(problems)}"
        expected = f"transformers >= {_dotted(OLDEST)}, < {_dotted(FIRST_UNSUPPORTED)}"
        fix = "Nothing was patched. Install a supported transformers, or a newer tp_transformers."
        raise UnsupportedError("tp_transformers.enable()", got=got, expected=expected, fix=fix)


def auto_classes() -> list[type]:
    """Every Auto model class that defines its own `from_pretrained`."""
    classes: list[type] = [modeling_auto._BaseAutoModelClass]
    for cls in classes:
        classes.extend(cls.__subclasses__())
    return [cls for cls in classes if "from_pretrained" in cls.__dict__]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
