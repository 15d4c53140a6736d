"""Weights on the Hub, read from there without a download."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ...checkpoint.reading.header import Checkpoint
from ...checkpoint.reading.jobs import Request
from ...loading.storage import Asked, Storage
from ...ranks.group import TensorParallelGroup
from ...slices.stored import Source
from .fetch import fetch
from .hub import Weights, is_on_hub, open_weights, pin
from .remote_file import RemoteFile


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
        arguments = asked.arguments
        is_local = bool(arguments.get("local_files_only")) or arguments.get("gguf_file") is not None
        asked_for = asked.options.get("tp_stream")
        streams = os.environ.get("TP_TRANSFORMERS_STREAM", "0") not in ("", "0") if asked_for is None else asked_for
        if not streams or not is_on_hub(asked.name, local_files_only=is_local):
            return None
        return cls(str(asked.name), arguments.get("revision"), arguments.get("subfolder") or "")

    def prepare(self, asked: Asked, group: TensorParallelGroup) -> None:
        token = asked.arguments.get("token")
        self.commit = pin(group, self.repository, self.revision, token=token, subfolder=self.subfolder)
        asked.arguments["revision"] = self.commit

    def files(
        self, original: Callable[..., Any], arguments: Mapping[str, Any], group: TensorParallelGroup
    ) -> tuple[Sequence[str] | None, Mapping[str, Any] | None]:
        files, metadata = open_weights(group, Weights(arguments, arguments.get("download_kwargs") or {}))
        self.remote.update((file.name, file) for file in files if isinstance(file, RemoteFile))
        return [file.name if isinstance(file, RemoteFile) else file for file in files], metadata

    def sources(self, files: Sequence[str]) -> Sequence[str | Source]:
        return [self.remote.get(file, file) for file in files]

    def fetch(
        self,
        reads: Sequence[Request],
        checkpoint: Checkpoint,
        group: TensorParallelGroup,
        progress: Callable[[int], object],
    ) -> None:
        fetch(reads, sources=checkpoint.sources, group=group, progress=progress)

    def origin(self, name: str, files: Sequence[str]) -> Mapping[str, Any]:
        return {"name": name or None, "commit_hash": self.commit}
