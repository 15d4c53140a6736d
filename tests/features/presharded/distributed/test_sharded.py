"""Pre-sharded checkpoints on real ranks: saved at one size and loaded at others, held against what they are of."""

import copy
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaForCausalLM

import tp_transformers
from tests.support.architectures import ARCHITECTURES
from tests.support.comparisons import assert_same_files, equal_parameters, equal_shards
from tests.support.models import bytes_read, held, llama_config, load, save_as_loaded
from tests.support.on_ranks import on_ranks
from tests.support.pool import Pool, WorkerError
from tests.support.saving import MANIFEST_NAME
from tests.support.tiers import wide
from tp_transformers import save_sharded
from tp_transformers.checkpoint import verify_sharded
from tp_transformers.checkpoint.reading.local_file import LocalFile
from tp_transformers.features.presharded.save import SummedWriter


def save(folder: str, target: str, experts: bool = False) -> None:
    save_sharded(load(folder, tp_expert_parallel=experts), target)


MODELS: dict[str, Callable[[], Any]] = {
    "9/3 heads": lambda: LlamaForCausalLM(llama_config(9, 3)),
    "8/2 heads": lambda: LlamaForCausalLM(llama_config(8, 2)),
    "tied": lambda: LlamaForCausalLM(llama_config(8, 4, tie_word_embeddings=True)),
    **{
        name: lambda name=name: ARCHITECTURES[name].make(*ARCHITECTURES[name].variants[0])
        for name in ("mixtral", "gpt_oss", "phi3", "deepseek_v3")  # merged, packed, latent, with a persistent buffer
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """`checkpoint(name)`: the folder of an ordinary checkpoint, made once, as a model that was loaded saves it."""

    @cache
    def make(name: str) -> str:
        folder = tmp_path_factory.mktemp("model")
        torch.manual_seed(0)
        save_as_loaded(MODELS[name](), folder)
        return str(folder / "checkpoint")

    return make


@pytest.fixture(scope="module")
def sharded(pool: Pool, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], str]:
    """`sharded(name, size)`: the folder of the same in shards, made once; to be copied by whoever changes it."""

    @cache
    def make(name: str, size: int) -> str:
        target = str(tmp_path_factory.mktemp("sharded") / "folder")
        pool.run(size, save, checkpoint(name), target)
        return target

    return make


def load_both_ways(folder: str, sharded: str, saved: str | None, experts: bool = False) -> dict[str, Any]:
    """Run on every rank: the shards are the checkpoint; what was read of them at this size."""
    opened: list[str] = []
    original = LocalFile.__init__

    def recorded(self: LocalFile, path: Any) -> None:
        opened.append(Path(path).name)
        original(self, path)

    model = load(folder, tp_expert_parallel=experts)
    with mock.patch.object(LocalFile, "__init__", recorded):
        again, info = load(sharded, output_loading_info=True, tp_expert_parallel=experts, tp_prefetch=False)
    ours, theirs = again.state_dict(keep_vars=True), model.state_dict(keep_vars=True)
    local = tp_transformers.local_tensor
    if saved is not None:
        again.save_pretrained(saved)
    assert [*ours] == [*theirs]
    assert [name for name in ours if not torch.equal(local(ours[name]), local(theirs[name]))] == []
    assert [name for name in ours if type(ours[name]) is not type(theirs[name])] == []
    assert len({*map(id, ours.values())}) == len({*map(id, theirs.values())}), "ties"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.dtype == model.dtype
    return {
        "files": sorted(opened),
        "read": bytes_read(again) - sum(header(sharded, file) for file in opened),
        "reads": again.tp_report.reads,
        "held": held(again),
    }


def header(folder: str, name: str) -> int:
    return 8 + int.from_bytes((Path(folder) / name).read_bytes()[:8], "little")


SAVED_AT = {"8/2 heads": 4}
"""At how many ranks a model is saved, where it is not 2: with replicated KV heads."""

QUICK = ("8/2 heads", "tied", "phi3", "gpt_oss")


@pytest.mark.parametrize("size", wide([3, 2, 1, 4], 1))
@pytest.mark.parametrize("name", wide(sorted(MODELS, key=lambda name: name not in QUICK), len(QUICK)))
def test_shards_are_the_checkpoint_at_any_size(pool, checkpoint, sharded, tmp_path, name, size) -> None:
    saved_at = SAVED_AT.get(name, 2)
    folder, shards = checkpoint(name), sharded(name, saved_at)
    results = pool.run(size, load_both_ways, folder, shards, str(tmp_path / "back"))
    for rank, result in enumerate(results):
        assert result["read"] == result["held"]
        if size == saved_at:  # its own file, each byte once, in a few reads
            (file,) = result["files"]
            assert file.startswith(f"rank-{rank:05}-of-{size:05}-")
            assert (Path(shards) / file).stat().st_size == header(shards, file) + result["held"]
            assert result["reads"] <= 6
    assert_same_files(folder, str(tmp_path / "back"))


def names_in(folder: str) -> set[str]:
    files = Path(folder).glob("rank-*.safetensors")
    return {name for file in files for name in load_file(file)}


def test_tied_parameters_are_stored_once_and_buffers_where_they_persist(sharded) -> None:
    tied = names_in(sharded("tied", 2))
    assert "model.embed_tokens.weight" in tied
    assert "lm_head.weight" not in tied
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names_in(sharded("deepseek_v3", 2))
    assert not any("inv_freq" in name for name in tied)


@pytest.mark.parametrize("name", wide(["mixtral", "gpt_oss"], 1))
def test_cut_experts_become_whole_ones_and_back(pool, checkpoint, sharded, tmp_path, name) -> None:
    folder = checkpoint(name)
    for size in (2, 3):
        results = pool.run(size, load_both_ways, folder, sharded(name, 2), None, True)
        for result in results:
            assert result["read"] == result["held"]
    pool.run(3, save, folder, str(tmp_path / "whole"), True)
    pool.run(2, load_both_ways, folder, str(tmp_path / "whole"), str(tmp_path / "back"))
    assert_same_files(folder, str(tmp_path / "back"))
    results = pool.run(3, load_both_ways, folder, str(tmp_path / "whole"), None, True)
    assert all(len(result["files"]) == 1 for result in results)


def prefetched(folder: str, shards: str) -> tuple[bool, int, int]:
    model, again = load(folder), load(shards, tp_prefetch=True)
    return equal_shards(model, again), again.tp_report.prefetched, held(again)


def test_a_cold_page_cache_is_filled_by_those_who_need_a_file(pool, checkpoint, sharded) -> None:
    folder, shards = checkpoint("9/3 heads"), sharded("9/3 heads", 2)
    for same, brought_in, kept in pool.run(2, prefetched, folder, shards):
        assert same
        assert brought_in == kept, "nobody reads another's file"
    results = pool.run(3, prefetched, folder, shards)
    assert all(same for same, _, _ in results)
    stored = sum(file.stat().st_size for file in Path(shards).glob("rank-*"))
    assert 0.9 * stored < sum(brought_in for _, brought_in, _ in results) < stored, "each byte is brought in once"


def shard_again(shards: str, target: str, dtype: torch.dtype | None = None) -> None:
    model = load(shards)
    save_sharded(model if dtype is None else model.to(dtype), target)


def test_shards_of_shards(pool, checkpoint, sharded, tmp_path) -> None:
    folder = checkpoint("mixtral")
    pool.run(3, shard_again, sharded("mixtral", 2), str(tmp_path / "again"))
    pool.run(2, load_both_ways, folder, str(tmp_path / "again"), str(tmp_path / "back"))
    assert_same_files(folder, str(tmp_path / "back"))  # which conversions there were is handed on
    verify_sharded(tmp_path / "again")


def same_cast(folder: str, shards: str) -> None:
    ours = load(shards)
    assert ours.dtype == torch.bfloat16
    assert equal_parameters(ours, load(folder, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["tied", "9/3 heads"])  # DTensors, which a cast makes anew, and plain tensors
def test_a_model_that_was_cast(pool, checkpoint, sharded, tmp_path, name) -> None:
    pool.run(2, shard_again, sharded(name, 2), str(tmp_path / "cast"), torch.bfloat16)
    pool.run(3, same_cast, checkpoint(name), str(tmp_path / "cast"))


def on_mesh(folder: str, target: str, parallel: bool) -> tuple[bool, list[str]]:
    """Run on every rank of two copies: save twice, and load; then errors of two saves that fail."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = load(folder, device_mesh=mesh)
    if parallel:
        tp_transformers.data_parallel(model, mesh)
        model = copy.deepcopy(model)
    for _ in range(2):
        save_sharded(model, target)
        again = load(target, device_mesh=mesh)
        dist.barrier()  # the next save replaces files that the other copy may still read
    errors = []
    for fail in (lambda: fail_on(1, model, target), lambda: save_sharded(model, f"{target}/{MANIFEST_NAME}")):
        with pytest.raises((tp_transformers.TensorParallelError, OSError)) as caught:
            fail()
        errors.append(str(caught.value))
    return equal_shards(model, again), errors


@pytest.mark.parametrize("parallel", wide([True, False], 1))
def test_the_first_copy_saves_for_all(pool, checkpoint, tmp_path, parallel) -> None:
    folder, target = checkpoint("9/3 heads"), tmp_path / "s"
    for is_same, (of_a_writer, of_a_folder) in pool.run(4, on_mesh, folder, str(target), parallel):
        assert is_same
        assert "rank 1: OSError: no space left on device" in of_a_writer
        assert MANIFEST_NAME in of_a_folder
    assert len([*target.glob("rank-*")]) == 2, "the save before is still there"


@on_ranks(3)
def test_copies_on_some_ranks_beside_a_group_of_the_users_own(folder, tmp_path) -> None:
    """Two copies on ranks 0 and 1 of three, where rank 0 is in one more process group."""
    dist.init_process_group("gloo")
    dist.new_group([0])
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "tp"))
    if dist.get_rank() == 2:
        return
    model = load(folder, device_mesh=mesh)
    save_sharded(model, tmp_path / "s")
    with pytest.raises(tp_transformers.CheckpointError, match=MANIFEST_NAME):
        save_sharded(model, tmp_path / "s" / MANIFEST_NAME)
    assert (tmp_path / "s" / MANIFEST_NAME).is_file()


# -- what goes wrong: one error on all ranks


@pytest.fixture(scope="module")
def another(pool: Pool, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of another save of `sharded("9/3 heads", 2)`."""
    target = str(tmp_path_factory.mktemp("another"))
    pool.run(2, save, checkpoint("9/3 heads"), target)
    return target


@pytest.mark.parametrize("size", wide([2, 3, 1], 1))
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file, other: file.unlink(), "got no such file"),
        (lambda file, other: file.write_bytes(file.read_bytes()[:-8]), "bytes, expected"),
        (lambda file, other: shutil.copy(other, file), "in its metadata, expected save"),
        (lambda file, other: (file.parent / MANIFEST_NAME).write_text("{"), "cannot be read as JSON"),
    ],
    ids=["missing", "truncated", "of another save", "manifest"],
)
def test_damaged_folders(pool, sharded, another, tmp_path, damage, says, size) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(sharded("9/3 heads", 2), folder)
    damage(max(folder.glob("rank-*")), max(Path(another).glob("rank-*")))  # of rank 1
    error = pool.error(size, load, str(folder), timeout=60)
    assert error.startswith("CheckpointError: ")
    assert says in error


def save_and_fail_on(rank: int, folder: str, target: str) -> None:
    fail_on(rank, load(folder), target)


def fail_on(rank: int, model: Any, target: str) -> None:
    """Save where the writer of one rank fails."""
    original = SummedWriter.write

    def write(self: SummedWriter, name: str, value: torch.Tensor) -> None:
        if model.tp_group.rank == rank and "norm" in name:
            raise OSError("no space left on device")
        original(self, name, value)

    with mock.patch.object(SummedWriter, "write", write):
        save_sharded(model, target)


@pytest.mark.parametrize("rank", wide([1, 0], 1))
def test_a_save_that_fails_leaves_what_was_there(pool, checkpoint, sharded, tmp_path, rank) -> None:
    folder, target = checkpoint("9/3 heads"), tmp_path / "target"
    error = pool.error(2, save_and_fail_on, rank, folder, str(target), timeout=60)
    assert f"rank {rank}: OSError: no space left on device" in error
    assert [*target.glob("*")] == []
    shutil.copytree(sharded("9/3 heads", 2), target, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(WorkerError):
        pool.run(2, save_and_fail_on, rank, folder, str(target), timeout=60)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    pool.run(3, load_both_ways, folder, str(target), None)


def save_to_own(folder: str, targets: list[str]) -> None:
    save_sharded(load(folder), targets[int(os.environ["RANK"])])


def test_a_folder_that_ranks_do_not_share_is_told(pool, checkpoint, tmp_path) -> None:
    targets = [str(tmp_path / "a"), str(tmp_path / "b")]
    error = pool.error(2, save_to_own, checkpoint("9/3 heads"), targets, timeout=60)
    assert error.startswith("CheckpointError: rank 0: ")
    assert "rank-00001-of-00002" in error
    assert not [*tmp_path.glob("*/*")]


def load_own(folders: list[str]) -> None:
    load(folders[int(os.environ["RANK"])])


def test_ranks_that_load_different_saves_all_stop(pool, sharded, another) -> None:
    error = pool.error(2, load_own, [sharded("9/3 heads", 2), another], timeout=60)
    assert error.startswith("CheckpointError: the checkpoint: got another list of files on rank 1 than on rank 0")
