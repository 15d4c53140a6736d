"""Requests that outlive the batches that compute them, and the memory that ranks need after a loss."""

from types import SimpleNamespace
from typing import Any

import pytest

from tp_transformers import MeshError

requests = pytest.importorskip("transformers.generation.continuous_batching.requests")
running = pytest.importorskip("tp_transformers.features.elastic.running")


def given(*names: str) -> tuple[Any, dict[str, Any]]:
    """Requests of 3 tokens, 4 more asked for, that a manager has taken; and their states by name."""
    all_requests, manager = running.Running(), SimpleNamespace()
    all_requests.give(manager)
    states = {name: requests.RequestState(name, [5, 6, 7], max_new_tokens=4, streaming=True) for name in names}
    for state in states.values():
        manager.input_queue.put(state)
    return all_requests, states


def queued(all_requests: Any) -> list[Any]:
    return [all_requests.input_queue.get_nowait() for _ in range(all_requests.input_queue.qsize())]


def test_requests_are_queued_again_with_their_tokens_so_far() -> None:
    kept, states = given("a", "b", "c")
    taken = queued(kept)  # as a step does that is broken off
    assert taken == [*states.values()]
    states["a"].generated_tokens = [8, 9]
    kept.keep(SimpleNamespace(active_requests={"a": states["a"]}, waiting_requests={"b": states["b"]}))
    assert kept.again(100) == 3
    first, second, third = queued(kept)
    assert (first.request_id, first.initial_tokens, first.max_new_tokens) == ("a", [5, 6, 7, 8, 9], 2)
    assert (second.initial_tokens, third.initial_tokens) == ([5, 6, 7], [5, 6, 7])
    first.generated_tokens = [10]
    output = first.to_generation_output()
    assert (output.prompt_ids, output.generated_tokens) == ([5, 6, 7], [8, 9, 10])
    assert kept.again(100) == 3  # once more, from what was queued last
    assert queued(kept)[0].initial_tokens == [5, 6, 7, 8, 9, 10]


def test_a_request_that_was_reset_goes_on_from_its_new_state() -> None:
    kept, states = given("a")
    states["a"].generated_tokens = [8]
    reset = states["a"].create_equivalent_initial_request()
    reset.generated_tokens = [9]
    kept.keep(SimpleNamespace(active_requests={"a": reset}, waiting_requests={}))
    kept.again(100)
    (state,) = queued(kept)
    assert (state.initial_tokens, state.max_new_tokens) == ([5, 6, 7, 8, 9], 2)


def test_finished_and_cancelled_requests_are_not_queued_again() -> None:
    kept, states = given("a", "b", "c")
    states["a"].status = requests.RequestStatus.FINISHED
    kept.output_router.deliver_batch([states["a"].to_generation_output()])
    kept.cancel_queue.put("b")
    assert kept.again(100) == 1
    assert [state.request_id for state in queued(kept)] == ["c"]


def test_a_request_that_does_not_fit_fails_alone() -> None:
    kept, states = given("a", "b")
    states["b"].max_new_tokens = 1
    assert kept.again(6) == 1
    assert [state.request_id for state in queued(kept)] == ["b"]
    output = kept.output_router.output_queue.get_nowait()
    assert output.request_id == "a"
    assert "7 tokens do not fit" in output.error


@pytest.mark.parametrize(("free", "on_cpu", "fits"), [(20, True, True), (9, True, False), (20, False, False)])
def test_what_does_not_fit_is_refused_before_anything_moves(free, on_cpu, fits) -> None:
    """60 bytes are sharded, 5 replicated: on 2 ranks, each needs 35, and holds 25."""
    member = pytest.importorskip("tp_transformers.features.elastic.member", exc_type=ImportError)
    told = [(60, 5, 25, free)] * 2
    if fits:
        member.check_room(told, None, on_cpu=on_cpu)
        return
    with pytest.raises(MeshError, match="for rank 0 of 2"):
        member.check_room(told, None, on_cpu=on_cpu)


def test_shares_say_what_each_rank_needs() -> None:
    member = pytest.importorskip("tp_transformers.features.elastic.member", exc_type=ImportError)
    with pytest.raises(MeshError, match="for rank 1 of 2"):
        member.check_room([(60, 0, 0, 20), (60, 0, 0, 39)], [1.0, 2.0], on_cpu=True)
