"""Tests whose body runs on every rank of the pool."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import pytest
import torch.distributed as dist

Test = Callable[..., None]


def on_ranks(
    size: int = 2, heads: tuple[int, int] = (9, 3), model: str | None = None, **config: Any
) -> Callable[[Test], Test]:
    """Run the body of a test on `size` ranks, with the values of the fixtures that the test names.

    The fixture `folder` is a tiny Llama with `heads` query and KV heads and `config`, or a model of the architecture
    `model`. A parametrization of `size` or `heads` counts instead of these arguments. A rank that raises fails the
    test; after an assertion the error shows the numbers of its frame.
    """

    def decorate(test: Test) -> Test:
        named = inspect.signature(test).parameters

        @wraps(test)
        def run(pool: Any, size: int, **given: Any) -> None:
            given |= {"size": size} if "size" in named else {}
            pool.run(size, _body, test.__module__, test.__qualname__, given)

        parameters = dict.fromkeys(["pool", "size", *named])
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
        options = {"size": size, "heads": heads, "model": model, "config": config}
        vars(run).update(__signature__=signature, on_ranks=options)
        return run

    return decorate


@contextmanager
def refused(kind: type[Exception], *says: str) -> Iterator[None]:
    """Run on every rank: within the block all ranks raise the same error of `kind`, whose text has all of `says`."""
    with pytest.raises(kind) as raised:
        yield
    text = str(raised.value)
    assert all(words in text for words in says), text
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    assert set(everyone) == {text}


def _body(module: str, name: str, given: dict[str, Any]) -> None:
    """Run on every rank: what `on_ranks` has decorated."""
    try:
        getattr(import_module(module), name).__wrapped__(**given)
    except AssertionError as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        values = trace.tb_frame.f_locals.items() if trace is not None else ()
        shown = {key: value for key, value in values if isinstance(value, bool | int | float | str | dict | list)}
        raise AssertionError(f"{error} {str(shown)[:2000]}") from error
