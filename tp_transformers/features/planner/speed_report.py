"""Report of speeds, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .devices import are_alike
from .speed import Speed, Times
from .tables import columns

NOT_COUNTED = "other programs, links between machines, and eager forwards on a GPU, which wait for the host"


def speed_lines(speeds: Sequence[Speed], *, width: int) -> Iterator[str]:
    """Lines of a table with a row for each number of ranks, and of the fastest."""
    if not speeds:
        return
    last = speeds[-1]
    yield f"speed of {last.planned.batch} x {last.prompt} tokens: tokens a second, and what bounds them"
    yield from columns([("", "decode", "prompt", "fits"), *map(_row, speeds)], right=True, width=width)
    fitting = [speed for speed in speeds if speed.fits]
    if fitting:
        best = max(fitting, key=lambda speed: speed.decoded)
        shares = best.planned.survey.plan.numbers
        given = f" with tp_shares={list(shares)}" if shares else ""
        yield f"decode is fastest on {_counted(best)}{given}, bound by {best.decode.bound}"
    yield f"not counted: {NOT_COUNTED}"


def _row(speed: Speed) -> tuple[str, ...]:
    names = [device.name for device in speed.devices]
    on = names[:1] if are_alike(speed.devices) else names
    cells = (f"{speed.decoded:.1f} ({speed.decode.bound})", f"{speed.prefilled:.0f} ({speed.prefill.bound})")
    return (f"{_counted(speed)}: {', '.join(on)}", *cells, "yes" if speed.fits else "no")


def _counted(speed: Speed) -> str:
    return f"{speed.planned.size} rank{'s' * (speed.planned.size > 1)}"


def speeds_as_json(speeds: Sequence[Speed]) -> list[dict[str, Any]]:
    return [
        {
            "ranks": speed.planned.size,
            "devices": [device.name for device in speed.devices],
            "shares": speed.planned.survey.plan.shares,
            "fits": speed.fits,
            "decode": {"tokens_per_second": speed.decoded, **_seconds(speed.decode)},
            "prefill": {"tokens_per_second": speed.prefilled, **_seconds(speed.prefill)},
        }
        for speed in speeds
    ]


def _seconds(times: Times) -> dict[str, Any]:
    parts = {f"{name}_seconds": seconds for name, seconds in times._asdict().items()}
    return {"bound": times.bound, **parts}
