"""Widths: checks that linears of a block that feed each other split the features between them identically."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn

from ...anatomy.attention import is_attention
from ...anatomy.linears import features, input_width, is_transposed, output_width
from ...anatomy.names import fold_layers
from ...slices.layout import Ranks, Split, apportion, count_of
from ...strategies import TensorParallelLayer
from ...strategies.signature import FEATURES
from ..rule import UNRULED


def misfits(
    modules: Mapping[str, nn.Module],
    strategies: Mapping[str, TensorParallelLayer],
    attention: Collection[str],
    ranks: Ranks,
) -> Iterator[str]:
    """Faults: a linear leaves its features sharded and the next linear of the block expects all, or the reverse.

    Widths decide which linear feeds which: within a block, a linear feeds every later linear that takes as many
    features as it makes (or as one part of a fused linear). If there is none, it feeds earlier linears with rules that
    take shards.

    Args:
        strategies: module -> its strategy.
        attention: projections of attention, which `heads.py` checks.
    """
    size = count_of(ranks)
    for name, module in modules.items():
        if is_attention(module):  # checked by heads
            continue
        prefix = f"{name}." if name else ""
        linears = [
            f"{prefix}{child}"
            for child, submodule in module.named_children()
            if not isinstance(submodule, nn.Embedding) and features(submodule) and f"{prefix}{child}" not in attention
        ]
        for position, linear in enumerate(linears):
            strategy = strategies.get(linear, UNRULED)
            makes = _makes(modules[linear], strategy, ranks)
            consumers = [peer for peer in linears[position + 1 :] if input_width(modules[peer]) in makes]
            if not consumers and strategy.signature.leaves is FEATURES:  # Idefics declares down_proj before up_proj
                earlier = [peer for peer in linears[:position] if input_width(modules[peer]) in makes]
                consumers = [peer for peer in earlier if strategies.get(peer, UNRULED).signature.takes is FEATURES]
            takers = [peer for peer in consumers if strategies.get(peer, UNRULED).signature.takes is FEATURES]
            split = None
            if strategy.signature.leaves is FEATURES:
                ends = linear == linears[-1] and isinstance(module, nn.Sequential)
                if not consumers and len(linears) > 1 and not ends:  # a single linear may feed siblings of the module
                    yield (
                        f"{fold_layers(linear)}: it leaves its features sharded, and nothing after it in "
                        f"{fold_layers(name) or 'the model'} takes as many; make it colwise_rep"
                    )
                elif consumers and not takers:
                    maker, taker = fold_layers(linear), fold_layers(consumers[0])
                    yield (
                        f"{maker}: it leaves its features sharded, but {taker}, which takes as many, expects "
                        f"all of them; make {taker} rowwise, or {maker} colwise_rep"
                    )
                split = next((makes[input_width(modules[peer])] for peer in takers), None)
            for peer in takers:
                maker, taker = fold_layers(linear), fold_layers(peer)
                if strategy.signature.leaves is not FEATURES:
                    yield (
                        f"{taker}: it expects its features sharded, but {maker}, which makes as many, leaves "
                        f"them replicated; make {maker} colwise, or {taker} rowwise_rep"
                    )
                elif not strategy.use_local_output:
                    pass  # a DTensor has its placement
                elif strategies[peer].shards_as_torch and input_width(modules[peer]) % size:
                    yield (
                        f"{maker} and {taker}: {input_width(modules[peer])} features do not divide by {size} ranks, "
                        "and torch takes every rank's shard to be as wide as its own; make what comes before it "
                        "ColwiseParallel(use_local_output=False), or use the strategies colwise and rowwise"
                    )
                elif split != _split(modules[peer], strategies[peer], input_width(modules[peer]), 1, size):
                    yield (
                        f"{maker} and {taker}: the same features are split differently; fused parts are "
                        "packed_colwise, everything else colwise, and what follows rowwise; torch's styles and "
                        "get_tensor_shard split by torch.chunk, strategies by name evenly"
                    )


def _makes(module: nn.Module, strategy: TensorParallelLayer, ranks: Ranks) -> dict[int, Split]:
    """Width -> split of a linear's output: of all features, and of each part of a fused linear."""
    width = output_width(module)
    return {
        width: _split(module, strategy, width, 0, count_of(ranks)),
        **{
            length: apportion(length, ranks, unit=strategy.unit_of(length), joins=strategy.joins_remainder)
            for length in strategy.part_lengths(width)
        },
    }


def _split(module: nn.Module, strategy: TensorParallelLayer, width: int, dim: int, size: int) -> Split:
    """The split of `width` features, along `dim` of the weight (out, in) of a linear."""
    weight = getattr(module, "weight", None)
    if strategy.slices_itself and isinstance(weight, Tensor) and weight.ndim == 2:
        layout = strategy.layout("weight", weight.shape, size)
        if layout is not None and layout.dim == (1 - dim if is_transposed(module) else dim):
            return layout.split
    return strategy.split_length(width, size)
