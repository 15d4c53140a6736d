"""A save that the first copy of a model makes for all copies, which see how it ended."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...marks import untyped
from ...ranks.mesh import TensorParallelGroup
from ...ranks.subgroups import subgroups


def by_first_copy(group: TensorParallelGroup, save: Callable[[], None]) -> None:
    """Run `save` on the ranks of the first copy; all ranks of all copies have to call it, and return once it is done.

    Raises on every rank what the first copy raises, which agrees on an error by itself.
    """
    if len(group.mesh_ranks) <= group.size:
        save()
        return
    failure: Exception | None = None
    if group.is_first_replica:
        try:
            save()
        except Exception as error:
            failure = error
    with _everyone(group).agree():
        if failure is not None:
            untyped(failure)._agreed_on = False  # among the ranks of the first copy alone
            raise failure


def _everyone(group: TensorParallelGroup) -> TensorParallelGroup:
    """The ranks of all copies."""
    ranks = group.mesh_ranks
    world = dist.group.WORLD
    process_group = world if len(ranks) == dist.get_world_size() else subgroups.of(ranks)
    assert process_group is not None
    mesh = DeviceMesh.from_group(process_group, group.device.type)
    return TensorParallelGroup(mesh, mesh.get_local_rank(), len(ranks), group.device)
