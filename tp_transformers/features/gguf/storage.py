"""`gguf_file=`: transformers reads the config in the file's metadata, and is then given a model with that config.

transformers itself would decode the complete file in every process, before the point where this package loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file

from ...checkpoint.reading.header import Checkpoint
from ...errors import CheckpointError, TensorParallelError, UnsupportedError
from ...loading.storage import Asked, Found, Storage
from ...ranks.group import TensorParallelGroup
from ...slices.lazy import LazyTensor
from ...slices.stored import Source
from ..quantized.find import Quantization
from .blocks import Gguf
from .header import read_gguf_header

_OF_FILE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of `from_pretrained` that find the file."""


class GgufCheckpoint(Checkpoint):
    """An open GGUF file."""

    def read(self, source: Source) -> Mapping[str, LazyTensor]:
        return read_gguf_header(source)


class GgufFile(Storage):
    """One GGUF file, which holds the config, too."""

    argument: ClassVar[str] = "gguf_file"
    endings = (".gguf",)
    checkpoint = GgufCheckpoint
    encoding = Quantization(Gguf(), {"quant_method": "gguf"})

    def __init__(self, file: str) -> None:
        self.agreed = self.file = file

    @classmethod
    def find(cls, asked: Asked) -> Storage | None:
        file = asked.arguments.pop("gguf_file", None)
        return None if file is None else cls(file)

    def prepare(self, asked: Asked, group: TensorParallelGroup) -> None:
        """Put the config and the dtype into the arguments. The dtype is float32 unless given, as in transformers.

        Rank 0 reads the config, which takes transformers seconds, since it parses the tokenizer too.

        Raises:
            CheckpointError: the file is missing, or transformers cannot read its config.
            UnsupportedError: an architecture that transformers does not support, or no package `gguf`.
        """
        arguments = asked.arguments
        if arguments.get("dtype", arguments.get("torch_dtype")) in (None, "auto"):
            arguments.pop("torch_dtype", None)
            arguments["dtype"] = torch.float32
        if not isinstance(arguments.get("config"), PreTrainedConfig):
            arguments["config"] = group.from_first(lambda: _config(asked.cls, asked.name, self.file, arguments))
        if arguments.get("generation_config") is None:  # transformers would look for its file, which a GGUF lacks
            arguments["generation_config"] = GenerationConfig.from_model_config(arguments["config"])

    def files(self, original: Callable[..., Any], arguments: Mapping[str, Any], group: TensorParallelGroup) -> Found:
        return super().files(original, {**arguments, "gguf_file": self.file}, group)


def _config(cls: Any, name: Any, gguf_file: str, kwargs: Mapping[str, Any]) -> PreTrainedConfig:
    arguments = {argument: kwargs[argument] for argument in _OF_FILE if argument in kwargs}
    config_class = getattr(cls, "config_class", None) or AutoConfig
    subject = f"{gguf_file} of {name}"
    try:
        path = cached_file(name, gguf_file, **arguments)
        arguments.pop("force_download", None)
        with GgufCheckpoint([str(path)]):  # a damaged file gets an error of its own
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
