"""Uploads to the Hub: rank 0 pushes what one process would."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from transformers.utils import PushToHubMixin

from tests.support.comparisons import read_folder
from tests.support.models import load
from tp_transformers.features.hub_streaming import push as saving_push


def push(folder: str, scratch: str) -> list[tuple[str, Any, list[str]]]:
    """What transformers' own upload, which is replaced, was given on this rank."""
    model = load(folder)
    pushed = []

    def upload(self: Any, repo_id: str, **options: Any) -> None:
        target = Path(scratch, f"pushed{len(pushed)}")
        target.mkdir()
        self.save_pretrained(str(target), max_shard_size="1GB")
        pushed.append((repo_id, options, sorted(path.name for path in target.iterdir())))
        if repo_id == "org/broken":
            raise OSError("no such repository")
        saved, expected = read_folder(target), read_folder(folder)
        assert all(torch.equal(saved[name], value) for name, value in expected.items())

    original, PushToHubMixin.push_to_hub = PushToHubMixin.push_to_hub, upload
    times = saving_push._times
    model.model_tags = ["mine"]
    try:
        model.push_to_hub("org/pushed", max_shard_size="60KB", private=True, tags="other")
        Path(scratch, "repo").mkdir(exist_ok=True)
        Path(scratch, "repo", "notes.txt").write_text("not to be uploaded")
        dist.barrier()
        if not model.tp_group.writes:  # a folder that rank 0 is writing to changes while it is looked at
            saving_push._times = Mock(side_effect=AssertionError("looked at by another rank"))
        model.save_pretrained(f"{scratch}/repo", push_to_hub=True, max_shard_size="60KB", commit_message="why")
        with pytest.raises((OSError, RuntimeError), match="no such repository"):
            model.push_to_hub("org/broken")
    finally:
        PushToHubMixin.push_to_hub, saving_push._times = original, times
    return pushed


def test_rank_0_pushes_what_one_process_would(pool, cases, tmp_path) -> None:
    folder = cases(9, 3).folder
    first, others = pool.run(2, push, folder, str(tmp_path))
    assert others == []
    names = sorted(path.name for path in Path(folder).iterdir())
    assert first[0] == ("org/pushed", {"private": True, "tags": ["mine", "other"]}, names)
    assert first[1] == ("repo", {"commit_message": "why", "tags": ["mine"]}, names)
