"""Names of strategies; a new one is a class in a file of this folder, and a line in `BUILT_IN`."""

from __future__ import annotations

from collections import UserDict
from typing import ClassVar

from torch.distributed.tensor import Replicate

from ..errors import PlanError
from .alibi import AlibiParallel
from .base import TensorParallelLayer
from .experts import IdentityExpertParallel, IsolatedParallel, MoEExpertsParallel
from .invariant.experts import InvariantExpertsParallel
from .invariant.linear import (
    InvariantColwiseParallel,
    InvariantEmbedding,
    InvariantPackedColwiseParallel,
    InvariantPackedRowwiseParallel,
    InvariantRowwiseParallel,
)
from .invariant.norms import InvariantNormParallel
from .latent import MlaKvAProjParallel
from .linear import ColwiseParallel, PackedColwiseParallel, PackedRowwiseParallel, RowwiseParallel
from .local import (
    AllReduceParallel,
    GatherParallel,
    LocalColwiseParallel,
    LocalPackedColwiseParallel,
    LocalPackedRowwiseParallel,
    LocalRowwiseParallel,
)
from .loss.head import LossColwiseParallel, LossParallel
from .mixers.channelwise import ChannelwiseParallel
from .mixers.gated_norm import GatedNormParallel
from .mixers.inner import InnerRowwiseParallel
from .regions.exchange import SequenceExpertsParallel
from .regions.sequence import (
    SequenceGatherParallel,
    SequenceParallel,
    SequenceParallelRep,
    SequenceReplicatedParallel,
    SequenceScatterParallel,
    SequenceStatesParallel,
)
from .replicate import InnerReplicateParallel, ReplicateOnceParallel, ReplicateParallel, ReplicateSumGradParallel
from .sharded_moments import ShardedMomentsParallel
from .sharded_norm import ShardedNormParallel
from .sharded_products import ShardedProductsParallel
from .styles import as_strategy, registered_by_user

BUILT_IN: dict[str, TensorParallelLayer] = {
    "colwise": ColwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    "packed_colwise": PackedColwiseParallel(),
    "packed_rowwise": PackedRowwiseParallel(),
    "embedding_rowwise": RowwiseParallel(),
    "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
    "local": IsolatedParallel(),
    "local_colwise": LocalColwiseParallel(use_dtensor=False),
    "local_rowwise": LocalRowwiseParallel(use_dtensor=False),
    "local_packed_colwise": LocalPackedColwiseParallel(use_dtensor=False),
    "local_packed_rowwise": LocalPackedRowwiseParallel(use_dtensor=False),
    "gather": GatherParallel(),
    "colwise_loss": LossColwiseParallel(),
    "loss_parallel": LossParallel(),
    "sequence_scatter": SequenceScatterParallel(),
    "sequence_parallel": SequenceParallel(),
    "sequence_parallel_rep": SequenceParallelRep(),
    "sequence_gather": SequenceGatherParallel(),
    "sequence_whole": SequenceReplicatedParallel(),
    "sequence_states": SequenceStatesParallel(),
    "sharded_norm": ShardedNormParallel(),
    "sharded_moments": ShardedMomentsParallel(),
    "sharded_products": ShardedProductsParallel(),
    "channelwise": ChannelwiseParallel(use_dtensor=False),
    "gated_norm": GatedNormParallel(use_dtensor=False),
    "rowwise_inner": InnerRowwiseParallel(),
    "alibi": AlibiParallel(),
    "replicate": ReplicateParallel(),
    "replicate_inner": InnerReplicateParallel(),
    "replicate_once": ReplicateOnceParallel(),
    "invariant_colwise": InvariantColwiseParallel(),
    "invariant_colwise_rep": InvariantColwiseParallel(output_layouts=Replicate()),
    "invariant_packed_colwise": InvariantPackedColwiseParallel(),
    "invariant_rowwise": InvariantRowwiseParallel(),
    "invariant_rowwise_rep": InvariantRowwiseParallel(input_layouts=Replicate()),
    "invariant_packed_rowwise": InvariantPackedRowwiseParallel(),
    "invariant_embedding": InvariantEmbedding(),
    "invariant_norm": InvariantNormParallel(),
    "invariant_experts": InvariantExpertsParallel(),
    # Names in the plans that classes of transformers 5 declare.
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": ReplicateSumGradParallel(),
    "all_reduce": AllReduceParallel(),
    "moe_tp_experts": MoEExpertsParallel(),
    "moe_all_to_all": SequenceExpertsParallel(),
    "ep_dispatch_experts": MoEExpertsParallel(),
    "ep_router": ReplicateParallel(),
    "grouped_gemm": IsolatedParallel(use_dtensor=True),
    "moe_identity_expert": IdentityExpertParallel(),
    "mla_kv_a_proj": MlaKvAProjParallel(),
    "local_params": TensorParallelLayer(),
}


class ParallelInterface(UserDict[str, TensorParallelLayer]):
    """Mapping of names to strategies: built-in ones and those of `register_strategy`; all instances share it."""

    _names: ClassVar[dict[str, TensorParallelLayer]] = dict(BUILT_IN)

    def __init__(self) -> None:
        self.data = self._names

    @classmethod
    def register_strategy(cls, name: str, strategy: TensorParallelLayer | type[TensorParallelLayer]) -> None:
        """Make `strategy` (a class or an instance) available to plans as `name`; replaces an earlier one."""
        cls()[name] = strategy

    register = register_strategy

    def valid_keys(self) -> list[str]:
        """All names, as in transformers' interface."""
        return list(self)

    def find(self, name: str) -> TensorParallelLayer | None:
        """The strategy `name`, from here or from transformers' interface; None if it is in neither."""
        return self[name] if name in self else registered_by_user(name, self)

    def __setitem__(self, name: str, strategy: TensorParallelLayer | type[TensorParallelLayer]) -> None:
        instance = as_strategy(strategy() if isinstance(strategy, type) else strategy)
        if not isinstance(instance, TensorParallelLayer):
            raise PlanError(
                f"strategy {name!r}",
                got=repr(strategy),
                expected="a TensorParallelLayer class or instance, or a style of torch or of transformers",
                fix="Inherit from tp_transformers.strategies.TensorParallelLayer.",
            )
        super().__setitem__(name, instance)


STRATEGIES = ParallelInterface()
"""The strategies that plans can name."""
