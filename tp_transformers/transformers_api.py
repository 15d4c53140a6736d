"""The private API of transformers that this package uses, and a check that it exists.

Public are the names in `transformers.__all__` and the module `transformers.utils`. A test lets no other module import
anything else, but for names that one feature alone uses.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers import core_model_loading as core_model_loading  # conversion operations, reimplemented on slices
from transformers import modeling_utils as modeling_utils  # two functions of it are replaced
from transformers.core_model_loading import WeightRenaming as WeightRenaming  # of tensors, in weight conversions
from transformers.core_model_loading import build_glob_alternation as build_glob_alternation  # name -> conversion
from transformers.core_model_loading import dot_natural_key as dot_natural_key  # order of tensors in a conversion
from transformers.core_model_loading import rename_source_key as rename_source_key  # name in a file -> in the model
from transformers.core_model_loading import revert_weight_conversion as revert_weight_conversion  # model -> saved file
from transformers.dynamic_module_utils import custom_object_save as custom_object_save  # code of a model's repository
from transformers.generation.streamers import BaseStreamer as BaseStreamer  # base of what receives tokens, one per rank
from transformers.modeling_utils import LoadStateDictConfig as LoadStateDictConfig  # argument of the weight load
from transformers.modeling_utils import str_to_torch_dtype as str_to_torch_dtype  # dtypes in safetensors headers
from transformers.quantizers.quantizers_utils import should_convert_module as should_convert_module  # or leave it
from transformers.utils.hub import extract_commit_hash as extract_commit_hash  # commit of a file in the Hub cache
from transformers.utils.loading_report import LoadStateDictInfo as LoadStateDictInfo  # result of the weight load

from .errors import UnsupportedError

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
        expected = "transformers >= {}.{}, < {}.{}".format(*OLDEST, *FIRST_UNSUPPORTED)
        fix = "Nothing was patched. Install a supported transformers, or a newer tp_transformers."
        raise UnsupportedError("tp_transformers.enable()", got=got, expected=expected, fix=fix)
