"""Where the weights of a load lie (`Storage`), and what the tensors mean (`Encoding`).

Here: safetensors files, of which each tensor is the value of a parameter. Features add storages and encodings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from huggingface_hub import try_to_load_from_cache

from ..checkpoint.conversion.convert import Conversion, convert
from ..checkpoint.reading.header import Checkpoint, check_files, read_index, with_variant
from ..checkpoint.reading.jobs import Progress, Request
from ..errors import CheckpointError
from ..ranks.group import TensorParallelGroup
from ..seams import added, first
from ..slices.lazy import LazyTensor
from ..slices.stored import Source
from ..transformers_api import LoadStateDictConfig, extract_commit_hash
from .options import Options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = Mapping[str, LazyTensor]
"""Tensors of a checkpoint, by name."""
Found = tuple[Sequence[str] | None, Mapping[str, Any] | None]
"""Names of the files of a checkpoint, and the metadata of their index."""


class Encoding:
    """What the tensors of one checkpoint mean; this class: each is the value of a parameter.

    A subclass overrides what differs; its `find` and `find_in` decide whether a checkpoint is of its kind.
    """

    @classmethod
    def find(
        cls, config: Any, requested: Any, *, folder: Path | None, known: Encoding | None, device: torch.device
    ) -> Encoding | None:
        """The encoding that a config, or the caller's `quantization_config` (`requested`), asks for; None: of no kind.

        Removes the settings from `config`. `folder`: of a local checkpoint; `known`: that of all files of the storage.
        """
        return None

    @classmethod
    def find_in(cls, tensors: Tensors, names: Collection[str]) -> Encoding | None:
        """The encoding that tensors show, if no config says it; `names`: those of the model."""
        return None

    @classmethod
    def check_plain(cls, tensors: Tensors, conversion: Conversion, missing: Collection[str]) -> None:
        """Raise UnsupportedError if the tensors of a plain checkpoint are of this kind; `missing`: parameters."""

    def recognised(self, tensors: Tensors, names: Collection[str]) -> Encoding:
        """The encoding that tensors show, if no config says it; `names`: those of the model."""
        kinds: Sequence[type[Encoding]] = added("encodings")
        return first((kind.find_in(tensors, names) for kind in kinds), self)

    def read_first(self, tensors: Tensors) -> list[str]:
        """Name the tensors whose values determine how others are sliced; they are read first."""
        return []

    def convert(
        self, model: PreTrainedModel, tensors: Tensors, shapes: Mapping[str, torch.Size], request: Any
    ) -> Conversion:
        """Write the parameters of `model`, of the full `shapes`, as expressions over `tensors` of a LoadRequest."""
        entries = None if request.storage.has_own_names else request.config.weight_mapping
        conversion = convert(model, tensors, shapes, entries)
        for kind in added("encodings"):
            kind.check_plain(tensors, conversion, shapes.keys() - conversion.expressions.keys())
        return conversion

    def is_decoded(self, expression: LazyTensor) -> bool:
        """True if a parameter is in memory in two forms while it is read."""
        return False

    def log(self, stored: int, held: int, *, is_kept: bool) -> None:
        """Log bytes in files and in memory; `is_kept`: whether parameters have another form than tensors in memory."""


@dataclass(frozen=True)
class Asked:
    """The arguments of a `from_pretrained` with a plan."""

    cls: Any
    """The class of the model, or an Auto class."""
    name: Any
    """The path or the name of the checkpoint; None if weights are given in memory."""
    options: Options
    arguments: dict[str, Any]
    """All other arguments. A storage may change them before transformers reads them; the name stays, and transformers
    looks for a config there: a storage in a single file is asked for by an argument, or found in a folder."""

    @property
    def folder(self) -> Path | None:
        """The folder that the name stands for, which need not exist; None without a name."""
        return None if self.name is None else Path(self.name, self.arguments.get("subfolder") or "")


class Storage:
    """Where the weights of one load lie, and how they are opened; this class: safetensors files, or none.

    A load calls `find`, holds `agreed` against the other ranks, calls `prepare`, lets transformers read the config,
    then calls `files` and `open`. Another format of local files: `endings`, and a subclass of `Checkpoint`
    that describes each tensor as `Stored` at an offset of the file, which is then mapped, prefetched and compared like
    safetensors (a slice at an offset that is no multiple of the item size is copied). `Checkpoint.read` sets the
    `header_hash` of the source, which several machines compare. Another medium: `sources`, which returns objects of a
    subclass of `Source`; a `LocalFile` alone is mapped.
    """

    argument: ClassVar[str] = "the checkpoint"
    """The argument of `from_pretrained` by which a load asks for it, for messages; or what a folder holds."""
    agreed: object = None
    """The value that has to be equal on all ranks."""
    endings: Sequence[str] = (".safetensors",)
    """Endings of the names of its files."""
    checkpoint: ClassVar[type[Checkpoint]] = Checkpoint
    """How its files are opened."""
    is_remote = False
    """True if reads cross a network."""
    has_own_names = False
    """True if tensors have the names and shapes of the model's parameters, so that nothing is converted."""
    shares: Sequence[float] | None = None
    """The share of each rank as the weights were saved; None: even, or not known."""
    encoding: Encoding | None = None
    """Encoding of all such files; None: as the config says."""

    @classmethod
    def find(cls, asked: Asked) -> Storage | None:
        """The storage of this kind that a load asks for; None if transformers finds weights. Each rank looks alone."""
        return cls()

    @classmethod
    def check_unplanned(cls, asked: Asked) -> None:
        """Raise CheckpointError if a load without a plan would find files of this kind alone, which need one."""

    def prepare(self, asked: Asked, group: TensorParallelGroup) -> None:
        """Complete the arguments, before transformers reads the config. Collective."""

    def files(self, original: Callable[..., Any], arguments: Mapping[str, Any], group: TensorParallelGroup) -> Found:
        """Find the files; one rank of each node downloads them. Collective.

        The result is the same on all ranks. Of files that transformers cannot open, the metadata has a "dtype", torch's
        name of the first in floating point: transformers opens a file if neither a config nor the metadata says it.

        Args:
            original: transformers' function that finds the files.
            arguments: all arguments that transformers calls `original` with.
        """
        download = arguments.get("download_kwargs") or {}

        def find(first: bool) -> Any:
            force = first and bool(download.get("force_download"))
            try:
                return original(**{**arguments, "download_kwargs": {**download, "force_download": force}})
            except OSError as error:  # other ranks raise the same class, which has to be ours
                raise CheckpointError(str(error)) from error
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # transformers, on a bad index
                _check_index(arguments, download)
                raise

        files: Found = group.first_on_node(find)
        return files

    def sources(self, files: Sequence[str]) -> Sequence[str | Source]:
        """The files that `files` found, by their names: paths, or sources that are open already."""
        return files

    def open(self, files: Sequence[str], config: LoadStateDictConfig, *, rank: int) -> Checkpoint:
        """Open the files and read their headers, for the shards of `rank`. Raises CheckpointError if that fails."""
        sources, weight_map = self.sources(files), (config.sharded_metadata or {}).get("weight_map")
        check_files(files, folder=str(config.pretrained_model_name_or_path), endings=self.endings)
        return self.checkpoint(sources, weight_map=weight_map)

    def fetch(
        self, reads: Sequence[Request], checkpoint: Checkpoint, group: TensorParallelGroup, progress: Progress
    ) -> None:
        """Read what no rank can read alone: tensors in remote sources. Collective."""

    def applied(self, entries: Sequence[Any]) -> Sequence[Any] | None:
        """Of transformers' conversions `entries`, those that the tensors have been through; None: those of the load."""
        return None

    def origin(self, name: str, files: Sequence[str]) -> Mapping[str, Any]:
        """The name and the commit of the checkpoint, which a save writes down."""
        return {"name": name or None, "commit_hash": extract_commit_hash(next(iter(files), None), None)}


def _check_index(arguments: Mapping[str, Any], download: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the index of a checkpoint is on this machine, and cannot be read."""
    name, variant = str(arguments["pretrained_model_name_or_path"]), arguments.get("variant")
    file = arguments.get("transformers_explicit_filename") or with_variant("model.safetensors.index.json", variant)
    path = os.path.join(download.get("subfolder") or "", file)
    index: Any = os.path.join(name, path)
    if not os.path.isfile(index):
        found = {"cache_dir": download.get("cache_dir"), "revision": download.get("revision")}
        index = None if os.path.isdir(name) else try_to_load_from_cache(name, path, **found)
    if isinstance(index, str):
        read_index(index)
