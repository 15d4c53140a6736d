"""Measurements with tables in `results`: `python -m benchmarks NAME`, a name of NAMES."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from . import machine
from .processes import ProcessError
from .report import save

NAMES = ("load", "forward", "collectives", "quantised", "speeds")
"""Each is a module `bench_NAME` with `parse` (its options), `measure`, `table`, and `file`, the name of a table other
than NAME-cpu."""
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the measurement named first; returns 1 if a process fails or takes too long, or a result is wrong."""
    if sys.argv[1:2] and sys.argv[1] in NAMES:
        name = sys.argv[1]
    else:
        parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
        parser.add_argument("name", choices=NAMES, help="`python -m benchmarks NAME --help` prints the options")
        parser.parse_args()
    benchmark: Any = import_module(f"{__package__}.bench_{name}")
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=benchmark.__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the table goes")
    arguments = benchmark.parse(parser, sys.argv[2:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the started processes
    result = {"command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]), "machine": machine.facts()}
    try:
        benchmark.measure(arguments, result)
    except (ProcessError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    file = benchmark.file(arguments) if hasattr(benchmark, "file") else f"{name}-cpu"
    text, path = benchmark.table(result), arguments.results / file
    save(path, result, text)
    print(f"\n{text}\n{path}.json, .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
