"""Linears that feed each other: a shard of features meets a linear that takes that shard."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ...anatomy import features, fold_layers, input_width, is_attention, is_transposed, output_width
from ...plans.binding import Binding
from ...slices.layout import Ranks, Split
from ...strategies import TensorParallelLayer
from ...strategies.signature import FEATURES


def misfits(bound: Binding) -> Iterator[str]:
    """Faults: a linear leaves its features sharded and the next linear of the block expects all, or the reverse.

    Widths decide which linear feeds which: within a block, a linear feeds every later linear that takes as many
    features as it makes (or as one part of a fused linear). If there is none, it feeds earlier linears with rules that
    take shards. `heads.py` checks projections of attention.
    """
    attention = bound.splits.keys() | bound.replicated
    for block in (name for name, module in bound.modules.items() if not is_attention(module)):
        children = bound.children(block)
        linears = {
            name: input_width(child)
            for name, child in children.items()
            if not isinstance(child, nn.Embedding) and features(child) and name not in attention
        }
        takes = {name for name in linears if bound.signature(name).takes is FEATURES}
        for position, linear in enumerate(linears):
            strategy, maker = bound.strategy(linear), fold_layers(linear)
            leaves = strategy.signature.leaves is FEATURES
            makes = _makes(children[linear], strategy, bound.ranks)
            consumers = [peer for peer in list(linears)[position + 1 :] if linears[peer] in makes]
            if not consumers and leaves:  # Idefics declares down_proj before up_proj
                consumers = [peer for peer in list(linears)[:position] if linears[peer] in makes and peer in takes]
            takers = [peer for peer in consumers if peer in takes]
            if leaves and not consumers:
                ends = linear == list(linears)[-1] and isinstance(bound.modules[block], nn.Sequential)
                if len(linears) > 1 and not ends:  # a single linear may feed siblings of the module
                    yield (
                        f"{maker}: it leaves its features sharded, and nothing after it in "
                        f"{fold_layers(block) or 'the model'} takes as many; make it colwise_rep"
                    )
            elif leaves and not takers:
                taker = fold_layers(consumers[0])
                yield (
                    f"{maker}: it leaves its features sharded, but {taker}, which takes as many, expects "
                    f"all of them; make {taker} rowwise, or {maker} colwise_rep"
                )
            for peer in takers:
                taker, width = fold_layers(peer), linears[peer]
                if not leaves:
                    yield (
                        f"{taker}: it expects its features sharded, but {maker}, which makes as many, leaves "
                        f"them replicated; make {maker} colwise, or {taker} rowwise_rep"
                    )
                elif not strategy.use_local_output:
                    pass  # a DTensor has its placement
                elif bound.strategy(peer).shards_as_torch and width % bound.size:
                    yield (
                        f"{maker} and {taker}: {width} features do not divide by {bound.size} ranks, "
                        "and torch takes every rank's shard to be as wide as its own; make what comes before it "
                        "ColwiseParallel(use_local_output=False), or use the strategies colwise and rowwise"
                    )
                elif makes[linears[takers[0]]] != _split(children[peer], bound.strategy(peer), width, 1, bound.size):
                    yield (
                        f"{maker} and {taker}: the same features are split differently; fused parts are "
                        "packed_colwise, everything else colwise, and what follows rowwise; torch's styles and "
                        "get_tensor_shard split by torch.chunk, strategies by name evenly"
                    )


def _makes(module: nn.Module, strategy: TensorParallelLayer, ranks: Ranks) -> dict[int, Split]:
    """Width -> split of a linear's output: of all features, and of each part of a fused linear."""
    width, parts = output_width(module), strategy.parts
    lengths = [width // parts] if isinstance(parts, int) else [part for part in parts or () if isinstance(part, int)]
    of_parts = {length: strategy.split_part(length, ranks) for length in lengths}
    return {width: _split(module, strategy, width, 0, ranks.size), **of_parts}


def _split(module: nn.Module, strategy: TensorParallelLayer, width: int, dim: int, size: int) -> Split:
    """The split of `width` features, along `dim` of the weight (out, in) of a linear."""
    weight = getattr(module, "weight", None)
    if strategy.slices_itself and isinstance(weight, Tensor) and weight.ndim == 2:
        layout = strategy.layout("weight", weight.shape, size)
        if layout is not None and layout.dim == (1 - dim if is_transposed(module) else dim):
            return layout.split
    return strategy.split_length(width, size)
