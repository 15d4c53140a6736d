"""Ranks on several machines, which have networks, files and folders of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...seams import Feature, Meet

if TYPE_CHECKING:
    from ...checkpoint.reading.header import Checkpoint
    from ...loading.options import Options
    from ...ranks.group import TensorParallelGroup


class Machines(Feature):
    """Machines try their network before ranks depend on it, compare their files, and warn of saves that they lack."""

    requires = ("watch",)

    @contextmanager
    def around_start(self) -> Iterator[Meet]:
        from .network import connect_machines, late_ranks_logged

        with late_ranks_logged():
            yield connect_machines

    @contextmanager
    def around_load(self, group: TensorParallelGroup, options: Options) -> Iterator[None]:
        from .network import warn_of_crossing

        if group.mesh is not None and group.mesh.ndim > 1:
            warn_of_crossing(group)
        yield

    @contextmanager
    def around_reads(
        self, checkpoint: Checkpoint, requests: Any, group: Any, options: Any
    ) -> Iterator[Mapping[str, int]]:
        from .sameness import check_same_files

        yield {"sampled": check_same_files(group, checkpoint)}

    def after_save(self, group: TensorParallelGroup, file: Path, *, writes: bool) -> None:
        from .saves import warn_of_lacking

        warn_of_lacking(group, file, writes=writes)


FEATURE = Machines()
