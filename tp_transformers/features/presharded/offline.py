"""Writer of the files of `save_sharded` on N ranks, in one process without those ranks.

transformers prepares config, dtype, names and conversions as for a load. Then every parameter is sharded as on each
rank, and each shard is written to the file of its rank. One shard is in memory at a time; for a checkpoint on the Hub,
one full parameter, so that every byte is fetched once.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from ...anatomy import tied_parameters
from ...checkpoint.reading.header import Checkpoint
from ...checkpoint.reading.report import LoadReport
from ...checkpoint.saving.folder import SaveFolder
from ...checkpoint.saving.save import dense_state
from ...checkpoint.saving.writer import named
from ...errors import CheckpointError, TensorParallelError, list_faults
from ...loading.from_pretrained import from_pretrained_with
from ...loading.hook import enable
from ...loading.load import loading_info, place, restore_full, same_bytes, tie
from ...loading.request import LoadRequest, Targets, describe, open_together, read_together, split_reads
from ...model.parallelize import parallelize
from ...plans.bind import Resolution
from ...plans.rules import Plan
from ...ranks.group import TensorParallelGroup
from ...slices.composed import reshaped
from ...slices.layout import Layout
from ...slices.lazy import LazyTensor, Resident
from ...strategies import layout_of, take, unsharded_like
from ...transformers_api import LoadStateDictInfo
from ..command_line.models import model_class, read_config
from ..packed.holding import pack_weights
from ..packed.stored_shards import StoredShards, place_stored, stored_layouts
from ..packed.weight import packed_weights
from .manifest import Manifest, RankFile
from .save import check_no_ordinary_weights, check_save, complete_save, open_writer, rank_path


def pack(
    model: PreTrainedModel, targets: Targets, group: TensorParallelGroup, request: LoadRequest
) -> dict[str, torch.Tensor]:
    """Prepare parameters that stay packed, without values; returns their stored tensors on rank 0.

    Empty if the request is to dequantise.
    """
    device = torch.device("meta")
    ranks = [pack_weights(model, targets, targets.shards(rank), device, request) for rank in range(group.size)]
    first = ranks[0]
    if not first.weights:
        return {}
    first.kept.check_written()
    first.hold(model)
    state = place_stored(stored_layouts([StoredShards(rank.weights.values()).specs() for rank in ranks]), group)
    return state | first.kept.beside_of(state)


_COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json"),
    *("processor_config.json", "preprocessor_config.json"),
)
"""Files of the tokenizer and the processor."""

_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
"""Arguments of `from_pretrained` that locate files."""

_COMPARED = 16 << 20
"""Bytes of tied parameters that are compared at a time."""


@dataclass(frozen=True)
class AbsentRanks(TensorParallelGroup):
    """Group without its other ranks, which would all send the same message as this rank."""

    def gather(self, value: Any) -> list[Any]:
        """Return `value` once per rank."""
        return [value] * self.size


def shard_checkpoint(
    name: str,
    folder: str | os.PathLike[str],
    *,
    size: int,
    plan: Plan | str = "auto",
    show_progress: bool = False,
    log: Callable[[str], None] = lambda line: None,
    **arguments: Any,
) -> Manifest:
    """Write the files of `save_sharded(folder)` on `size` ranks with the model `name`, and the tokenizer's files.

    Args:
        name: a folder, or a name on the Hub.
        folder: the destination; an earlier save in it stays valid until this save is complete.
        size: the number of ranks.
        plan: `tp_plan` of `from_pretrained`.
        show_progress: True for a progress bar on stderr.
        log: called with a line before the files are written.
        **arguments: other arguments of `from_pretrained`: dtype, revision, subfolder, token, tp_stream, ...

    Raises:
        UsageError: if there is no model `name`.
        PlanError: if the plan does not fit.
        CheckpointError: if files are missing or damaged, or a load would initialise weights.
    """
    folder = Path(folder)
    work = _Work(folder, size, show_progress)
    where = {key: arguments[key] for key in _WHERE if key in arguments}
    kind = model_class(read_config(name, **where), **where)
    with SaveFolder(folder) as place:
        check_no_ordinary_weights(folder)
        log(f"sharding {name} for {size} rank{'s' * (size > 1)}, one parameter after the other")
        try:
            # 1. Every rank's file.
            with enable():
                model = from_pretrained_with(work, kind, name, tp_plan=plan, **arguments)
            # 2. Everything else; the manifest last.
            state = dense_state(model) | work.packed
            manifest = check_save(model, folder, work.save, work.files, state, ranks=range(len(work.files)))
            _copy_companions(name, place.staging, where, model.tp_source.get("commit_hash"))
        except BaseException as error:
            for path in work.paths:
                with suppress(OSError):
                    path.unlink()
            if isinstance(error, OSError) and not isinstance(error, TensorParallelError):
                raise CheckpointError(str(error)) from error
            raise
        complete_save(model, manifest, place)
    return manifest


class _Work:
    """Replacement of a load; afterwards `files` are complete, and the model is as rank 0 would have loaded it."""

    def __init__(self, folder: Path, size: int, show_progress: bool) -> None:
        self.size, self.show_progress = size, show_progress
        self.save = secrets.token_hex(4)
        self.paths = [rank_path(folder, self.save, rank, size) for rank in range(size)]
        self.files: list[RankFile] = []
        self.packed: dict[str, torch.Tensor] = {}
        """Stored tensors of packed weights on rank 0."""
        self.single = TensorParallelGroup(None, 0, 1, torch.device("cpu"))

    def __call__(
        self, model: PreTrainedModel, plan: Plan, request: LoadRequest
    ) -> tuple[Resolution, LoadReport, LoadStateDictInfo]:
        """Shard and write all parameters; the model stays on the meta device."""
        began = perf_counter()
        absent = AbsentRanks(None, 0, self.size, self.single.device)
        shares = request.options.get("tp_shares", plan.shares)
        resolution = parallelize(model, replace(plan, shares=shares and tuple(shares)), absent)
        with open_together(request, self.single) as checkpoint:
            request = request.recognise(checkpoint, model)
            # 1. Every parameter: its lazy tensor, layout and dtype.
            targets = describe(model, checkpoint, resolution.layouts, request)
            value_of = partial(_Value, request=request, checkpoint=checkpoint, group=self.single)
            values = {
                name: value_of(expression, resolution.layouts.get(name), targets.dtypes[name])
                for name, expression in targets.conversion.expressions.items()
            }
            _drop_tied(model, values)
            _check_missing(model, values, targets.full)
            self.packed = pack(model, targets, absent, request)
            values = {name: value for name, value in values.items() if name not in packed_weights(model)}
            kept = {name: value for name, value in values.items() if name not in (model._keys_to_ignore_on_save or ())}
            for name, tensor in self.packed.items():  # a checkpoint may store it in another shape than is sharded
                stored = reshaped(checkpoint.tensors[name], unsharded_like(tensor).shape)
                kept[name] = value_of(stored, layout_of(tensor), stored.dtype)
            # 2. The headers of all files, then tensor by tensor, each to all files.
            with ExitStack() as stack:
                writers = [
                    stack.enter_context(closing(open_writer(path, _shards(kept, rank), save=self.save, rank=rank)))
                    for rank, path in enumerate(self.paths)
                ]
                total, is_hidden = sum(writer.size for writer in writers), not self.show_progress
                bar = transformers_logging.tqdm(
                    total=total, unit="B", unit_scale=True, desc="Sharding", disable=is_hidden
                )
                with bar:
                    for name in list(writers[0].pending):
                        for writer, shard in zip(writers, kept[name].shards(self.size), strict=True):
                            writer.write(name, shard)
                            bar.update(shard.nbytes)
                checkpoint.check_unchanged()
                for writer in writers:
                    writer.finish()
        self.files += [RankFile(writer.path.name, writer.size, f"{writer.crc32:08x}") for writer in writers]
        for name, tensor in _shards(values, 0).items():
            place(model, name, tensor)
        missing = targets.full.keys() - values.keys() - packed_weights(model).keys()  # tied: transformers ties them
        for name in missing:
            restore_full(model, name, targets.full[name])
        shares = tuple(file.size for file in self.files)
        seconds = perf_counter() - began
        report = LoadReport(0, shares, seconds, seconds, checkpoint.bytes_read, checkpoint.reads)
        return resolution, report, loading_info(targets, missing)


@dataclass(frozen=True)
class _Value:
    """A parameter or buffer that is not read yet, and its layout."""

    tensor: LazyTensor
    layout: Layout | None
    dtype: torch.dtype
    """Dtype on the ranks."""
    request: LoadRequest
    checkpoint: Checkpoint
    group: TensorParallelGroup

    def shards(self, size: int) -> Iterator[torch.Tensor]:
        """Yield the shard of each of `size` ranks, read one at a time."""
        is_read_once = self.layout is None or self.request.storage.is_remote
        source: LazyTensor = Resident(self.read(self.tensor)) if is_read_once else self.tensor
        for rank in range(size):
            yield self.read(take(source, self.layout, rank))

    def read(self, tensor: LazyTensor) -> torch.Tensor:
        """Read `tensor`, this tensor or a slice of it."""
        value = torch.empty(tensor.shape, dtype=self.dtype)
        read_together(*split_reads({"": tensor}, {"": value}), self.checkpoint, self.group, self.request)
        return value

    def is_same(self, other: _Value) -> bool:
        """True if the values equal those of `other`; compares a block of rows at a time."""
        if (self.tensor.shape, self.dtype) != (other.tensor.shape, other.dtype):
            return False
        rows = max(len(self.tensor) * _COMPARED // max(self.tensor.nbytes, 1), 1)
        row_ranges = [[(start, min(start + rows, len(self.tensor)))] for start in range(0, len(self.tensor), rows)]
        return all(
            same_bytes(self.read(self.tensor.select(0, row_range)), other.read(other.tensor.select(0, row_range)))
            for row_range in row_ranges
        )


def _shards(values: Mapping[str, _Value], rank: int) -> dict[str, torch.Tensor]:
    """Shards of `rank`, on the meta device."""
    shapes = {name: take(value.tensor, value.layout, rank).shape for name, value in values.items()}
    return {name: torch.empty(shapes[name], dtype=value.dtype, device="meta") for name, value in values.items()}


def _drop_tied(model: PreTrainedModel, values: dict[str, _Value]) -> None:
    """Keep one of each group of tied parameters, by the name that a save uses."""
    for name in tie(model, values, lambda target, source: values[target].is_same(values[source]), say=True):
        del values[name]
    for target, source in tied_parameters(model).items():
        if target in values and source not in values:
            values[source] = values.pop(target)


def _check_missing(model: PreTrainedModel, values: Mapping[str, _Value], full: Mapping[str, torch.Tensor]) -> None:
    missing = full.keys() - values.keys() - tied_parameters(model).keys()
    if missing:
        raise CheckpointError(
            list_faults("these are not in the checkpoint, and a load would initialise them", missing)
            + "\nLoad it in one process and save it with save_pretrained first, so that all ranks get the same values."
        )


def _copy_companions(name: str, folder: Path, where: dict[str, Any], commit: str | None) -> None:
    """Copy the files of the tokenizer and the processor, if any."""
    where = where if commit is None else {**where, "revision": commit}
    for file in _COMPANIONS:
        path = cached_file(
            name, file, **where, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=False
        )
        if path is not None and not (folder / file).exists():
            with named(folder / file):
                shutil.copyfile(path, folder / file)
