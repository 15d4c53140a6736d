"""Requests that have come and are not answered, which outlive the batches that compute them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.continuous_api import OutputRouter, RequestStatus


class _Told(queue.Queue):  # type: ignore[type-arg]
    """A queue that tells of what is put into it."""

    def __init__(self, tell: Callable[[Any], object]) -> None:
        super().__init__()
        self._tell = tell

    def _put(self, item: Any) -> None:
        self._tell(item)
        super()._put(item)


class _Router(OutputRouter):
    """Passes outputs to the handlers of their requests, and tells of those that are finished."""

    def __init__(self, finished: Callable[[str], object]) -> None:
        super().__init__()
        self._finished = finished

    def deliver(self, output: Any) -> None:
        self._note(output)
        super().deliver(output)

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self._note(output)
        super().deliver_batch(outputs)

    def fail(self, state: Any, error: Exception) -> None:
        state.status, state.error = RequestStatus.FAILED, str(error)
        super().deliver(state.to_generation_output())
        self._finished(state.request_id)

    def _note(self, output: Any) -> None:
        if output.is_finished():
            self._finished(output.request_id)


class Running:
    """The requests of a server, in the order in which they came."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self._lock = threading.RLock()
        self.input_queue, self.cancel_queue = _Told(self._add), _Told(self._remove)
        self.output_router = _Router(self._remove)

    def give(self, manager: Any) -> None:
        """Let a manager of batches, which has not started, take these requests."""
        manager.input_queue, manager.cancel_queue = self.input_queue, self.cancel_queue
        manager.output_router = self.output_router

    def keep(self, scheduler: Any) -> None:
        """Take the tokens so far from the scheduler of batches that have ended."""
        with self._lock:
            for states in (scheduler.waiting_requests, scheduler.active_requests):
                self._states.update((name, states[name]) for name in self._states.keys() & states.keys())

    def again(self, room: int) -> int:
        """Queue the requests again, each with the prompt and the tokens so far as prompt; returns how many there are.

        A request that may become longer than `room`, in tokens, fails.
        """
        with self.input_queue.mutex, self._lock:
            self.input_queue.queue.clear()
            self._states = {name: state.create_equivalent_initial_request() for name, state in self._states.items()}
            lengths = {name: len(each.initial_tokens) + each.max_new_tokens for name, each in self._states.items()}
            for name in [name for name, length in lengths.items() if length > room]:
                error = RuntimeError(f"{lengths[name]} tokens do not fit the cache of the ranks that are left ({room})")
                self.output_router.fail(self._states[name], error)
            self.input_queue.queue.extend(self._states.values())
            return len(self._states)

    def fail(self, error: Exception) -> None:
        """Answer all requests with an error."""
        with self._lock:
            for state in [*self._states.values()]:
                self.output_router.fail(state, error)

    def _add(self, state: Any) -> None:
        with self._lock:
            self._states[state.request_id] = state

    def _remove(self, name: str) -> None:
        with self._lock:
            self._states.pop(name, None)
