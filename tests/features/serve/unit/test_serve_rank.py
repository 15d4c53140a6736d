"""The end of a rank of `tp-transformers serve`: seconds for its requests, and the error that it raises."""

from types import SimpleNamespace
from typing import Any

import pytest

from tp_transformers import MeshError, RemoteRankError
from tp_transformers.errors import UsageError
from tp_transformers.features.watch.calls import WATCH
from tp_transformers.features.watch.failure import Failure, lost

pytest.importorskip("transformers.generation.continuous_batching.distributed")
rank = pytest.importorskip("tp_transformers.features.serve.rank", exc_type=ImportError)


def ended(error: Exception | None) -> Any:
    """The manager of batches that have ended with an error."""
    return SimpleNamespace(background_thread_status=SimpleNamespace(fatal_error=error))


class Verdict:
    """A watch whose verdict on an error is `failure`; None: the error is this rank's own."""

    def __init__(self, failure: Failure | None) -> None:
        self.failure = failure

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException, trace: Any) -> None:
        if self.failure is not None:
            raise self.failure.to_error() from error


def raised(error: Exception, failure: Failure | None) -> Exception:
    model = SimpleNamespace()
    WATCH.put(model, Verdict(failure))
    with pytest.raises(Exception) as caught:  # noqa: PT011
        rank.raise_error(model, ended(error), 18)
    return caught.value


def test_after_an_error_of_a_batch_no_request_is_waited_for() -> None:
    assert rank.time_left(ended(None), 20) == 20
    assert rank.time_left(ended(RuntimeError()), 20) == 0


def test_a_silent_rank_is_known_by_the_verdict_of_the_watch_and_not_by_a_text() -> None:
    rank.raise_error(SimpleNamespace(), ended(None), 18)
    own = RuntimeError("CUDA error: the launch Timed out and was terminated")
    assert raised(own, None) is own
    of_another = raised(own, Failure(1, "failed with ValueError: 5"))
    assert isinstance(of_another, RemoteRankError)
    silent = raised(RuntimeError("no peer"), lost(1, 3))
    assert isinstance(silent, MeshError)
    assert "got no sign of life of rank 1, expected an answer. It was killed; or paused" in str(silent)


@pytest.mark.parametrize("option", ["--compile", "--device=cpu", "--quantization=bnb-4bit"])
def test_an_option_of_the_server_without_an_effect_is_refused(option) -> None:
    with pytest.raises(UsageError, match=f"{option.partition('=')[0]}: got .*, expected an option with an effect"):
        rank.read_options("model", [option])
    assert rank.read_options("model", ["--port", "8001"]).params["port"] == 8001
