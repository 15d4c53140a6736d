"""`tp-transformers suggest MODEL OUT.yaml`: infer a plan for an architecture without one, and verify it."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryFile

from ...errors import UsageError
from ..verify.command import summary

SUMMARY = "write a plan for an architecture that has none: inferred from a small model of it, and proven"
EXAMPLE = "tp-transformers suggest Salesforce/codegen-350M-mono codegen.yaml"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder, a name on the Hub or a config.json; no weights are read")
    parser.add_argument("out", type=Path, metavar="OUT.yaml", help="where the plan is written")
    parser.add_argument("--tp-size", type=int, default=2, metavar="N", help="ranks to prove it on (default: 2)")
    parser.add_argument("--no-verify", action="store_true", help="write it unproven")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the repository's own")
    parser.add_argument("--force", action="store_true", help="overwrite OUT.yaml")


def run(arguments: argparse.Namespace) -> int:
    """Write the plan and print a report; returns 1 if it shards nothing, or verification fails."""
    from transformers.utils import logging

    from ...plans.rules import Plan
    from ...plans.yaml_file import available_plans
    from ..command_line.models import own_class, read_config
    from .suggestion import prove, suggest

    out, size = arguments.out, arguments.tp_size
    if size < 2:
        raise UsageError("--tp-size", got=str(size), expected="2 or more", fix="Give a number of ranks.")
    if out.is_dir():
        raise UsageError(str(out), got="a folder", expected="a file", fix="Name the plan: OUT.yaml.")
    if out.exists() and not arguments.force:
        raise UsageError(str(out), got="a file that is there", expected="a new one", fix="Pass --force.")
    _check_writable(out)
    logging.disable_progress_bar()
    where = {"trust_remote_code": arguments.trust_remote_code}
    config = read_config(arguments.model, **where)
    known = available_plans().get(config.model_type)
    if known is not None:
        arguments.log(f"{config.model_type} has a plan already, {known.name}, which auto takes")
    arguments.log(f"looking for what reaches what in a small {config.model_type}")
    suggestion, verdict = suggest(config, size=size, cls=own_class(config, **where)), None
    if not arguments.no_verify:
        suggestion, verdict = prove(suggestion, config, size, log=arguments.log, **where)
    proof = summary(verdict) if verdict is not None else "not verified"
    out.write_text(suggestion.text(proof), encoding="utf-8")
    Plan.from_yaml(out)
    print("\n".join(suggestion.report(size)))
    print(proof)
    print(f"wrote {out}")
    return 0 if suggestion.blocks and (verdict is None or verdict.ok) else 1


def _check_writable(out: Path) -> None:
    """Raise UsageError if the file cannot be written, with the reason of the system; the file does not change."""
    try:
        with out.open("ab") if out.exists() else TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        got = (error.strerror or str(error)).lower()
        fix = "See the path and its permissions, or name another file."
        raise UsageError(str(out), got=got, expected="a file that can be written", fix=fix) from None
