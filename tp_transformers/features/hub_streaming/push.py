"""Uploads to the Hub of a checkpoint that all ranks saved: from rank 0, with transformers' own `push_to_hub`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import PushToHubMixin

from ...seams import Mixin, collective

if TYPE_CHECKING:
    from ...ranks.group import TensorParallelGroup


class _Saved(PushToHubMixin):
    """A model for `push_to_hub` that has written its files already."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = list(files)

    def save_pretrained(self, folder: str, **options: Any) -> None:
        """Put links to the files into `folder`."""
        for file in self.files:
            os.symlink(file.absolute(), Path(folder, file.name))


def push(
    group: TensorParallelGroup, save: Callable[[str], object], repo_id: str, *, tags: Iterable[str] = (), **options: Any
) -> Any:
    """Upload from rank 0 the files that `save` writes into a folder. Collective: call on all ranks.

    `tags` go to the model card, other `options` to transformers' `push_to_hub`; rank 0 returns its result.
    """
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        return _upload(group, Path(folder).iterdir(), repo_id, tags=tags, **options)


class PushedModel(Mixin):
    """Methods of a loaded model."""

    @collective
    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write a checkpoint; with `push_to_hub`, upload it to `repo_id` or the folder's name. Collective."""
        if push_to_hub:
            tags = self.model_tags or ()
            save_and_push(self.tp_group, self.save_pretrained, save_directory, tags=tags, **kwargs)
        else:
            super().save_pretrained(save_directory, *args, **kwargs)

    @collective
    def push_to_hub(
        self, repo_id: str, *, max_shard_size: int | str = "50GB", tags: Iterable[str] = (), **options: Any
    ) -> Any:
        """Upload a normal checkpoint from rank 0. Collective; see `push`."""
        save = partial(self.save_pretrained, max_shard_size=max_shard_size)
        tags = [*(self.model_tags or ()), *([tags] if isinstance(tags, str) else tags or ())]
        return push(self.tp_group, save, repo_id, tags=tags, **options)


def save_and_push(
    group: TensorParallelGroup,
    save: Callable[..., object],
    save_directory: str | os.PathLike[str],
    *,
    tags: Iterable[str] = (),
    **options: Any,
) -> None:
    """Implement `save_pretrained(..., push_to_hub=True)`: save, then upload to `repo_id` or the folder's name."""
    folder = Path(save_directory)
    hub = {
        name: options.pop(name)
        for name in ("commit_message", "commit_description", "create_pr", "private", "revision", "token")
        if name in options
    }
    repo_id = options.pop("repo_id", None) or folder.absolute().name
    with group.agree():
        before = _times(folder) if group.writes else {}
    save(folder, **options)
    with group.agree():  # other ranks may get here before the writing rank has removed its hidden folder
        after = _times(folder) if group.writes else {}
    written = [file for file, time in after.items() if before.get(file) != time]
    _upload(group, written, repo_id, tags=tags, **hub)


def _upload(
    group: TensorParallelGroup, files: Iterable[Path], repo_id: str, *, tags: Iterable[str], **options: Any
) -> Any:
    card = {"tags": sorted(set(tags)) or None}
    return group.together(lambda: _Saved(files).push_to_hub(repo_id, **card, **options) if group.writes else None)


def _times(folder: Path) -> dict[Path, int]:
    """Map each file in the folder to its modification time (a link: its own)."""
    return {file: file.lstat().st_mtime_ns for file in folder.iterdir()} if folder.is_dir() else {}
