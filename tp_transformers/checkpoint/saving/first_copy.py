"""A save that the first copy of a model makes for all copies, which see how it ended."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh

from ...ranks.group import TP_AXIS, TensorParallelGroup, agreed, reported


def by_first_copy(group: TensorParallelGroup, save: Callable[[], None]) -> None:
    """Run `save` on the ranks of the first copy; all ranks of all copies have to call it, and return once it is done.

    Raises on every rank the error of the first copy, whose ranks agree on it by themselves.
    """
    if group.mesh is None or group.mesh.size() == group.size:
        save()
        return
    failure: Exception | None = None
    if group.is_first_replica:
        try:
            save()
        except Exception as error:
            failure = error
    report = reported(failure)
    # The report spreads along one axis of the mesh after the other, so no further process group is needed.
    for axis in group.mesh.mesh_dim_names or ():
        if axis != TP_AXIS:
            mesh = DeviceMesh.from_group(group.mesh.get_group(axis), group.device.type)
            copies = TensorParallelGroup(mesh, mesh.get_local_rank(), mesh.size(), group.device)
            report = next(filter(None, copies.gather(report)), None)
    if failure is not None:
        raise failure
    if report is not None:
        kind, text = report
        raise agreed(kind(text))
