"""Repository names -> remote files of one commit; only config and index are stored on disk.

Rank 0 lists the files. The ranks divide them, each resolves its files on the Hub and reads their headers, and all
gather the results.
"""

from __future__ import annotations

import os
import posixpath
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from huggingface_hub import constants, hf_hub_url, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from transformers.modeling_utils import get_state_dict_dtype
from transformers.utils import cached_file

from ...checkpoint.reading.header import HEADER_LIMIT, Checkpoint, check_files, read_header, read_index, with_variant
from ...checkpoint.reading.jobs import Progress, Request
from ...checkpoint.reading.local_file import LocalFile
from ...errors import CheckpointError
from ...loading.storage import Asked, Found, Storage
from ...ranks.group import TensorParallelGroup
from ...slices.stored import Source
from .fetch import fetch
from .fetch_plan import CONNECTIONS
from .remote_file import RemoteFile
from .tries import ask_hub, hub_error, resolve

HEAD_BYTES = 256 << 10
"""Most bytes of the first request for a file's header."""
HEAD_SHARE = 1024
"""The first request for a header fetches 1/HEAD_SHARE of the file, at most HEAD_BYTES."""

T = TypeVar("T")


class Weights:
    """The repository, revision and subfolder where `from_pretrained` looks for weights."""

    def __init__(self, arguments: Mapping[str, Any], download: Mapping[str, Any]) -> None:
        """Read the `arguments` of transformers' `_get_resolved_checkpoint_files`."""
        self.repository = str(arguments["pretrained_model_name_or_path"])
        self.variant: str | None = arguments["variant"]
        self.use_safetensors: bool | None = arguments["use_safetensors"]
        self.file: str | None = arguments.get("transformers_explicit_filename")
        """File or index named by the config."""
        self.revision = str(download["revision"])
        self.subfolder: str = download.get("subfolder") or ""
        self.token: str | bool | None = download.get("token")
        self.download = download
        """All arguments for `cached_file`."""

    def url(self, file: str) -> str:
        return hf_hub_url(self.repository, file, revision=self.revision, subfolder=self.subfolder or None)

    def path(self, file: str) -> str:
        return posixpath.join(self.subfolder, file)

    def cached(self, file: str) -> str | None:
        """Return the path of a file in the local cache; None if it is not cached or `force_download` is set."""
        if self.download.get("force_download"):
            return None
        cache_dir = self.download.get("cache_dir")
        path = try_to_load_from_cache(self.repository, self.path(file), cache_dir=cache_dir, revision=self.revision)
        return path if isinstance(path, str) else None

    def open(self, file: str, **remote: Any) -> RemoteFile:
        """Open a remote file; `remote` are arguments of `RemoteFile`."""
        name = f"{self.repository}@{self.revision[:8]}/{self.path(file)}"
        return RemoteFile(self.url(file), name=name, token=self.token, **remote)


def open_weights(group: TensorParallelGroup, weights: Weights) -> tuple[list[str | RemoteFile], dict[str, Any]]:
    """Open the files of a checkpoint on the Hub; also return transformers' "sharded metadata", with its `dtype`.

    Cached files are paths; the others are remote, their headers fetched already.
    Raises CheckpointError on all ranks if there are no safetensors files, or they cannot be read.
    """
    files, metadata = group.from_first(lambda: _find(weights))
    cached_by_rank = group.everywhere(lambda: {file: weights.cached(file) for file in files})
    cached = cached_by_rank[group.rank]
    missing = sorted({file for paths in cached_by_rank for file, path in paths.items() if not path})
    resolved = group.together(lambda: _inquire_all(weights, missing[group.rank :: group.size]))
    remote_arguments = {file: remote for per_rank in group.gather(resolved) for file, remote in per_rank.items()}
    with group.agree():
        opened = [cached[file] or weights.open(file, **remote_arguments[file]) for file in files]
        if "dtype" not in metadata:
            metadata["dtype"] = _dtype(opened[0])
    return opened, metadata


def _find(weights: Weights) -> tuple[list[str], dict[str, Any]]:
    """List the weight files, in transformers' order, and return the metadata of their index."""
    single = weights.file or with_variant("model.safetensors", weights.variant)
    index = single if single.endswith(".index.json") else None
    if weights.use_safetensors is False:
        check_files([with_variant("pytorch_model.bin", weights.variant)], folder=weights.repository)
    if index is None and _exists(weights, single):
        return [single], {}
    if index is None and weights.file is None:
        index = with_variant("model.safetensors.index.json", weights.variant)
    options = {**weights.download, "_raise_exceptions_for_missing_entries": False}
    path = index and ask_hub(weights.url(index), partial(cached_file, weights.repository, index, **options))
    if path is None:
        for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
            if _exists(weights, with_variant(name, weights.variant)):
                check_files([with_variant(name, weights.variant)], folder=weights.repository)
        names = dict.fromkeys(weights.path(name) for name in (single, index) if name)
        raise CheckpointError(
            f"{weights.repository} on the Hub",
            got=f"no {' and no '.join(names)}",
            expected="safetensors files",
            fix="Check the name, revision, subfolder and variant.",
        )
    weight_map, metadata = read_index(path)
    files = sorted(set(weight_map.values()))
    check_files(files, folder=weights.repository)
    for name in files:
        if posixpath.isabs(name) or posixpath.normpath(name).startswith(".."):
            raise CheckpointError(
                f"{weights.repository} on the Hub",
                got=f"an index that names {name}",
                expected="files of the repository",
                fix="Do not load it unless you trust where it comes from.",
            )
    return files, {**metadata, "weight_map": weight_map}


def _exists(weights: Weights, file: str) -> bool:
    if weights.cached(file):
        return True
    try:
        resolve(weights.url(file), weights.token)
    except EntryNotFoundError:
        return False
    return True


def _inquire_all(weights: Weights, files: list[str]) -> dict[str, dict[str, Any]]:
    closed = threading.Event()
    with ThreadPoolExecutor(CONNECTIONS) as executor:
        try:
            return dict(zip(files, executor.map(partial(_inquire, weights, closed=closed), files), strict=True))
        except BaseException:
            closed.set()  # stops threads that wait for their next try
            raise


def _inquire(weights: Weights, file: str, *, closed: threading.Event | None = None) -> dict[str, Any]:
    """Resolve one file on the Hub and fetch its header; return the `RemoteFile` arguments for the other ranks."""
    try:
        metadata = resolve(weights.url(file), weights.token, closed)
    except EntryNotFoundError as error:
        raise hub_error(weights.url(file), error) from error
    assert metadata.size is not None
    remote = {"size": metadata.size, "etag": metadata.etag, "location": metadata.location}
    source = weights.open(file, **remote, closed=closed)  # do not close it: other threads share `closed`
    head = source.read_bytes(0, min(metadata.size, max(8, min(metadata.size // HEAD_SHARE, HEAD_BYTES))))
    stop = 8 + int.from_bytes(head[:8], "little")
    if len(head) < stop <= min(metadata.size, 8 + HEADER_LIMIT):  # else read_header raises
        head += source.read_bytes(len(head), stop - len(head))
    return remote | {"location": source.location, "etags": source.etags, "head": head}


def _dtype(file: str | RemoteFile) -> torch.dtype:
    """Return transformers' dtype of a file: that of its first floating-point tensor by name."""
    with LocalFile(file) if isinstance(file, str) else nullcontext(file) as source:
        tensors = read_header(source)
    state_dict = {name: torch.empty(0, dtype=tensors[name].dtype, device="meta") for name in sorted(tensors)}
    dtype: torch.dtype = get_state_dict_dtype(state_dict)
    return dtype


class HubFiles(Storage):
    """Safetensors files of one commit on the Hub; those in the local cache are read from there."""

    argument: ClassVar[str] = "tp_stream"
    is_remote = True

    def __init__(self, repository: str, revision: str | None, subfolder: str) -> None:
        self.repository, self.revision, self.subfolder = repository, revision, subfolder
        self.agreed = repository, revision, subfolder
        self.commit = ""
        """The commit of all files, once `prepare` has asked for it."""
        self.remote: dict[str, RemoteFile] = {}
        """Files that are not in the cache, by name."""

    @classmethod
    def find(cls, asked: Asked) -> Storage | None:
        arguments, asked_for = asked.arguments, asked.options.get("tp_stream")
        streams = os.environ.get("TP_TRANSFORMERS_STREAM", "0") not in ("", "0") if asked_for is None else asked_for
        is_local = is_offline_mode() or any(arguments.get(name) for name in ("local_files_only", "gguf_file"))
        if not streams or is_local or asked.name is None or os.path.exists(asked.name):
            return None
        return cls(str(asked.name), arguments.get("revision"), arguments.get("subfolder") or "")

    def prepare(self, asked: Asked, group: TensorParallelGroup) -> None:
        self.commit = group.from_first(lambda: self._pinned(asked.arguments.get("token")))
        asked.arguments["revision"] = self.commit

    def _pinned(self, token: str | bool | None) -> str:
        """The commit of the revision.

        Raises CheckpointError if the repository or revision does not exist, or access is denied.
        """
        url = hf_hub_url(self.repository, "config.json", revision=self.revision, subfolder=self.subfolder or None)
        try:
            commit_hash = resolve(url, token).commit_hash
        except EntryNotFoundError as error:
            answer = error.response if isinstance(error, HfHubHTTPError) else None
            commit_hash = answer.headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT) if answer is not None else None
            if commit_hash is None:
                raise hub_error(url, error) from error
        return str(commit_hash)

    def files(self, original: Callable[..., Any], arguments: Mapping[str, Any], group: TensorParallelGroup) -> Found:
        files, metadata = open_weights(group, Weights(arguments, arguments.get("download_kwargs") or {}))
        self.remote.update((file.name, file) for file in files if isinstance(file, RemoteFile))
        return [file.name if isinstance(file, RemoteFile) else file for file in files], metadata

    def sources(self, files: Sequence[str]) -> Sequence[str | Source]:
        return [self.remote.get(file, file) for file in files]

    def fetch(
        self, reads: Sequence[Request], checkpoint: Checkpoint, group: TensorParallelGroup, progress: Progress
    ) -> None:
        fetch(reads, sources=checkpoint.sources, group=group, progress=progress)

    def origin(self, name: str, files: Sequence[str]) -> Mapping[str, Any]:
        return {"name": name or None, "commit_hash": self.commit}
