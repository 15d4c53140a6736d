"""The streaming load: model + plan + checkpoint -> parameters, each of this rank's shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import fields, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from ..anatomy import owner_of, tied_parameters, untie
from ..checkpoint.reading.report import LoadReport
from ..logs import get_logger
from ..marks import untyped
from ..plans.bind import Resolution
from ..ranks import direct
from ..ranks.group import TensorParallelGroup
from ..seams import features
from ..slices.lazy import Resident
from ..strategies import take
from ..strategies.shards.shard import SHARD
from ..transformers_api import LoadStateDictInfo
from .memory import Memory
from .request import LoadRequest, Targets, describe, open_together

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = get_logger(__name__)


def load(
    model: PreTrainedModel, resolution: Resolution, group: TensorParallelGroup, request: LoadRequest
) -> tuple[LoadReport, LoadStateDictInfo]:
    """Fill the parameters of a parallelized meta-device `model`, reading only this rank's shards.

    Returns the report of this rank, and what transformers' own load returns. Steps that can fail on one rank end with a
    vote, so that all ranks stop with the same error.

    Raises:
        CheckpointError: files are missing, malformed, truncated or of the wrong shape.
    """
    began = perf_counter()
    # 1. Open the files and read their headers.
    with open_together(request, group) as checkpoint:
        with group.agree():
            request = request.recognise(checkpoint, model)
            if resolution.keeps_order:  # nothing is mapped, since bits depend on the alignment of weights
                request = replace(request, options={**request.options, "tp_map": False})
            # 2. Describe each parameter in terms of checkpoint tensors; a rank keeps its slice.
            targets = describe(model, checkpoint, resolution.layouts, request)
            # 3. Allocate the slices; this fixes the destination of every byte.
            memory = Memory(model, targets, group, request)
            if resolution.keeps_order:
                memory.holding.check_in_order()
        # 4. Read; all ranks share bytes from the Hub. Features see to the files: all ranks have the same, cached.
        counts: dict[str, int] = {}
        total, title, is_quiet = memory.nbytes_in_files, f"Loading shard 1 of {group.size}", group.rank > 0
        bar = transformers_logging.tqdm(total=total, unit="B", unit_scale=True, desc=title, disable=is_quiet)
        with bar, ExitStack() as stack:
            for feature in features().values():
                around = feature.around_reads(checkpoint, memory.local_reads, group, request.options)
                counts |= stack.enter_context(around)
            group.check_same({"the checkpoint": [sorted(memory.values), sorted(memory.holding.weights)]})
            if group.rank == 0:
                request.encoding.log(memory.nbytes_in_files, memory.nbytes, is_kept=bool(memory.holding.weights))
            memory.fill(checkpoint, bar.update)
    # 5. Put the values into the model; a missing parameter gets its full shape back until it is initialised.
    missing = install(model, targets, memory, group)
    report = LoadReport(
        rank=group.rank,
        shares=tuple(group.gather(memory.nbytes)),
        seconds=perf_counter() - began,
        reading_seconds=memory.statistics.seconds,
        bytes_read=checkpoint.bytes_read,
        reads=checkpoint.reads,
        methods={**memory.statistics.methods},
        threads=group.threads,
        peak_buffer=memory.statistics.peak_buffer,
        mapped=memory.nbytes_mapped,
        **counts,
        fallbacks=tuple(targets.conversion.fallbacks),
        tp_shares=resolution.plan.shares,
        shares_because=request.shares_because,
        products=dict(Counter(weight.product for weight in memory.holding.weights.values())),
    )
    if group.rank == 0:
        logger.info("%s", report)
    return report, loading_info(targets, missing)


def loading_info(targets: Targets, missing: Collection[str]) -> LoadStateDictInfo:
    """What transformers' own load returns, of a load with `targets`; `missing`: names without values."""
    info: dict[str, Any] = {field.name: set() for field in fields(LoadStateDictInfo)}
    info |= {"unexpected_keys": targets.conversion.unexpected, "mismatched_keys": targets.mismatched}
    info |= {"missing_keys": {*missing} - {name for name, _, _ in targets.mismatched}}
    return LoadStateDictInfo(**info | {"error_msgs": [], "conversion_errors": {}})


def install(model: PreTrainedModel, targets: Targets, memory: Memory, group: TensorParallelGroup) -> set[str]:
    """Put the values into the model; of two tied parameters with the same values, one.

    Returns the names that the checkpoint lacks; they have their full shapes again, for transformers to initialise.
    """
    values = memory.values

    def is_same(target: str, source: str) -> bool:
        """Compare on all ranks: tensors that differ in one process may be equal on some shards."""
        return all(group.everywhere(lambda: same_bytes(values[target], values[source])))

    for name in tie(model, values, is_same, say=group.rank == 0):
        del values[name]
    for name, value in values.items():
        place(model, name, value)
    memory.holding.hold(model)
    missing = set(targets.full) - set(values) - set(memory.holding.weights)
    for name in missing:
        restore_full(model, name, targets.full[name])
    return missing


def tie(model: PreTrainedModel, names: Collection[str], is_same: Callable[[str, str], bool], *, say: bool) -> set[str]:
    """If a checkpoint holds both of two tied parameters, keep one if they are equal, else untie them.

    Returns those of `names` that are not kept. `say`: whether this rank logs the parameters that it unties.
    """
    dropped = set()
    for target, source in list(tied_parameters(model).items()):
        if target not in names or source not in names:
            continue
        if is_same(target, source):
            dropped.add(target)
            continue
        untie(model, target)
        if say:
            logger.warning(
                "the config ties %s to %s, but the checkpoint holds different values for them, so they stay untied; "
                "set tie_word_embeddings=False in the config to say so",
                target,
                source,
            )
    return dropped


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors hold the same bytes; float8 cannot be compared by value."""
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def place(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Set one parameter or buffer, marked so that transformers does not initialise it.

    A floating-point parameter is trainable even if its class freezes it (Whisper's encoder positions), as transformers
    loads it.
    """
    owner, attribute = owner_of(model, name)
    if attribute in owner._buffers:
        untyped(value)._is_hf_initialized = True
        owner._buffers[attribute] = value
        return
    meta = owner._parameters[attribute]
    assert meta is not None
    param = SHARD.of(meta).wrap(value, requires_grad=value.is_floating_point())
    untyped(param)._is_hf_initialized = True
    owner._parameters[attribute] = param


def restore_full(model: nn.Module, name: str, full: torch.Tensor) -> None:
    """Put back the meta parameter of full shape, for transformers to tie or to initialise."""
    owner, attribute = owner_of(model, name)
    if attribute in owner._parameters:
        owner._parameters[attribute] = nn.Parameter(full, requires_grad=full.requires_grad)


def partition_initialized(model: nn.Module, resolution: Resolution, group: TensorParallelGroup) -> None:
    """Shard the parameters that transformers has initialised in full; all ranks take the values of rank 0.

    Together, the shards are the values that one process with rank 0's seed initialises.
    """
    full = [pair for pair in model.named_parameters(remove_duplicate=False) if not hasattr(pair[1], "tp_shard")]
    if full and group.process_group is not None:
        with group.agree():  # a rank that has failed does not join the broadcasts
            distinct = dict.fromkeys(param for _, param in full)
        for param in distinct:
            direct.broadcast(param.data, group.process_group, 0)
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for name, param in full:
        if param not in sharded:
            shard = resolution.shard(name, param.shape, group)
            local = take(Resident(param.data), resolution.layouts.get(name), group.rank).materialize()
            sharded[param] = shard.wrap(local.clone(), requires_grad=param.requires_grad)
        owner, param_type = owner_of(model, name)
        owner._parameters[param_type] = sharded[param]
