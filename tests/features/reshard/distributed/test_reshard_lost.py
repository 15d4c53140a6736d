"""Ranks that are gone: what only they held is read from the checkpoint, if it has the values of now."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tp_transformers
from tests.features.reshard.distributed.test_reshard import MAKERS, check_saved, differing, loaded, mesh_of
from tests.support.comparisons import read_folder
from tests.support.models import load, save_as_loaded
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.features.reshard import moves
from tp_transformers.features.reshard.reshard import REPORT
from tp_transformers.ranks.mesh import join
from tp_transformers.slices.layout import union
from tp_transformers.strategies import layout_of, local_tensor, unsharded_like
from tp_transformers.training import reshard


def lose(lost: int, place: str) -> bool:
    """Go on without a rank, in a new process group; returns False on that rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    if rank == lost:
        return False
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank - (rank > lost), world_size=size - 1)
    return True


def lost_bytes(model: Any, lost: int) -> int:
    """Bytes of the parameters that no other rank holds."""
    count = 0
    for param in {id(param): param for param in model.parameters()}.values():
        layout, full = layout_of(param), unsharded_like(param)
        if layout is not None:
            ranges = layout.split.ranges
            left = union(each for rank, of_rank in enumerate(ranges) if rank != lost for each in of_rank)
            count += (layout.split.length - sum(b - a for a, b in left)) * full.nbytes // layout.split.length
    return count


def go_on(folder: str, place: str, lost: int, to: Any, saved: str) -> Any:
    """Run on every rank: load, lose a rank, reshard."""
    model = load(folder, dtype=torch.float64)
    count = lost_bytes(model, lost)
    if not lose(lost, place):
        return None
    model = tp_transformers.reshard(model, to)
    mesh = mesh_of(to)
    if model is None:
        return count, 0, []
    model.save_pretrained(saved)
    return count, REPORT.of(model).bytes_read, differing(model, loaded(folder, to, mesh, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "lost", "to"),
    wide(
        [("llama 9/3", 1, 2), ("llama 9/3", 0, (2, 1)), ("mixtral", 2, 2), ("gpt_oss", 1, 1), ("qwen3_next", 0, 2)], 1
    ),
)
def test_only_what_a_lost_rank_had_is_read_again(pool, tmp_path, name, lost, to) -> None:
    save_as_loaded(MAKERS[name](), tmp_path)
    folder = str(tmp_path / "checkpoint")
    results = pool.run(3, go_on, folder, str(tmp_path / "meet"), lost, to, str(tmp_path / "saved"))
    left = [result for result in results if result is not None]
    print(name, lost, to, left)
    assert len(left) == 2
    stored = next(iter(read_folder(folder).values())).itemsize
    assert sum(read for _, read, _ in left) == left[0][0] * stored // 8 > 0  # float64 on the ranks
    assert all(different == [] for _, _, different in left)
    check_saved(folder, tmp_path / "saved")


def refused(folder: str, place: str, case: str) -> str | None:
    """Run on every rank: the error, after which the model is as before."""
    model = load(folder, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if case == "data":
        for param in model.parameters():
            local_tensor(param).data.mul_(2)
    elif case == "weights":
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    else:
        model(torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if not lose(1, place):
        return None
    before = [local_tensor(param).clone() for param in model.parameters()]
    with pytest.raises(tp_transformers.CheckpointError) as raised:
        reshard(model, optimizer, 2) if case == "states" else tp_transformers.reshard(model, 2)
    pairs = zip(model.parameters(), before, strict=True)
    assert all(torch.equal(local_tensor(param), value) for param, value in pairs)
    return str(raised.value)


@pytest.mark.parametrize("case", wide(["weights", "states", "data"], 0))
def test_trained_values_of_a_lost_rank_are_one_error(pool, cases, tmp_path, case) -> None:
    first, _, second = pool.run(3, refused, cases(9, 3).folder, str(tmp_path / "meet"), case)
    assert first == second
    assert ("only a lost rank had" if case != "data" else "other values") in first
    assert "checkpoint=" in first


@pytest.mark.slow
@on_ranks(3)
def test_a_save_of_now_replaces_a_lost_rank(folder, tmp_path) -> None:
    saved = str(tmp_path / "saved")
    model = load(folder, dtype=torch.float64)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    model.save_pretrained(saved)
    if lose(0, f"{tmp_path}/meet"):
        model = tp_transformers.reshard(model, 2, checkpoint=saved)
        fresh = loaded(saved, 2, mesh_of(2), dtype=torch.float64)
        assert differing(model, fresh) == ["plan"]  # its config names the first load


@on_ranks(3)
def test_a_rank_that_joins_gets_what_another_reads_in_the_dtype_of_the_model(folder, tmp_path) -> None:
    """One of two ranks is lost, and a third takes its place."""
    join()
    mesh = mesh_of(2)
    model = load(folder, dtype=torch.float64, device_mesh=mesh) if dist.get_rank() < 2 else None
    if lose(1, f"{tmp_path}/meet"):
        model = tp_transformers.reshard(model, 2)
        assert differing(model, loaded(folder, 2, mesh_of(2), dtype=torch.float64)) == []


def interrupted(folder: str) -> str:
    """Run on every rank: the error of a reshard of which rank 0 fails on the way."""
    join()
    model, blocks, block = load(folder), [], moves._block

    def fails(*args: Any) -> Any:
        blocks.append(args)
        if dist.get_rank() == 0 and len(blocks) == 7:
            raise MemoryError("full")
        return block(*args)

    with mock.patch.object(moves, "_block", fails), pytest.raises(tp_transformers.TensorParallelError) as raised:
        tp_transformers.reshard(model, 1)
    return str(raised.value)


def test_a_rank_that_fails_on_the_way_leaves_no_rank_waiting(pool, cases) -> None:
    first, second = pool.run(2, interrupted, cases(9, 3).folder)
    assert first == second
    assert "full" in first


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("too many", "1 to 2 ranks"),
        ("none", "1 to 2"),
        ("gradients", "zero_grad"),
        ("nothing", "no model"),
        ("added", "added after the load"),
        ("others", r"\(0, 1\) on rank 0 and \(0,\) on rank 1"),
    ],
)
@on_ranks()
def test_a_refusal_changes_nothing(folder, case, said) -> None:
    join()
    model = load(folder, dtype=torch.float64)
    if case == "gradients":
        model(torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    if case == "nothing":
        model = None
    if case == "added":
        model.value_head = torch.nn.Linear(72, 1)
    to: Any = {"too many": 3, "none": 0, "others": 2 - dist.get_rank()}.get(case, 1)
    with pytest.raises(tp_transformers.TensorParallelError, match=said):
        tp_transformers.reshard(model, to)
    if model is not None:
        assert torch.isfinite(model(torch.ones(1, 4, dtype=torch.long)).logits).all()
