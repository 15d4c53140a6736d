"""`tp-transformers verify MODEL --tp-size 2,3`: compare a small random model on N ranks with one process."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..command_line.arguments import add_plan, add_shares, count_ranks, parse_shares

if TYPE_CHECKING:
    from .verify import Verdict

SUMMARY = "prove a plan: a small random model on N ranks of this machine, held against one process"
EXAMPLE = "tp-transformers verify Qwen/Qwen3-8B --tp-size 2,3 --grads"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder, a name on the Hub or a config.json; no weights are read")
    parser.add_argument("--tp-size", metavar="N", help="how many ranks, or several: 2,3 (default: 2)")
    add_shares(parser)
    add_plan(parser)
    parser.add_argument("--grads", action="store_true", help="compare gradients too")
    parser.add_argument("--bits", action="store_true", help="ask for the bits of one process, as with tp_invariant")
    parser.add_argument("--seed", type=int, default=0, help="of the small model's weights (default: 0)")
    parser.add_argument("--allow-replicated", action="store_true", help="as in from_pretrained")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the repository's own")
    parser.add_argument("--json", action="store_true", help="print one JSON object a size")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the ranks of a size (default: 600)")


def run(arguments: argparse.Namespace) -> int:
    """Print a verdict for every size; returns 1 if one is not proven."""
    from transformers.utils import logging

    from .verify import verify

    try:
        sizes = [int(size) for size in (arguments.tp_size or "2").split(",")]
    except ValueError:
        raise UsageError(
            "--tp-size", got=arguments.tp_size, expected="numbers such as 2 or 2,3", fix="Give some."
        ) from None
    if arguments.timeout <= 0:
        raise UsageError("--timeout", got=f"{arguments.timeout:g}", expected="seconds above 0", fix="Leave it out.")
    shares = parse_shares(arguments.shares)
    if shares is not None and arguments.tp_size is not None:
        count_ranks({"--tp-size": max(sizes), "--shares": len(shares)})
    logging.disable_progress_bar()
    verdicts = verify(
        arguments.model,
        plan=arguments.plan,
        sizes=sizes,
        shares=shares,
        grads=arguments.grads,
        bits=arguments.bits,
        timeout=arguments.timeout,
        allow_replicated=arguments.allow_replicated,
        seed=arguments.seed,
        trust_remote_code=arguments.trust_remote_code,
        log=arguments.log,
    )
    for verdict in verdicts:
        print(json.dumps({**dataclasses.asdict(verdict), "ok": verdict.ok}) if arguments.json else summary(verdict))
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def summary(verdict: Verdict) -> str:
    """A line with the numbers, and a line for each fault and note."""
    seen = []
    ranks = f"{verdict.size} rank{'s' * (verdict.size > 1)}"
    if verdict.bits and verdict.ok:
        fields = {"logits": "logits", "loss": "loss", "tokens": "tokens", "gradients": "gradient"}
        names = ", ".join(name for name, field in fields.items() if getattr(verdict, field) is not None)
        return "\n".join(
            [f"{ranks}: the bits of one process in {' and '.join(verdict.bits)} ({names})", *_notes(verdict)]
        )
    if verdict.logits is not None:
        seen.append(f"logits {verdict.logits:.1e}")
    if verdict.loss is not None:
        seen.append(f"loss {verdict.loss:.1e}")
    if verdict.tokens is not None:
        seen.append("same tokens" if verdict.tokens else "other tokens")
    if verdict.gradient is not None:
        name, error = verdict.gradient
        seen.append(f"gradients {error:.1e} ({name})")
    numbers = f" (worst relative errors: {', '.join(seen)})" if seen else ""
    of_bits = f" in {verdict.bits[-1]}" if verdict.bits else ""
    lines = [f"{ranks}: {'proven' if verdict.ok else 'not as one process'}{of_bits}{numbers}"]
    return "\n".join([*lines, *(f"  - {fault}" for fault in verdict.faults), *_notes(verdict)])


def _notes(verdict: Verdict) -> list[str]:
    return [f"  note: {note}" for note in verdict.notes]
