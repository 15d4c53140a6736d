"""The two sides of a comparison, and the start of their processes."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import processes

HUB_NAME = "bench/checkpoint"
"""Name of a checkpoint on a Hub."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    label: str
    loader: str
    """"native" or "ours"."""
    folder: Path
    """Location of the files to read."""
    stream: bool = False
    """True if our load streams from the Hub."""


@dataclass(frozen=True)
class Setting:
    """Settings of all loads of a run."""

    size: int
    """The number of ranks."""
    rank: int | None
    """The only rank that runs, with fake collectives; None if all ranks run."""
    device: str
    timeout: float
    parent: Path
    """Folder for checkpoints and temporary files."""
    hub: Path | None = None
    """Folder that a Hub on this machine serves during a load, if there is one."""
    copies: bool = False
    """True if the processes are copies of this one, and do not import what this one has imported."""

    def run(self, action: str, side: Side, reference: Path, target: Path | None = None) -> list[dict[str, Any]]:
        """Run `action` (see worker.Job) in fresh processes, one per rank; returns their results."""
        env = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {"LOCAL_RANK": "0"}
        with tempfile.TemporaryDirectory(dir=self.parent) as scratch, _hub(self.hub) as (endpoint, sent):
            # A fresh cache, so that every load downloads.
            hub = {"HF_ENDPOINT": endpoint, "HF_HOME": f"{scratch}/home", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
            env |= {"HF_HUB_OFFLINE": "0", **hub} if endpoint else {"HF_HUB_OFFLINE": "1"}
            job = {
                "action": action,
                "side": side.loader,
                "checkpoint": HUB_NAME if endpoint else str(side.folder),
                "size": self.size,
                "store": f"{scratch}/store" if self.rank is None else "",
                "device": self.device,
                "reference": str(reference),
                "target": str(target or ""),
                "stream": side.stream,
            }
            results = processes.run_ranks(
                "benchmarks.worker:on_rank",
                job,
                ranks=None if self.rank is None else [self.rank],
                env=env,
                timeout=self.timeout,
                copy=self.copies,
            )
            results[0]["sent"] = sent()
        return results


@contextmanager
def compared(arguments: argparse.Namespace, model: str, folder: Path) -> Iterator[tuple[Setting, dict[str, Side]]]:
    """The two sides, the second being the one under test, and the resources that they need while running."""
    setting = Setting(arguments.ranks, arguments.rank, arguments.device, arguments.timeout, arguments.folder)
    native = Side("transformers", "native", folder)
    ours = Side("tp_transformers", "ours", folder)
    if arguments.presharded:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
            target = Path(scratch) / "presharded"
            setting.run("save", ours, folder, target)
            presharded = replace(ours, label=f"{ours.label}, presharded", folder=target)
            yield setting, {"native": native, "presharded": presharded}
    elif arguments.hub:
        sides = {
            "native": replace(native, label="transformers, downloads first"),
            "ours": replace(ours, label="tp_transformers, streams", stream=True),
        }
        yield replace(setting, hub=folder), sides
    else:
        yield setting, {"native": native, "ours": ours}


@contextmanager
def _hub(folder: Path | None) -> Iterator[tuple[str, Callable[[], int]]]:
    """Start a Hub on this machine that serves `folder`; returns its address, and a function that ends it and counts the
    bytes of weights sent.

    Without a folder there is no Hub, and no address.
    """
    if folder is None:
        yield "", lambda: 0
        return
    command = [sys.executable, "-m", "tests.support.hub_server", "--folder", str(folder)]
    command += ["--repository", HUB_NAME]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=processes.ROOT) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            if not address.startswith("http"):
                raise processes.ProcessError(f"{shlex.join(command)}: its first line is no address, but {address!r}")
            yield address, lambda: int(json.loads(server.communicate(timeout=30)[0])["weight_bytes"])
        finally:
            server.kill()
