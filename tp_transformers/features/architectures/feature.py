"""Strategies for the odd modules of single architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...strategies import TensorParallelLayer


class Architectures(Feature):
    """Four strategies: for ALiBi, latent attention, sparse activations, and products of parameters."""

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        from .alibi import AlibiParallel
        from .latent import MlaKvAProjParallel
        from .sharded_moments import ShardedMomentsParallel
        from .sharded_products import ShardedProductsParallel

        return {
            "alibi": AlibiParallel(),
            "mla_kv_a_proj": MlaKvAProjParallel(),
            "sharded_moments": ShardedMomentsParallel(),
            "sharded_products": ShardedProductsParallel(),
        }


FEATURE = Architectures()
