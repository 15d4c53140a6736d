"""Loading of torch distributed checkpoints without running code from them.

`torch.distributed.checkpoint.load` unpickles the metadata of a checkpoint, and each value that is not a tensor, without
limits: an untrusted checkpoint may run any code. Here both go through an unpickler that only allows the types that such
files contain.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from ...errors import CheckpointError, error_text
from ...ranks.group import agreed

_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {*torch_metadata.__all__, "_MEM_FORMAT_ENCODING"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
"""Module -> its names that the metadata of a checkpoint may use, besides torch's dtypes."""

_FIX = "Do not load it unless you trust where it comes from; torch.distributed.checkpoint.load takes anything."


def load_distributed_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    """Fill `state` as `torch.distributed.checkpoint.load` does, without running code from the checkpoint.

    Collective over the default process group; also works in one process without a group. Entries of an optimizer's
    flattened state are removed from `state` for a parameter that had none in the saved optimizer.

    Args:
        state: nested dicts of tensors, which are filled in place, and of other values, which are replaced: numbers,
            strings, lists and all else that `torch.load(weights_only=True)` accepts.
        folder: the folder of the checkpoint.

    Raises:
        CheckpointError: on all ranks, if the checkpoint names a class or function that is not allowed, or a file
            outside its folder, or was saved of an optimizer without some of the parameters.
        torch.distributed.checkpoint.CheckpointException: as torch's `load`, for missing tensors, wrong shapes and
            unreadable files.
    """
    planner = _Planner()
    try:
        load(state, storage_reader=_Reader(os.fspath(folder)), planner=planner)
        for *path, key in planner.stateless:
            inner: Any = state
            for name in path:
                inner = inner[name]
            del inner[key]
    except CheckpointException as error:
        for failure in dict(sorted(error.failures.items())).values():
            if isinstance(failure[0], CheckpointError):
                raise agreed(CheckpointError(str(failure[0]))) from None
        raise


class _Unpickler(pickle.Unpickler):
    """An unpickler that only resolves the names in `_NAMES` and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Torch's `FileSystemReader` with a restricted unpickler for the metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Return the metadata, or a CheckpointError for `_Planner` to raise: torch reads one from here as no file."""
        content = (Path(self.path) / ".metadata").read_bytes()
        try:
            metadata = _Unpickler(io.BytesIO(content)).load()
            files = [PurePath(info.relative_path) for info in metadata.storage_data.values()]
        except Exception as error:  # a damaged pickle raises anything
            return self._fault(f"metadata that cannot be read ({error_text(error)})")
        outside = next((file for file in files if file.is_absolute() or ".." in file.parts), None)
        if outside is not None:
            return self._fault(f"metadata that names {outside}, outside the folder")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _fault(self, got: str) -> CheckpointError:
        expected = "what torch.distributed.checkpoint writes, and no other classes"
        return CheckpointError(f"distributed checkpoint {self.path}", got=got, expected=expected, fix=_FIX)


class _Planner(DefaultLoadPlanner):
    """Torch's planner; rejects values that `torch.load(weights_only=True)` does not accept.

    It leaves out the states of parameters that had none in the saved optimizer, since they had no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stateless: list[tuple[str | int, ...]] = []
        """Paths in the state that is loaded: those without a value in the checkpoint."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        if isinstance(metadata, CheckpointError):
            raise metadata
        super().set_up_planner(state_dict, metadata, is_coordinator)
        saved: set[str] = set(metadata.state_dict_metadata) if metadata is not None else set()
        parameters = {key.rpartition(".")[0] for key in saved}
        for key in [key for key in self.state_dict if key not in saved]:
            *_, entry = path = self.mappings[key]
            kind, _, rest = str(entry).partition(".")
            name = rest.rpartition(".")[0]
            if kind not in ("state", "param_groups") or not name:
                continue
            prefix = key.removesuffix(str(entry))
            if f"{prefix}param_groups.{name}" not in parameters:
                raise CheckpointError(
                    "optimizer state of a distributed checkpoint",
                    got=f"none of {name}",
                    expected="one of every parameter that is trained",
                    fix="Train the parameters that the saved run trained, or begin with a new optimizer.",
                )
            if f"{prefix}state.{name}" not in parameters:
                self.stateless.append(path)
                del self.state_dict[key]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"value {read_item.dest_index.fqn} of a distributed checkpoint",
                got=str(error).strip().splitlines()[0],
                expected="what torch.load(weights_only=True) takes",
                fix=_FIX,
            ) from None
        value.seek(0)
        super().load_bytes(read_item, value)
