"""The two sides of a comparison, and how their processes are started."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import processes


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    label: str
    loader: str
    """"native" or "ours"."""
    folder: Path
    """Where the files that it reads are."""
    hub_name: str = ""
    """What from_pretrained is given, where that is not the folder."""
    stream: bool = False


@dataclass(frozen=True)
class Setting:
    """What is the same for all loads of a run."""

    size: int
    """The number of ranks."""
    rank: int | None
    """The only rank that runs, the others being faked; None where all of them run."""
    device: str
    timeout: float
    parent: Path
    """Where checkpoints are kept, and temporary files made."""
    endpoint: str = ""
    """The address of a Hub."""

    def run(self, action: str, side: Side, reference: Path, target: Path | None = None) -> list[dict[str, Any]]:
        """Let fresh processes do `action` (see worker.Job), one a rank; returns what they wrote."""
        ranks = range(self.size) if self.rank is None else [self.rank]
        with tempfile.TemporaryDirectory(dir=self.parent) as scratch:
            job = {
                "action": action,
                "side": side.loader,
                "checkpoint": side.hub_name or str(side.folder),
                "size": self.size,
                "store": f"{scratch}/store" if self.rank is None else "",
                "device": self.device,
                "reference": str(reference),
                "target": str(target or ""),
                "stream": side.stream,
            }
            threads = max(1, len(os.sched_getaffinity(0)) // len(ranks))
            common = {"OMP_NUM_THREADS": str(threads), "WORLD_SIZE": str(self.size), "LOCAL_RANK": "0"}
            if self.device == "cpu":
                common["CUDA_VISIBLE_DEVICES"] = ""
            if self.endpoint:  # a cache of its own, so that every load downloads
                common |= {"HF_ENDPOINT": self.endpoint, "HF_HOME": f"{scratch}/home", "HF_HUB_DISABLE_XET": "1"}
            else:
                common["HF_HUB_OFFLINE"] = "1"
            return processes.run(
                "benchmarks.worker",
                [{**job, "rank": rank} for rank in ranks],
                env=[{**common, "RANK": str(rank)} for rank in ranks],
                timeout=self.timeout,
            )


@contextmanager
def compared(arguments: argparse.Namespace, model: str, folder: Path) -> Iterator[tuple[Setting, dict[str, Side]]]:
    """The two sides, the second being what is advertised; and what they need while they run."""
    setting = Setting(arguments.ranks, arguments.rank, arguments.device, arguments.timeout, arguments.folder)
    native = Side("transformers", "native", folder)
    ours = Side("tp_transformers", "ours", folder)
    if arguments.presharded:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
            target = Path(scratch) / "presharded"
            setting.run("save", ours, folder, target)
            yield setting, {"plain": ours, "presharded": Side("tp_transformers, presharded", "ours", target)}
    elif arguments.hub:
        with _hub(folder) as endpoint:
            sides = {
                "native": replace(native, label="transformers, downloads first", hub_name=f"bench/{model}"),
                "ours": replace(ours, label="tp_transformers, streams", hub_name=f"bench/{model}", stream=True),
            }
            yield replace(setting, endpoint=endpoint), sides
    else:
        yield setting, {"native": native, "ours": ours}


@contextmanager
def _hub(folder: Path) -> Iterator[str]:
    """A Hub on this machine that serves `folder` under any name; gives its address."""
    command = [sys.executable, "-m", "tests.hub_server", "--folder", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=processes.ROOT)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()
        if not address or not address[-1].startswith("http"):
            raise processes.ProcessError(f"{shlex.join(command)} did not say its address in its first line: {address}")
        yield address[-1]
    finally:
        processes.end(server)
