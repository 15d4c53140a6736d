"""Tensor parallelism across data-parallel ranks: the ranks that share a module hold different samples.

A sharded module gathers the samples of all ranks, computes with its shard, and returns each rank its own samples. All
other modules are replicated and data-parallel: they compute on a rank's own samples.

    own samples ── norm ── gather ── [ attention, MLP ] ── scatter ──+── ... own samples
      A                     A / B       sharded            A         A

Each rank has its own loss; the objective is their mean. In the backward, the gradient of a sharded module's output is
divided by the number of ranks, and that of its input multiplied by it. So parameters inside get the gradient of the
mean. Parameters outside get the gradient of the rank's own loss, which is still to be averaged over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils import ModelOutput

from ...anatomy import cache_in
from ...errors import MeshError, TensorParallelError, UnsupportedError, describe
from ...ranks.collectives import Group, all_gather_uneven, apply_pair, same, scatter_to_region
from ...ranks.group import agreed
from ...seams import Mixin
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import forward_of
from ..sequence.region import Widths, in_backward

SAME_INPUTS: ContextVar[bool] = ContextVar("tp_transformers_same_inputs", default=False)
"""True while all ranks of a model have the same inputs."""


class BatchModel(Mixin):
    """The method of a loaded model that gives all ranks the same inputs."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        token = SAME_INPUTS.set(True)
        try:
            return super()._generate(*args, **kwargs)
        finally:
            SAME_INPUTS.reset(token)


BATCH_DIM = 0
"""The batch dim of a model's activations: (batch, sequence, hidden)."""

_NOTHING, _POSITIONS, _MASK, _CACHE, _ATTENTIONS, _PACKED, _PACKED_ROW, _FLEX, _ROUTERS = range(9)
"""Kinds of a rank's arguments, in `Batch.agree`. _MASK is a mask of more than 2 dims; its dtype is sent too."""

_PROBLEMS = {
    _CACHE: ("cache, or past_key_values", "none, or generate, for which all ranks have the same prompts"),
    _ATTENTIONS: ("output_attentions=True", "no attentions, whose heads and samples are on different ranks"),
    _PACKED: ("cu_seq_lens_q, which counts a rank's own tokens", "padded samples, or position_ids and sdpa"),
    _PACKED_ROW: (
        "position_ids that start again in a rank's only row, with flash attention, which reads them in one row alone",
        "padded samples, or sdpa",
    ),
    _FLEX: ("flex attention with a mask, or with position_ids that start again", "sdpa"),
    _ROUTERS: (
        "output_router_logits=True where only some mixtures of experts are batch-sharded",
        "all or none of them",
    ),
}
_DTYPES = (torch.bool, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64)


@dataclass
class Batch:
    """The samples of all ranks of a group in the current forward."""

    widths: Widths
    """Number of samples of each rank."""
    differs: bool
    """True if any rank has masks or positions that may differ between samples."""
    length: int
    """Tokens of each sample."""
    joined: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict, compare=False)
    """{argument name: [(this rank's value, gathered value)]}, reused by all blocks of the forward, as for masks."""
    exchanges: int = field(default=0, compare=False)
    """Number of expert modules that exchanged tokens in this forward; their routers see only a rank's own tokens."""

    @classmethod
    def agree(cls, shape: tuple[int, ...], given: int, extra: int, device: torch.device, group: Group) -> Batch:
        """Exchange numbers of samples and kinds of arguments (one all-gather of 4 numbers). Collective over `group`.

        Args:
            shape: shape of this rank's samples: (samples, length, ...).
            given: _NOTHING, _POSITIONS, ...
            extra: index in `_DTYPES` of a mask's dtype.
            device: device for the collective.
            group: the ranks.

        Raises:
            MeshError: on all ranks, if the ranks' sequence lengths differ, or their kinds or dtypes of masks.
            UnsupportedError: on all ranks, if any rank has an argument that cannot be gathered.
        """
        facts = torch.tensor([shape[0], *(list(shape[1:2]) or [1]), given, extra], device=device)
        ranks = all_gather_uneven(facts[None], [1] * group.size(), group, dim=0).tolist()
        lengths = [rank[1] for rank in ranks]
        if len(set(lengths)) > 1:
            rank = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
            _refuse(
                MeshError,
                f"sequences of {lengths[0]} on rank 0 and of {lengths[rank]} on rank {rank} of the tp axis",
                "the same length on all ranks that share a batch-sharded model",
                "Pad all batches of a step to one length.",
            )
        for kind, (got, expected) in _PROBLEMS.items():
            if any(rank[2] == kind for rank in ranks):
                _refuse(UnsupportedError, got, expected, "Load the model without tp_batch_sharded for it.")
        masks = {(rank[2] == _MASK, rank[3]) for rank in ranks}
        if len(masks) > 1:
            _refuse(
                MeshError,
                "attention masks that some ranks have made, or of several dtypes",
                "masks of one kind on all ranks",
                "Give all ranks masks of shape (batch, length), or all of them ready made ones of one dtype.",
            )
        differs = any(rank[2] != _NOTHING for rank in ranks)
        return cls(tuple(rank[0] for rank in ranks), differs, lengths[0])


def _refuse(kind: type[TensorParallelError], got: str, expected: str, fix: str) -> NoReturn:
    raise agreed(
        kind(describe("the batch of the model", got=got, expected=expected, fix=fix))
    )  # all ranks see the same numbers


_current: WeakKeyDictionary[Group, Batch] = WeakKeyDictionary()
"""{group: batch of the base model's current forward}."""

_common: WeakKeyDictionary[Group, Batch | None] = WeakKeyDictionary()
"""{group: batch that all training forwards so far had in common; None if they differed}."""


def batch_of(x: Tensor, mesh: DeviceMesh, *, in_layers: bool = False) -> Batch | None:
    """Return the samples of all ranks, given this rank's samples `x`; None if all ranks have the same inputs.

    Outside a forward of the base model (recomputation in gradient checkpointing, or a head that is called by itself),
    the ranks exchange their numbers again. They need not if `x` is `in_layers`, a backward is running, and all training
    forwards had the same batch.
    """
    if SAME_INPUTS.get():
        return None
    group = mesh.get_group()
    batch, common = _current.get(group), _common.get(group)
    if batch is None and in_layers and common is not None and in_backward() >= 0:
        batch = replace(common, joined={})
    return batch if batch is not None else Batch.agree(tuple(x.shape), _POSITIONS, 0, x.device, group)


def exchange_samples(group: Group) -> bool:
    """True if ranks have different samples, so that experts exchange tokens; counts the exchange in the batch."""
    if not SAME_INPUTS.get() and (batch := _current.get(group)) is not None:
        batch.exchanges += 1
    return not SAME_INPUTS.get()


class BatchStates(TensorParallelLayer):
    """Around a base model: exchange the numbers of samples before the forward."""

    def __init__(self, *, mixes_routers: bool = False) -> None:
        """`mixes_routers`: whether some routers see the samples of all ranks, and others those of their own."""
        super().__init__()
        self.mixes_routers = mixes_routers

    def prepare_arguments(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `Communication.prepare_arguments`. Sets `use_cache=False`: a cache would hold all ranks' samples."""
        if SAME_INPUTS.get():
            return args, keywords
        names, given = self.arguments, forward_of(module).given
        ids = given.get("input_ids")
        ids = given["inputs_embeds"] if ids is None else ids
        group, (kind, extra) = mesh.get_group(), _kind(module, given, ids.shape[0], self.mixes_routers)
        batch = _current[group] = Batch.agree(tuple(ids.shape), kind, extra, ids.device, group)
        if torch.is_grad_enabled() and _common.setdefault(group, replace(batch, joined={})) != batch:
            _common[group] = None
        return args, {**keywords, "use_cache": False} if "use_cache" in names[len(args) :] else keywords

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        batch, group = _current.pop(mesh.get_group(), None), mesh.get_group()
        if batch is None:
            return outputs
        tokens = sum(batch.widths) * batch.length

        def slice_samples(value: Any) -> Any:
            """Slice router outputs for all tokens to this rank's samples; return other values as they are."""
            if (
                not isinstance(value, tuple)
                or len(value) == batch.exchanges
                or not all(isinstance(rows, Tensor) and rows.ndim == 2 and rows.shape[0] == tokens for rows in value)
            ):
                return value
            samples = (rows.unflatten(0, (sum(batch.widths), -1)) for rows in value)
            shards = (scatter_to_region(sample, batch.widths, group, dim=BATCH_DIM) for sample in samples)
            return tuple(scale_gradient(shard, 1 / group.size()).flatten(0, 1) for shard in shards)

        if isinstance(outputs, ModelOutput):
            for name in list(outputs):
                if outputs[name] is not None:
                    outputs[name] = slice_samples(outputs[name])
            return outputs
        return tuple(map(slice_samples, outputs)) if isinstance(outputs, tuple) else outputs

    def interrupted(self, module: nn.Module, mesh: DeviceMesh) -> None:
        _current.pop(mesh.get_group(), None)

    def __repr__(self) -> str:
        return "holds samples of its own"


def _kind(module: nn.Module, given: Mapping[str, Any], samples: int, mixes_routers: bool) -> tuple[int, int]:
    """Return (kind of the arguments, index of a mask's dtype) for `Batch.agree`."""
    mask, positions, config = given.get("attention_mask"), given.get("position_ids"), module.config
    if cache_in(given) is not None:
        return _CACHE, 0
    if given.get("cu_seq_lens_q") is not None:
        return _PACKED, 0
    if _asks(config, given, "output_attentions"):
        return _ATTENTIONS, 0
    if mixes_routers and _asks(config, given, "output_router_logits"):
        return _ROUTERS, 0
    attention = str(getattr(config, "_attn_implementation", None))
    is_masked = isinstance(mask, Tensor) and (mask.ndim > 2 or not bool(mask.all()))
    if "flash" in attention and not is_masked and samples == 1 and _start_again(positions):
        return _PACKED_ROW, 0
    if attention == "flex_attention" and (is_masked or _start_again(positions)):
        return _FLEX, 0
    if isinstance(mask, Tensor) and mask.ndim > 2:
        return _MASK, _DTYPES.index(mask.dtype)
    return (_POSITIONS if is_masked or positions is not None else _NOTHING), 0


def _start_again(positions: Any) -> bool:
    """True for position ids (batch, length) of several sequences in a row."""
    return isinstance(positions, Tensor) and positions.ndim == 2 and bool((positions.diff() != 1).any())


def _asks(config: Any, given: Mapping[str, Any], name: str) -> bool:
    """True if a forward is asked for an output, by an argument or by the config."""
    value = given.get(name)
    return bool(getattr(config, name, False) if value is None else value)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Identity; backward multiplies the gradient by `factor`."""
    return apply_pair(x, same, torch.mul, factor) if torch.is_grad_enabled() and x.requires_grad else x
