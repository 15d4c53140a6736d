"""Strategies for the odd modules of single architectures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...plans.binding import Binding
    from ...strategies import TensorParallelLayer


class Architectures(Feature):
    """Strategies for ALiBi, latent attention, sparse activations, products of parameters, norms over all heads, ..."""

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        from .replicated import (
            AlibiParallel,
            IdentityExpertParallel,
            InnerReplicateParallel,
            MlaKvAProjParallel,
            ReplicateOnceParallel,
        )
        from .sharded import ShardedMomentsParallel, ShardedNormParallel, ShardedProductsParallel

        return {
            "alibi": AlibiParallel(),
            "mla_kv_a_proj": MlaKvAProjParallel(),
            "moe_identity_expert": IdentityExpertParallel(),
            "replicate_inner": InnerReplicateParallel(),
            "replicate_once": ReplicateOnceParallel(),
            "sharded_moments": ShardedMomentsParallel(),
            "sharded_norm": ShardedNormParallel(),
            "sharded_products": ShardedProductsParallel(),
        }

    def check_plan(self, bound: Binding) -> Iterable[str]:
        from .sharded import compared_features

        return compared_features(bound)


FEATURE = Architectures()
