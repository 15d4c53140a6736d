"""A new process group after a failure, in the same processes."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from ...errors import MeshError, UnsupportedError
from ...model.dropout import random_states, set_random_states
from ...ranks.group import GROUP, TensorParallelGroup
from ...ranks.mesh import forget_graphs, init, prepare
from .calls import WATCH
from .device import check_unchanged
from .poller import POLLER
from .watch import Watch


def renew_process_group(model: nn.Module) -> None:
    """Start a new process group after a rank failed and the old one ended; collective.

    Loaded models work as before: parameters and optimizers are unchanged, and all ranks draw what rank 0 draws, since
    each drew numbers until it noticed the failure. Do not use earlier gradients, caches, recorded forwards or CUDA
    graphs; create other process groups again. On GPUs, torch.compile compiles again.

    Raises:
        RemoteRankError: a rank is lost.
        MeshError: the group has not ended; or the parameters are those of different steps, or of a step that was cut
            off; or a GPU fails.
        UnsupportedError: the model does not use all ranks that were started.
    """
    group, watching = GROUP.of(model), WATCH.find(model)
    failure = watching.failure if watching is not None else None
    if watching is None or failure is None:
        raise MeshError(
            "renew_process_group",
            got="a process group that has not ended" if watching else "a model that is not watched",
            expected="one that ended when a rank failed",
            fix="Call it after a RemoteRankError, on all ranks.",
        )
    if failure.is_lost:
        raise failure.to_error()
    if group.size != dist.get_world_size() or (group.mesh is not None and group.mesh.ndim > 1):
        raise UnsupportedError(
            "renew_process_group",
            got=f"{group.size} ranks of {dist.get_world_size()}",
            expected="a model on one axis of all ranks",
            fix="Start all ranks again.",
        )
    forget_graphs()
    check_unchanged(group, watching.steps, watching.meeting)
    ended = [watch for watch in POLLER.all() if isinstance(watch, Watch) and watch.failure == failure]
    _restart(group, watching.meeting)
    states = group.gather(random_states(group.device) if group.rank == 0 else None)
    set_random_states(group.device, states[0])
    # Ranks garbage-collect dropped models at different times: restart the watches that all ranks still have.
    numbers = [set(rank_numbers) for rank_numbers in group.gather([watch.number for watch in ended])]
    common = set.intersection(*numbers)
    for watch in sorted((watch for watch in ended if watch.number in common), key=lambda watch: watch.number):
        watch.begin()


def _restart(group: TensorParallelGroup, store: Store) -> None:
    """Restart the default process group after it has ended. Collective over all ranks, with the same new store.

    The meshes of `group` look it up by name, and so use the new one.
    """
    backend, rank, size = dist.get_backend_config(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    init(backend, store, rank, size, group.device)
    assert group.device_mesh is not None
    root = getattr(group.device_mesh, "_get_root_mesh", lambda: None)()  # older torch finds groups by name alone
    registry = getattr(root, "_pg_registry", None)
    assert group.process_group is not None
    prepare(group.process_group, group.device)
    if registry is not None and group.process_group is not None:  # compiled forwards use it
        registry[group.process_group.group_name] = group.process_group
