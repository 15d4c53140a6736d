"""The streaming load: model + plan + checkpoint -> parameters, each of this rank's shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging as transformers_logging

from ..anatomy.names import tied_parameters, untie
from ..checkpoint.conversion.convert import dtype_policy
from ..checkpoint.quantization.members import PACKED_CHECKPOINT
from ..checkpoint.reading.memory import empty
from ..checkpoint.reading.prefetch import prefetch
from ..checkpoint.reading.report import LoadReport
from ..checkpoint.reading.sameness import check_same_files
from ..logs import get_logger
from ..marks import untyped
from ..model.packed_forward import hold_packed
from ..plans.bind import Resolution
from ..ranks import direct
from ..ranks.group import TensorParallelGroup
from ..slices.lazy import LazyTensor, Resident
from ..strategies import take, whole_like
from ..strategies.shards.shard import SHARD
from ..text import size
from .request import LoadRequest, Mismatched, express, leaves, open_checkpoint, packing, read_first
from .rounds import cut_rounds, fill, fill_round, map_pages, names_arriving

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = get_logger(__name__)


@dataclass
class LoadResult:
    """Result of a load, in the terms of transformers' loading report."""

    missing: set[str]
    """Names that the checkpoint lacks; whole and on the meta device, for transformers to initialise."""
    unexpected: set[str]
    mismatched: Mismatched
    report: LoadReport


def load(
    model: PreTrainedModel, resolution: Resolution, group: TensorParallelGroup, request: LoadRequest
) -> LoadResult:
    """Fill the parameters of a parallelized meta-device `model`, reading only this rank's shards.

    Steps that can fail on one rank end with a vote, so that all ranks stop with the same error.

    Raises:
        CheckpointError: on files that are missing, malformed, truncated or of the wrong shape.
    """
    began = perf_counter()
    whole = {name: whole_like(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    # 1. Open the files and read their headers.
    with ExitStack() as stack:
        checkpoint = group.together(lambda: stack.enter_context(open_checkpoint(request, rank=group.rank)))
        read_first(checkpoint, request, group)
        with group.agree():
            # 2. Say what each parameter is, in terms of checkpoint tensors; keep the slice that this rank holds.
            conversion, mismatched = express(model, checkpoint, whole, request)
            shards = {
                name: _partition(name, expression, resolution, group, whole[name])
                for name, expression in conversion.expressions.items()
            }
            # 3. Say which bytes go where in the memory that the parameters will live in.
            dtype_of = dtype_policy(request.config.dtype_plan)
            dtypes = {name: dtype_of(name) or whole[name].dtype for name in shards}
            packed = packing(model, conversion, shards, dtypes, group.device, request)
            dense = {name: shard for name, shard in shards.items() if name not in packed.weights}
            values, mapped = {}, {}
            arriving = names_arriving(model, dense, request)
            maps = request.options.tp_map is not False and group.device.type == "cpu"
            for name, shard in dense.items():
                if name in arriving:
                    continue
                dtype = dtypes[name]
                pages = map_pages(shard, dtype) if maps else None
                values[name] = empty(shard.shape, dtype, group.device) if pages is None else pages
                if pages is not None:
                    mapped[name] = shard
            in_place, _ = leaves(mapped, values)
            names = [name for name in dense if name not in mapped]
            first, *later = cut_rounds(names, conversion.expressions, dtypes, arriving, group.size, request)
            stored, others = leaves({name: dense[name] for name in first}, values)
            stored += packed.reads
            outlines = {name: torch.empty(dense[name].shape, device="meta") for names in later for name in names}
            coming, _ = leaves({name: dense[name] for name in outlines}, outlines)
        sampled = check_same_files(group, checkpoint)
        group.check_same({"the checkpoint": [sorted(values), sorted(packed.weights)]})
        nbytes = sum(each.tensor.nbytes for each in (*in_place, *stored, *coming))
        nbytes += sum(leaf.nbytes for leaf, _ in others)
        held = sum(value.nbytes for value in values.values()) + packed.nbytes
        if request.quantization is not None and group.rank == 0:
            logger.log(
                logging.INFO if packed.weights else logging.WARNING,
                "the checkpoint is in %s, and %s: of %s in its files, this rank makes %s in memory",
                request.quantization.format.title,
                "stays packed" if packed.weights else "dequantised while it is loaded",
                size(nbytes),
                size(held),
            )
        # 4. Read them; the ranks of a node first fill a cold page cache together, and all share what comes from afar.
        local = [each for each in (*stored, *coming, *in_place) if not each.tensor.source.is_remote]
        prefetched = prefetch(checkpoint.opened, local, group, wanted=request.options.tp_prefetch)
        title, is_quiet = f"Loading shard 1 of {group.size}", group.rank > 0
        with transformers_logging.tqdm(total=nbytes, unit="B", unit_scale=True, desc=title, disable=is_quiet) as bar:
            bar.update(sum(each.tensor.nbytes for each in in_place))
            statistics = fill(stored, others, checkpoint, group, request, bar.update)
            for names in later:
                packed.weights |= fill_round(
                    {name: dense[name] for name in names},
                    values,
                    dtypes,
                    checkpoint,
                    group,
                    request,
                    statistics,
                    bar.update,
                )

            def check() -> None:
                for source in checkpoint.sources:
                    source.check_unchanged()

            group.together(check)
        reads, bytes_read = checkpoint.reads, checkpoint.bytes_read

    # 5. Put them in place; a missing parameter goes back to its full shape until it is initialised.
    def is_same(target: str, source: str) -> bool:
        """The ranks decide together: tensors that differ in one process may be equal on some shards."""
        return all(group.everywhere(lambda: same_bytes(values[target], values[source])))

    for name in tie(model, values, is_same, say=group.rank == 0):
        del values[name]
    for name, value in values.items():
        place(model, name, value)
    for name, weight in packed.weights.items():
        hold_packed(*owner_of(model, name), weight)
    if packed.kept is not None and packed.weights:
        PACKED_CHECKPOINT.put(model, packed.kept)
    missing = set(whole) - set(values) - set(packed.weights)
    for name in missing:
        restore_whole(model, name, whole[name])
    missing -= {name for name, _, _ in mismatched}
    held = sum(value.nbytes for value in values.values()) + packed.nbytes
    report = LoadReport(
        rank=group.rank,
        shares=tuple(group.gather(held)),
        seconds=perf_counter() - began,
        reading_seconds=statistics.seconds,
        bytes_read=bytes_read,
        reads=reads,
        methods={name: (way.nbytes, way.copied, way.seconds) for name, way in statistics.methods.items()},
        threads=group.threads,
        peak_buffer=statistics.peak_buffer,
        mapped=sum(each.tensor.nbytes for each in in_place),
        prefetched=prefetched,
        sampled=sampled,
        fallbacks=tuple(conversion.fallbacks),
    )
    if group.rank == 0:
        logger.info("%s", report)
    return LoadResult(missing, conversion.unexpected, mismatched, report)


def pad_locally(
    model: nn.Module, resolution: Resolution, group: TensorParallelGroup, missing: Collection[str]
) -> Callable[[], None]:
    """Let loaded embeddings count their padding row in this rank's rows; returns a function that undoes it.

    Some classes set that row to zero where transformers initialises, whether the weights are loaded or not (Youtu).
    """
    saved: dict[nn.Embedding, int | None] = {}
    for name, strategy in resolution.module_strategies.items():
        module = model.get_submodule(name)
        if group.size == 1 or not isinstance(module, nn.Embedding) or f"{name}.weight" in missing:
            continue
        if not isinstance(module.weight, DTensor):  # whose rows are counted in the whole, alike on all ranks
            saved[module] = module.padding_idx
            module.padding_idx = strategy.local_attributes(module, group.rank).get("padding_idx", module.padding_idx)

    def undo() -> None:
        for module, index in saved.items():
            module.padding_idx = index

    return undo


def partition_initialized(model: nn.Module, resolution: Resolution, group: TensorParallelGroup) -> None:
    """Cut the parameters that transformers has initialised whole; all ranks take the values of rank 0.

    The ranks together hold the values that one process with rank 0's seed initialises.
    """
    whole = [pair for pair in model.named_parameters(remove_duplicate=False) if not hasattr(pair[1], "tp_shard")]
    if whole and group.process_group is not None:
        with group.agree():  # a rank that has failed has no part in the broadcasts
            different = dict.fromkeys(param for _, param in whole)
        for param in different:
            direct.broadcast(param.data, group.process_group, 0)
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
    for name, param in whole:
        if param not in made:
            shard = resolution.shard(name, param.shape, group)
            local = _partition(name, Resident(param.data), resolution, group, whole_like(param)).materialize()
            made[param] = shard.wrap(local.clone(), requires_grad=param.requires_grad)
        owner, param_type = owner_of(model, name)
        owner._parameters[param_type] = made[param]


def _partition(
    name: str, expression: LazyTensor, resolution: Resolution, group: TensorParallelGroup, whole: torch.Tensor
) -> LazyTensor:
    """This rank's slice of one parameter, by its strategy."""
    strategy = resolution.param_strategies.get(name)
    if strategy is None:
        return expression
    layout = strategy.layout(name.rpartition(".")[2], whole.shape, group.size)
    return take(expression, layout, group.rank)


def tie(model: PreTrainedModel, names: Collection[str], is_same: Callable[[str, str], bool], *, say: bool) -> set[str]:
    """If a checkpoint holds both of two tied parameters, keep one if they are the same, else untie them.

    Returns those of `names` that are not kept. `say` is whether this rank logs the parameters that it unties.
    """
    gone = set()
    for target, source in list(tied_parameters(model).items()):
        if target not in names or source not in names:
            continue
        if is_same(target, source):
            gone.add(target)
            continue
        untie(model, target)
        if say:
            logger.warning(
                "the config ties %s to %s, but the checkpoint holds different values for them, so they stay untied; "
                "set tie_word_embeddings=False in the config to say so",
                target,
                source,
            )
    return gone


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors hold the same bytes; float8 cannot be compared by value."""
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def place(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Set one parameter or buffer, marked so that transformers does not initialise it.

    A parameter is trainable even if its class freezes it (Whisper's encoder positions): so transformers loads it.
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


def restore_whole(model: nn.Module, name: str, whole: torch.Tensor) -> None:
    """Put back the meta parameter that was there before it was cut, for transformers to tie or to initialise."""
    owner, attribute = owner_of(model, name)
    if attribute in owner._parameters:
        owner._parameters[attribute] = nn.Parameter(whole, requires_grad=whole.requires_grad)


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a parameter or buffer, and its name there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
