"""The streaming load: model + plan + checkpoint -> parameters, each of this rank's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.utils import logging as transformers_logging

from .checkpoint.conversion import Conversion, convert, dtype_policy, identity
from .checkpoint.exchange import fetch
from .checkpoint.index import Checkpoint, check_files
from .checkpoint.manifest import Manifest
from .checkpoint.memory import empty
from .checkpoint.prefetch import prefetch
from .checkpoint.quantization import Float8
from .checkpoint.reader import Request, read
from .checkpoint.sharded import ShardedCheckpoint
from .checkpoint.source import LocalFile, Source
from .errors import CheckpointError
from .lazy import LazyTensor, Leaf, Resident
from .logs import get_logger
from .mesh import TensorParallelGroup
from .report import LoadReport
from .resolve import Resolution
from .stored import Stored
from .strategies import local_tensor, whole_like

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = get_logger(__name__)


@dataclass(frozen=True)
class LoadRequest:
    """Where a load finds its weights, and how it treats them."""

    name: str
    """What messages call the checkpoint: its folder, or its name on the Hub."""
    files: Sequence[str | Source] | None = None
    shared: bool = False
    """Whether files are on the Hub, so that ranks share what they fetch: the same on all ranks."""
    state_dict: Mapping[str, torch.Tensor] | None = None
    """Weights in memory, in place of files."""
    weight_map: Mapping[str, str] | None = None
    """The checkpoint index's {tensor: file}."""
    weight_mapping: Sequence[Any] | None = None
    """transformers' renamings and converters for the model."""
    dtype_plan: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Parameters that are kept in another dtype than the model's."""
    ignore_mismatched_sizes: bool = False
    map: bool = False
    """Whether what a rank holds as one run of a file stays there, mapped, on a CPU."""
    prefetch: bool | None = None
    """Whether the ranks of a node fill the page cache together; None: where it is cold."""
    sharded: Manifest | None = None
    """A pre-sharded checkpoint, in place of files: its names are the model's own, so nothing is converted."""
    quantization: Float8 | None = None
    """How the weights are quantised, if they are; they are dequantised to the model's dtype."""


@dataclass
class LoadResult:
    """What a load found, in the terms of transformers' loading report."""

    missing: set[str]
    """Names that the checkpoint lacks; whole and on the meta device, for transformers to initialise."""
    unexpected: set[str]
    mismatched: set[tuple[str, torch.Size, torch.Size]]
    """(name, shape in the checkpoint, shape in the model)."""
    report: LoadReport


def load(
    model: PreTrainedModel, resolution: Resolution, group: TensorParallelGroup, request: LoadRequest
) -> LoadResult:
    """Fill the parameters of a parallelized meta-device `model`, reading only what this rank keeps.

    Steps that can fail on one rank end with a vote, so that all ranks stop with the same error.

    Raises:
        CheckpointError: on files that are missing, malformed, truncated or of the wrong shape.
    """
    began = perf_counter()
    whole = {name: whole_like(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    # 1. Open the files and read their headers.
    with ExitStack() as stack:
        with group.agree():
            checkpoint = stack.enter_context(_open(request, group))
        with group.agree():
            # 2. Say what each parameter is, in terms of checkpoint tensors; keep the slice that this rank holds.
            tensors: Mapping[str, LazyTensor] = checkpoint.tensors
            if request.state_dict is not None:
                tensors = {name: Resident(tensor) for name, tensor in request.state_dict.items()}
            if request.quantization is not None:
                tensors = request.quantization.dequantized(tensors)
            shapes = {name: tensor.shape for name, tensor in whole.items()}
            conversion = _convert(model, tensors, shapes, request)
            mismatched = _take_mismatched(conversion, whole, request)
            shards = {
                name: _partition(name, expression, resolution, group, whole[name])
                for name, expression in conversion.expressions.items()
            }
            # 3. Say which bytes go where in the memory that the parameters will live in.
            dtype_of = dtype_policy(request.dtype_plan)
            values, mapped = {}, {}
            for name, shard in shards.items():
                dtype = dtype_of(name) or whole[name].dtype
                pages = _pages(shard, dtype) if request.map and group.device.type == "cpu" else None
                values[name] = empty(shard.shape, dtype, group.device) if pages is None else pages
                if pages is not None:
                    mapped[name] = shard
            in_place, _ = _leaves(mapped, values)
            stored, others = _leaves({name: shard for name, shard in shards.items() if name not in mapped}, values)
            remote = [each for each in stored if each.tensor.source.is_remote]
            stored = [each for each in stored if not each.tensor.source.is_remote]
        group.check_same("the checkpoint", (sorted(values), checkpoint.signature))
        nbytes = sum(each.tensor.nbytes for each in (*in_place, *stored, *remote))
        nbytes += sum(leaf.nbytes for leaf, _ in others)
        if request.quantization is not None and group.rank == 0:
            logger.warning(
                "the checkpoint is in FP8, and dequantised while it is loaded: of %.2f GB in its files, this rank "
                "makes %.2f GB in memory",
                nbytes / 1e9,
                sum(value.nbytes for value in values.values()) / 1e9,
            )
        # 4. Read them; the ranks of a node first fill a cold page cache together, and all share what comes from afar.
        prefetched = prefetch(checkpoint.files, [*stored, *in_place], group, wanted=request.prefetch)
        with _progress(group, nbytes) as progress:
            with group.agree():
                statistics = read(stored, threads=group.threads, progress=progress)
                progress(sum(each.tensor.nbytes for each in in_place))
            if request.shared:
                fetch(remote, sources=checkpoint.sources, group=group, progress=progress)
            with group.agree():
                for leaf, destination in others:
                    leaf.fill(destination)
                    progress(leaf.nbytes)
                for source in checkpoint.sources:
                    source.check_unchanged()
        reads, bytes_read = checkpoint.reads, checkpoint.bytes_read
    # 5. Put them in place; what is missing goes back to its whole shape until it is initialised.
    _tie(model, group, values)
    for name, value in values.items():
        _place(model, name, value)
    missing = set(whole) - set(values)
    for name in missing:
        _restore_whole(model, name, whole[name])
    missing -= {name for name, _, _ in mismatched}
    held = sum(value.nbytes for value in values.values())
    report = LoadReport(
        rank=group.rank,
        shares=tuple(group.gather(held)),
        seconds=perf_counter() - began,
        reading_seconds=statistics.seconds,
        bytes_read=bytes_read,
        reads=reads,
        methods={name: (way.nbytes, way.copied, way.seconds) for name, way in statistics.methods.items()},
        threads=statistics.threads,
        peak_buffer=statistics.peak_buffer,
        mapped=sum(each.tensor.nbytes for each in in_place),
        prefetched=prefetched,
        fallbacks=tuple(conversion.fallbacks),
    )
    if group.rank == 0:
        logger.info("%s", report)
    return LoadResult(missing, conversion.unexpected, mismatched, report)


def partition_initialized(model: nn.Module, resolution: Resolution, group: TensorParallelGroup) -> None:
    """Cut the parameters that transformers has initialised whole; all ranks take the values of rank 0.

    What one process with rank 0's seed would have initialised is what the ranks hold together.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if hasattr(param, "tp_shard"):
            continue
        if param not in made:
            if group.process_group is not None:
                dist.broadcast(param.data, group=group.process_group, group_src=0)
            shard = resolution.shard(name, param.shape, group)
            local = _partition(name, Resident(param.data), resolution, group, whole_like(param)).materialize()
            made[param] = shard.wrap(local.clone(), requires_grad=param.requires_grad)
        owner, param_type = _owner(model, name)
        owner._parameters[param_type] = made[param]


def _open(request: LoadRequest, group: TensorParallelGroup) -> Checkpoint:
    if request.sharded is not None:
        return ShardedCheckpoint(request.sharded, rank=group.rank)
    if request.state_dict is not None:
        return Checkpoint(())
    files = request.files or ()
    check_files((file.name if isinstance(file, Source) else file for file in files), folder=request.name)
    return Checkpoint(files, weight_map=request.weight_map)


def _convert(
    model: PreTrainedModel,
    tensors: Mapping[str, LazyTensor],
    shapes: Mapping[str, torch.Size],
    request: LoadRequest,
) -> Conversion:
    if request.sharded is None:
        return convert(model, tensors, shapes, request.weight_mapping)
    conversion = convert(model, tensors, shapes, None)
    # The model went through these before it was saved in shards: `save_pretrained` reverts them as ever.
    gone_through = [entry for entry in request.weight_mapping or () if identity(entry) in request.sharded.conversions]
    model._weight_conversions = gone_through  # type: ignore[attr-defined]
    return conversion


def _take_mismatched(
    conversion: Conversion, whole: Mapping[str, torch.Tensor], request: LoadRequest
) -> set[tuple[str, torch.Size, torch.Size]]:
    """Take tensors of the wrong shape out of `conversion`. Raises CheckpointError unless they are to be ignored."""
    mismatched = {
        (name, expression.shape, whole[name].shape)
        for name, expression in conversion.expressions.items()
        if expression.shape != whole[name].shape
    }
    if mismatched and not request.ignore_mismatched_sizes:
        lines = (f"\n  - {name}: got {tuple(got)}, expected {tuple(want)}" for name, got, want in sorted(mismatched))
        raise CheckpointError(
            f"checkpoint {request.name}: tensors of the wrong shape:{''.join(lines)}\n"
            "Correct the config, or pass ignore_mismatched_sizes=True to initialise them anew."
        )
    for name, _, _ in mismatched:
        del conversion.expressions[name]
    return mismatched


def _partition(
    name: str, expression: LazyTensor, resolution: Resolution, group: TensorParallelGroup, whole: torch.Tensor
) -> LazyTensor:
    """This rank's slice of one parameter, by its strategy."""
    strategy = resolution.param_strategies.get(name)
    if strategy is None:
        return expression
    param_type = name.rpartition(".")[2]
    shard = strategy.partition_tensor(expression, whole, param_type, None, True, group.rank, group.device_mesh)
    return shard if isinstance(shard, LazyTensor) else Resident(local_tensor(shard))


def _pages(shard: LazyTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The pages of the file that a shard stands in, as a tensor, if they are what the parameter holds."""
    outline = torch.empty(shard.shape, device="meta")
    leaves = list(shard.pieces(outline))
    if len(leaves) != 1 or not isinstance(leaves[0][0], Stored) or not leaves[0][1].is_contiguous():
        return None
    boxes = [box for box, _ in leaves[0][0].boxes(leaves[0][1])]
    if len(boxes) != 1 or boxes[0].rows != 1 or boxes[0].dtype != dtype or boxes[0].offset % dtype.itemsize:
        return None
    (box,) = boxes
    if not isinstance(box.source, LocalFile):
        return None
    return box.source.own_map().view(box.offset, box.span, dtype, outline.shape, outline.stride())


def _leaves(
    shards: Mapping[str, LazyTensor], values: Mapping[str, torch.Tensor]
) -> tuple[list[Request], list[tuple[Leaf, torch.Tensor]]]:
    """What is stored in files, to be read together, and what comes after; each with the memory that it fills."""
    stored: list[Request] = []
    others: list[tuple[Leaf, torch.Tensor]] = []
    for name, shard in shards.items():
        for leaf, destination in shard.pieces(values[name]):
            if isinstance(leaf, Stored):
                stored.append(Request(leaf, destination))
            else:
                others.append((leaf, destination))
    return stored, others


def _tie(model: PreTrainedModel, group: TensorParallelGroup, values: dict[str, torch.Tensor]) -> None:
    """Where a checkpoint holds both of two tied parameters, keep one if they are equal, else untie them.

    The ranks decide together: what one process would see as different may be equal on some shards.
    """
    for target, source in dict(model.all_tied_weights_keys).items():
        if target not in values or source not in values:
            continue
        # Bytes, since float8 cannot be compared.
        same = torch.equal(values[target].view(torch.uint8), values[source].view(torch.uint8))
        equal = torch.tensor(int(same), device=group.device)
        if group.process_group is not None:
            dist.all_reduce(equal, dist.ReduceOp.MIN, group=group.process_group)
        if equal:
            del values[target]
        else:
            del model.all_tied_weights_keys[target]
            if group.rank == 0:
                logger.warning(
                    "the config ties %s to %s, but the checkpoint holds different values for them, so they stay "
                    "untied; set tie_word_embeddings=False in the config to say so",
                    target,
                    source,
                )


def _place(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Set one parameter or buffer, marked so that transformers does not initialise it."""
    owner, attribute = _owner(model, name)
    if attribute in owner._buffers:
        value._is_hf_initialized = True  # type: ignore[attr-defined]
        owner._buffers[attribute] = value
        return
    meta = owner._parameters[attribute]
    assert meta is not None
    param = meta.tp_shard.wrap(value, requires_grad=meta.requires_grad)  # type: ignore[attr-defined]
    param._is_hf_initialized = True
    owner._parameters[attribute] = param


def _restore_whole(model: nn.Module, name: str, whole: torch.Tensor) -> None:
    owner, attribute = _owner(model, name)
    if attribute in owner._parameters:
        owner._parameters[attribute] = nn.Parameter(whole, requires_grad=whole.requires_grad)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


@contextmanager
def _progress(group: TensorParallelGroup, nbytes: int) -> Iterator[Callable[[int], object]]:
    """A progress bar over this rank's bytes on rank 0, where transformers' bars are on."""
    if group.rank:
        yield lambda count: None
        return
    with transformers_logging.tqdm(
        total=nbytes, unit="B", unit_scale=True, unit_divisor=1024, desc=f"Loading shard 1 of {group.size}"
    ) as bar:
        yield bar.update
