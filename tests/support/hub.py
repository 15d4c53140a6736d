"""Loads from the Hub of `hub_server`, compared with loads from a folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import AutoModelForCausalLM

from tests.support.comparisons import different_tensors, full_parameters
from tests.support.models import bytes_read, load
from tests.support.pool import Pool

SMALL = {"DIRECT_BYTES": 4 << 10, "RANGE_BYTES": 16 << 10, "BLOCK_BYTES": 8 << 10}
"""Sizes by which tiny models take every path: several rounds, ranges of one's own, pieces."""


def weight_bytes(folder: str | Path) -> int:
    """Bytes of all safetensors files of a folder, with their headers."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


def stored_weights(cache: str | Path) -> list[str]:
    """Files of a cache that are larger than config and index."""
    return [str(path) for path in Path(cache).rglob("*") if path.is_file() and path.stat().st_size > 20_000]


def stream(
    name: str,
    folder: str | None,
    cache: str,
    *,
    sizes: dict[str, int] | None = None,
    tries: int = 6,
    **arguments: Any,
) -> dict[str, Any]:
    """Load `name`, and compare it with what is loaded from `folder`."""
    from tp_transformers.features.hub_streaming import fetch_plan
    from tp_transformers.features.hub_streaming import tries as http

    with ExitStack() as changed:
        for constant, value in (SMALL if sizes is None else sizes).items():
            changed.enter_context(mock.patch.object(fetch_plan, constant, value))
        changed.enter_context(mock.patch.object(http, "FIRST_WAIT", 0.01))
        changed.enter_context(mock.patch.object(http, "TRIES", tries))
        model = load(name, **{"tp_stream": True, "cache_dir": cache, **arguments})
    if folder is not None:
        dtype = arguments.get("dtype", "auto")
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        different = different_tensors(full_parameters(model), dict(reference.named_parameters()))
    else:
        different = []
    return {"different": different, "read": bytes_read(model), "dtype": model.dtype}


def run(pool: Pool, size: int, *args: Any, **arguments: Any) -> list[dict[str, Any]]:
    """The results of `stream` on `size` ranks, whose parameters have to be those of the folder."""
    results = pool.run(size, stream_on_rank, args, arguments, timeout=90)
    assert [result["different"] for result in results] == [[]] * size, arguments
    return results


def stream_on_rank(args: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    return stream(*args, **arguments)


def fail(pool: Pool, size: int, *args: Any, **arguments: Any) -> str:
    """The error of `stream` that all ranks raise."""
    return pool.error(size, stream_on_rank, args, arguments, timeout=90)
