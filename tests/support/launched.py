"""Ranks that no launcher starts, nor ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.support.pool import free_port


def launched(
    size: int, *command: str, before: Sequence[str] = (), last: int | None = None, stderr: int | None = None
) -> list[tuple[int, str]]:
    """Exit code and output of each of `size` ranks of `python COMMAND`.

    Args:
        before: for each rank, what stands before the command in a shell.
        last: a rank that is killed once the others have ended.
        stderr: as of subprocess.Popen.
    """
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            ["sh", "-ec", f'exec {before[rank] if before else ""} "$@"', "sh", sys.executable, *command],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        for rank in range(size)
    ]
    printed = {}
    try:
        for rank in sorted(range(size), key=lambda rank: rank == last):
            if rank == last:
                ranks[rank].kill()
            printed[rank] = ranks[rank].communicate(timeout=120)[0]
    finally:
        for process in ranks:
            process.kill()
    print(printed)
    return [(process.returncode, printed[rank]) for rank, process in enumerate(ranks)]
