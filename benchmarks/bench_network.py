"""Two ranks on two machines, by the network between them: `python -m benchmarks.bench_network`.

The machines are network namespaces of this one (`tests/support/machines.py`: root, Linux and iproute2), with a cable of
a given rate and delay between them; each rank has one thread. Decode and training steps are timed by
`benchmarks.forward`, with transformers' own tensor parallelism beside this package in the same processes. Round trips,
and sums of a token and of a prompt, are timed alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.machines import Bed, obstacle, wait

from . import forward, machine, network
from .bench_forward import RESULTS, summary
from .processes import ProcessError
from .report import save, shown_machine, shown_spread


@dataclass(frozen=True)
class Network:
    """A network between two machines; none for both ranks on one machine."""

    title: str
    machines: int = 2
    rate: str = ""
    delay: float = 0.0
    """Seconds by which each packet is held back. The program that does so adds some 20 us."""


NETWORKS = {
    "none": Network("one machine", 1),
    "10gbit": Network("10 Gbit/s, 0.05 ms", rate="10gbit", delay=1e-9),
    "1gbit": Network("1 Gbit/s, 0.2 ms", rate="1gbit", delay=6e-5),
}
SCENARIOS = ("decode", "training step")
SHOWN = {"round trip": 2, "token": 2, "prompt": 0}
"""Time without a model -> digits of its milliseconds."""


def main() -> int:
    """Run the benchmark; returns 1 if a process fails or takes too long."""
    arguments = parse()
    if why := obstacle():
        print(f"bench_network: {why}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the started processes
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.bench_network", *sys.argv[1:]]),
        "machine": machine.facts(),
        "widths": arguments.widths,
        "rounds": arguments.rounds,
        "networks": {},
    }
    try:
        for name in arguments.networks:
            result["networks"][name] = found = measure(NETWORKS[name], arguments)
            print(name, json.dumps(found), flush=True)
    except (ProcessError, OSError) as error:
        print(f"bench_network: {error}", file=sys.stderr)
        return 1
    path, text = arguments.results / "network-cpu", table(result)
    save(path, result, text)
    print(f"\n{text}\n{path}.json, .md")
    return 0


def measure(between: Network, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the sums and of the scenarios, with `between` as network."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with Bed(folder, between.machines, rate=between.rate, delay=between.delay) as bed:
            alone = run(bed, "benchmarks.network", network.Job(f"{folder}/alone", 2, 0), arguments.timeout)
            job = forward.Job(
                model="llama",
                folder=scratch,
                size=2,
                rank=0,
                device="cpu",
                store=f"{folder}/store",
                rounds=arguments.rounds,
                scenarios=list(SCENARIOS),
                compiled=False,
                widths=arguments.widths,
                cores=1,
            )
            ranks = run(bed, "benchmarks.forward", job, arguments.timeout)
    return {"alone": {name: max(rank[name] for rank in alone) for name in alone[0]}, **summary(ranks)}


def run(bed: Bed, module: str, job: Any, timeout: float) -> list[dict[str, Any]]:
    """The results of two ranks, on the first and the last machine of a bed."""
    started = []
    for rank in range(2):
        path = bed.disk.parent / f"{module.rpartition('.')[2]}-{rank}"
        text = json.dumps({**dataclasses.asdict(job), "rank": rank, "result": f"{path}.json"})
        own: Mapping[str, str] = {"RANK": str(rank), "WORLD_SIZE": "2"}
        started.append(bed.machines[-rank].start([sys.executable, "-m", module, text], path.with_suffix(".log"), **own))
    deadline = time.monotonic() + timeout
    for process, log in started:
        ended = wait(process, log, max(0.0, deadline - time.monotonic()))
        if ended.code:
            raise ProcessError(f"{module}: exit code {ended.code}\n{ended.output[-6000:]}")
    return [json.loads(log.with_suffix(".json").read_bytes()) for _, log in started]


def table(result: Mapping[str, Any]) -> str:
    """A Markdown table of all networks; the machine and versions are below it."""
    lines = [
        "| network | round trip | a sum of 8 KB | of 16 MB | scenario | here | transformers by here "
        "| one process by here |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in result["networks"].items():
        alone = [f"{found['alone'][name] * 1e3:.{digits}f} ms" for name, digits in SHOWN.items()]
        for scenario, at in found["scenarios"].items():
            ours = at["seconds"]["ours"]["median"] * 1e3 / (8 if scenario == "decode" else 1)
            ratios = " | ".join(shown_spread(at["ratios"][side]) for side in ("native", "alone"))
            lines.append(f"| {' | '.join([NETWORKS[name].title, *alone, scenario])} | {ours:.1f} ms | {ratios} |")
    widths = ", ".join(f"{name} {number}" for name, number in forward.WIDTHS[result["widths"]].items())
    remarks = [
        "two ranks of one thread, each on a machine of its own, but in the first rows; one process: of one thread, too",
        "ratio: seconds by ours, median (min to max) of rounds; above 1, this is faster. Decode: of one token",
        "round trips and sums are gloo's, alone; the rate is that of `tc tbf`; a program between two TAP devices holds "
        "packets back, so that a bare TCP round trip takes about as long as the first column says",
        f"{result['rounds']} rounds, the sides in turn, the slowest rank; {result['machine']['date']}",
        f"{widths}; fp32",
        shown_machine(result["machine"]),
        f"`{result['command']}`",
    ]
    return "\n".join([*lines, "", *(f"- {line}" for line in remarks)]) + "\n"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_network", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=9, help="how often every side computes (default: 9)")
    parser.add_argument("--widths", choices=forward.WIDTHS, default="small", help="of the model (default: small)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the numbers go")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one network may take")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
