"""Mixers other than attention: state spaces, delta nets, gated recurrences and short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...plans.binding import Binding
    from ...plans.rule import SplitHeads
    from ...strategies import TensorParallelLayer


class Mixers(Feature):
    """The section `mixers` of plans, and the strategies of mixers' modules."""

    sections = (".mixer.Mixer",)

    def split_heads(self, bound: Binding) -> Mapping[str, SplitHeads]:
        from .mixer import Mixer, split_mixers

        return split_mixers([entry for entry in bound.plan.entries if isinstance(entry, Mixer)], bound)

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        from .strategies import ChannelwiseParallel, GatedNormParallel, InnerRowwiseParallel

        return {
            "channelwise": ChannelwiseParallel(use_dtensor=False),
            "gated_norm": GatedNormParallel(use_dtensor=False),
            "rowwise_inner": InnerRowwiseParallel(),
        }


FEATURE = Mixers()
