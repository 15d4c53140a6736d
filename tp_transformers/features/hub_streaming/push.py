"""Uploads to the Hub of a checkpoint that all ranks saved: from rank 0, with transformers' own `push_to_hub`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
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


_HUB = ("commit_message", "commit_description", "create_pr", "private", "revision", "token")
"""Options of transformers' `push_to_hub`; all others are of the save."""


def push(group: TensorParallelGroup, save: Callable[..., object], repo_id: str, **options: Any) -> Any:
    """Upload what `save` writes into a new folder. Collective; see `save_and_push`."""
    signature(PushToHubMixin.push_to_hub).bind(None, repo_id, **options)  # PEFT's save ignores a misspelt `private`
    with tempfile.TemporaryDirectory() as folder:
        return save_and_push(group, save, folder, repo_id=repo_id, **options)


class PushedModel(Mixin):
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
    repo_id: str | None = None,
    tags: Iterable[str] = (),
    **options: Any,
) -> Any:
    """Save, then upload from rank 0 the files that were written. Collective: call on all ranks.

    `repo_id`: by default, the name of the folder. `tags` go to the model card, `options` to `save` and to transformers'
    `push_to_hub`; rank 0 returns its result.
    """
    folder, hub = Path(save_directory), {name: options.pop(name) for name in _HUB if name in options}
    with group.agree():
        before = _times(folder) if group.writes else {}
    save(save_directory, **options)
    with group.agree():  # other ranks may get here before the writing rank has removed its hidden folder
        after = _times(folder) if group.writes else {}
    saved = _Saved(file for file, time in after.items() if before.get(file) != time)
    hub |= {"repo_id": repo_id or folder.absolute().name, "tags": sorted(set(tags)) or None}
    return group.together(lambda: saved.push_to_hub(**hub) if group.writes else None)


def _times(folder: Path) -> dict[Path, int]:
    """Map each file in the folder to its modification time (a link: its own)."""
    return {file: file.lstat().st_mtime_ns for file in folder.iterdir()} if folder.is_dir() else {}
