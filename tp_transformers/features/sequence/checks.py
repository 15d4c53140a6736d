"""Check of a bound plan: what computes on shards of the sequence is given shards."""

from __future__ import annotations

from collections.abc import Iterator

from ...anatomy import fold_layers, names_around
from ...plans.binding import Binding
from ...strategies.signature import SEQUENCE
from .signatures import exchanges_tokens, scatters_sequence


def full_inputs(bound: Binding) -> Iterator[str]:
    """Faults: modules that compute on shards of the sequence, but are given the full sequence.

    Skipped if a user's strategy may shard the sequence or return DTensors.
    """
    strategies = bound.module_strategies
    styles = {name for name, strategy in strategies.items() if strategy.shards_as_torch}
    on_shards = [name for name, strategy in strategies.items() if strategy.signature.takes is SEQUENCE]
    rest = [strategy for name, strategy in strategies.items() if name not in styles.intersection(on_shards)]
    if any(
        scatters_sequence(strategy.signature) or not strategy.use_local_output or not strategy.is_built_in
        for strategy in rest
    ):
        return
    for name in on_shards:
        if name in styles and not bound.attention.keys() & set(names_around(name)):  # in attention, heads are sharded
            yield (
                f"{fold_layers(name)}: torch's SequenceParallel takes its input for a shard of the sequence, which no "
                "rule shards before it; use replicate, or let what comes before it leave Shard(1)"
            )
        if exchanges_tokens(strategies[name].signature):
            yield (
                f"{fold_layers(name)}: all ranks have the same tokens, of which there is nothing to exchange; use "
                "moe_tp_experts, or load with tp_sequence_parallel=True or tp_batch_sharded=True"
            )
        elif name not in styles:
            yield (
                f"{fold_layers(name)}: its input is replicated, since no rule shards the sequence before it; "
                "use replicate, or load with tp_sequence_parallel=True"
            )
