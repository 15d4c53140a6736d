"""`gguf_file=`: transformers reads the config in the file's metadata, and is then given a model with that config.

transformers itself would decode the complete file in every process, before the point where this package loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file

from ..checkpoint.reading.header import Checkpoint
from ..errors import CheckpointError, TensorParallelError, UnsupportedError
from ..ranks.group import TensorParallelGroup

_OF_FILE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of `from_pretrained` that find the file."""


def read_gguf_config(cls: Any, name: Any, gguf_file: str, kwargs: dict[str, Any], group: TensorParallelGroup) -> None:
    """Put the config in `gguf_file` and the dtype into the arguments of `cls.from_pretrained(name)`.

    The dtype is float32 unless given, as in transformers. Rank 0 reads the config, which takes transformers seconds,
    since it parses the tokenizer too. Collective.

    Raises:
        CheckpointError: the file is missing, or transformers cannot read its config.
        UnsupportedError: an architecture that transformers does not support, or no package `gguf`.
    """
    if kwargs.get("dtype", kwargs.get("torch_dtype")) in (None, "auto"):
        kwargs.pop("torch_dtype", None)
        kwargs["dtype"] = torch.float32
    if not isinstance(kwargs.get("config"), PreTrainedConfig):
        kwargs["config"] = group.from_first(lambda: _config(cls, name, gguf_file, kwargs))
    if kwargs.get("generation_config") is None:  # transformers would look for its file, which a GGUF does not have
        kwargs["generation_config"] = GenerationConfig.from_model_config(kwargs["config"])


def _config(cls: Any, name: Any, gguf_file: str, kwargs: Mapping[str, Any]) -> PreTrainedConfig:
    arguments = {argument: kwargs[argument] for argument in _OF_FILE if argument in kwargs}
    config_class = getattr(cls, "config_class", None) or AutoConfig
    subject = f"{gguf_file} of {name}"
    try:
        path = cached_file(name, gguf_file, **arguments)
        arguments.pop("force_download", None)
        with Checkpoint([str(path)]):  # a damaged file gets an error of its own
            config: PreTrainedConfig = config_class.from_pretrained(name, gguf_file=gguf_file, **arguments)
    except TensorParallelError:
        raise
    except ImportError as error:
        fix = "pip install gguf"
        raise UnsupportedError(subject, got="no package gguf", expected="it, to read the file", fix=fix) from error
    except ValueError as error:
        raise UnsupportedError(f"{subject}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{subject}: {error}") from error
    return config
