"""Pre-sharded checkpoints: every rank's shards in a file of its own.

Values that several ranks hold (norms, replicated KV heads) are in the file of each, so a rank reads its own file from
end to end: as many bytes on disk as in memory. Storing them once would save little (the replicated tensors are small)
and make every rank read scattered ranges of other files.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...checkpoint.conversion.convert import identity
from ...checkpoint.saving.folder import SaveFolder, on_all_copies
from ...checkpoint.saving.save import config_last, names_in, saved_state, values_of, write_configs
from ...checkpoint.saving.writer import STAGING, Writer, make_folder, named
from ...errors import CheckpointError, UnsupportedError
from ...logs import get_logger
from ...marks import untyped
from ...ranks.environment import firsts_of, host_of, node_name
from ...ranks.group import TensorParallelGroup
from ...seams import together
from ...strategies import layout_of, local_tensor, unsharded_like
from .checkpoint import ShardedCheckpoint
from .manifest import MANIFEST_NAME, RANK_FILE, Manifest, ManifestTensor, RankFile, ordinary_weights


class SummedWriter(Writer):
    """A safetensors file that is written sequentially, with a running CRC-32."""

    crc32 = 0
    """CRC-32 of all bytes written so far, including the header."""
    _end = 0

    def write_all(self, values: Callable[[str], Tensor]) -> None:
        """Write the `values` of all tensors in file order, and finish the file (synced to disk)."""
        for name in list(self.pending):
            self.write(name, values(name))
        self.finish()

    def _put(self, position: int, data: bytes | memoryview) -> None:
        if position != self._end:
            raise RuntimeError(f"{self.path}: written at byte {position} after byte {self._end}")
        super()._put(position, data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self._end = self._file.tell()


logger = get_logger(__name__)


def save_sharded(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Write each rank's shards to a file of its own, for `from_pretrained(folder, tp_plan=...)`.

    Collective: call on all ranks. File names are unique to this save. Rank 0 moves the manifest that names them into
    place last: until then an earlier save in the folder is unchanged, and a save that fails leaves no readable
    checkpoint. On a mesh with other axes, call it on all replicas: the first replica writes, the others wait and raise
    its error.

    Machines that do not share the folder each get one, with the files of their own ranks and a manifest: the same ranks
    can load from these. A warning lists them.

    Raises:
        UnsupportedError: the model was loaded without `tp_plan`.
        CheckpointError: the folder holds ordinary weights, or ranks of one machine see other folders.
    """
    group: TensorParallelGroup | None = getattr(model, "tp_group", None)
    if group is None:
        raise UnsupportedError(
            "save_sharded",
            got=f"a {type(model).__name__} that was loaded without tp_plan",
            expected="a tensor-parallel model",
            fix='Load it with tp_plan="auto", also on one rank; or call model.save_pretrained(folder).',
        )
    if any(getattr(getattr(param, "tp_shard", None), "resharded_over", None) for param in model.parameters()):
        raise UnsupportedError(
            "save_sharded does not write shards that FSDP has sharded again. Call model.save_pretrained(folder) on all "
            "ranks."
        )
    save, manifest = partial(_save_or_undo, model, Path(folder), group), Path(folder, MANIFEST_NAME)
    with together(group):
        on_all_copies(group, manifest, save, writes=group.is_first_replica)


def _save_or_undo(model: PreTrainedModel, folder: Path, group: TensorParallelGroup) -> None:
    """Save from the first replica; if that fails, remove the folder, should it be new and empty."""
    if not group.is_first_replica:
        return
    is_new = not folder.exists()
    try:
        _save(model, folder, group)
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


def _save(model: PreTrainedModel, folder: Path, group: TensorParallelGroup) -> None:
    """Write the files of one replica, then the manifest."""
    dense, packed = saved_state(model)
    per_rank = group.gather((secrets.token_hex(4), model._tp_sample(), node_name()))
    model._tp_compare([values for _, values, _ in per_rank])
    state, save = dense | packed, per_rank[0][0]
    owners = _owners(folder, save, [machine for *_, machine in per_rank], group)
    path = rank_path(folder, save, group.rank, group.size)

    def write() -> RankFile:
        make_folder(folder)  # if this rank sees another file system than the others of its machine
        local = {name: local_tensor(tensor) for name, tensor in state.items()}
        with closing(open_writer(path, local, save=save, rank=group.rank)) as writer:
            writer.write_all(lambda name: values_of(state[name]))
        return RankFile(path.name, writer.size, f"{writer.crc32:08x}")

    with ExitStack() as stack:
        # 1. The owner locks the folder: rank 0, or a rank of each machine.
        with group.agree():
            is_owner = owners[group.rank] == group.rank
            place = stack.enter_context(SaveFolder(folder)) if is_owner else None
            check_no_ordinary_weights(folder)
        try:
            # 2. Every rank writes its file.
            files = group.gather(group.together(write))
            # 3. The owner checks all files in the folder as a load would.
            own = [rank for rank, owner in enumerate(owners) if owner == group.rank]
            manifest = group.together(
                lambda: check_save(model, folder, save, files, state, ranks=own) if place is not None else None
            )
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        # 4. From here on the folder is this save.
        with group.agree():
            if place is not None and manifest is not None:
                complete_save(model, manifest, place)


def _owners(folder: Path, save: str, machines: Sequence[str], group: TensorParallelGroup) -> list[int]:
    """The rank that writes the manifest in each rank's folder: rank 0, if all machines share it. Collective.

    The first rank of every machine makes a folder in it, and all look for these; machines that share the folder see the
    same. Warns of those that do not. The next save removes what a killed one leaves.
    """
    firsts = firsts_of(machines)
    if len(firsts) == 1:
        return [0] * group.size
    marks = {rank: folder / f"{STAGING}{save}-{rank}" for rank in firsts}
    own = marks.get(group.rank)
    try:
        with group.agree():
            if own is not None:
                make_folder(folder)
                with named(folder, "folder"):
                    own.mkdir()
        owners = group.everywhere(lambda: next((rank for rank in firsts if marks[rank].exists()), group.rank))
    finally:
        if own is not None:
            with suppress(OSError):
                own.rmdir()
    if len(set(owners)) > 1 and group.rank == 0:
        held: dict[int, list[int]] = {}
        for rank, owner in enumerate(owners):
            held.setdefault(owner, []).append(rank)
        places = ", ".join(f"those of ranks {ranks} on {host_of(machines[owner])}" for owner, ranks in held.items())
        logger.warning(
            "machines do not share the folder %s: the files are %s. The same ranks can load them there; for any other "
            "load, copy all of them into one folder",
            folder,
            places,
        )
    return owners


def rank_path(folder: Path, save: str, rank: int, size: int) -> Path:
    return folder / f"rank-{rank:05}-of-{size:05}-{save}.safetensors"


def open_writer(path: Path, local: Mapping[str, torch.Tensor], *, save: str, rank: int) -> SummedWriter:
    """Open a file for `local`, the tensors of `rank`. Only their dtypes and shapes are used."""
    return SummedWriter(path, local, metadata={"save": save, "rank": str(rank)})


def check_save(
    model: PreTrainedModel,
    folder: Path,
    save: str,
    files: Sequence[RankFile],
    state: Mapping[str, torch.Tensor],
    *,
    ranks: Sequence[int],
) -> Manifest:
    """Build the manifest of files that are all written, and check those of `ranks` as a load would.

    Raises CheckpointError.
    """
    full = {name: (unsharded_like(tensor), layout_of(tensor)) for name, tensor in state.items()}
    manifest = Manifest(
        folder,
        save,
        tuple(files),
        {name: ManifestTensor(meta.dtype, tuple(meta.shape), layout) for name, (meta, layout) in full.items()},
        tuple(identity(entry) for entry in getattr(model, "_weight_conversions", None) or ()),
        str(model.dtype).removeprefix("torch."),
        untyped(model).tp_source,
        model.tp_plan or {},
        untyped(model).tp_resolution.plan.shares,
    )
    with closing(ShardedCheckpoint(manifest, rank=0)) as written:
        for rank in ranks:
            written.shards(rank)
    return manifest


def complete_save(model: PreTrainedModel, manifest: Manifest, place: SaveFolder) -> None:
    """Move configs and manifest into place, and remove the rank files of earlier saves.

    If the folder is locked, files of interrupted saves are removed too. Raises CheckpointError; if the manifest is not
    in place by then, the files that it names are removed.
    """
    before, keep = names_in(manifest.folder / MANIFEST_NAME), [file.name for file in manifest.files]
    try:
        write_configs(model, place.staging)
        with named(place.path, "folder"):
            configs = config_last(path.name for path in place.staging.iterdir())
        manifest.write(place.staging)
        place.put([*configs, MANIFEST_NAME])
    except BaseException:
        if not place.is_complete:
            place.remove(keep)
        raise
    with suppress(OSError):  # the next save removes them
        rank_files = [path.name for path in manifest.folder.iterdir() if RANK_FILE.match(path.name)]
        place.remove(name for name in rank_files if name not in keep and (place.is_locked or name in before))


def check_no_ordinary_weights(folder: Path) -> None:
    """Raise CheckpointError if the folder holds ordinary weights, which a load could take instead."""
    with named(folder, "folder"):
        weights = ordinary_weights(folder)
    if weights:
        raise CheckpointError(
            f"save_sharded to {folder}",
            got=f"a folder that holds {weights[0]}",
            expected="a folder without other weights",
            fix="Choose another folder; one inside this one will do.",
        )
