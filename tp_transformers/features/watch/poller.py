"""A thread that polls the ranks' store for the watches of all models of the process."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from ...logs import get_logger

logger = get_logger(__name__)

BEAT = 0.5
"""Seconds between two polls."""
SOON = 0.005
"""Seconds between two polls while a thread waits for the result."""

ENDING = 30.0
"""Seconds to wait for the thread at exit: a store request while Python finalizes would abort the process."""


class Polled(Protocol):
    """An object to poll while it is referenced elsewhere."""

    @property
    def is_urgent(self) -> bool:
        """True if a thread waits for the result."""

    def poll(self) -> None:
        """Poll once, without blocking."""


class Poller:
    """Polls every BEAT seconds. The thread starts with the first `add` and ends with the process."""

    def __init__(self) -> None:
        self._polled: list[tuple[weakref.ref[Polled], Callable[[], None]]] = []
        self._lock, self._wake, self._ends = threading.Lock(), threading.Event(), False
        self._thread: threading.Thread | None = None

    def add(self, polled: Polled, on_end: Callable[[], None]) -> None:
        """Poll `polled` until it is garbage-collected or the process ends; then call `on_end`.

        `on_end` must not reference `polled`. If `polled` was added before, it replaces the earlier `on_end`.
        """
        with self._lock:
            self._polled = [entry for entry in self._polled if entry[0]() is not polled]
            self._polled.append((weakref.ref(polled), on_end))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tp_transformers poller", daemon=True)
                self._thread.start()
                atexit.register(self._stop)

    def soon(self) -> None:
        """Poll now."""
        self._wake.set()

    def all(self) -> list[Polled]:
        """The objects that are still alive."""
        with self._lock:
            return [polled for ref, _ in self._polled if (polled := ref()) is not None]

    def _run(self) -> None:
        while not self._ends:
            is_urgent = self._poll()
            self._finish(lambda ref: ref() is None)
            self._wake.wait(SOON if is_urgent else BEAT)
            self._wake.clear()

    def _poll(self) -> bool:
        """Poll all once; returns True if one is urgent. The thread keeps no reference to them while it sleeps."""
        objects = self.all()
        for polled in objects:
            try:
                polled.poll()
            except Exception:  # the thread serves other objects too
                logger.exception("%s cannot be polled", type(polled).__name__)
        return any(polled.is_urgent for polled in objects)

    def _finish(self, is_gone: Callable[[weakref.ref[Polled]], bool]) -> None:
        with self._lock:
            gone = [entry for entry in self._polled if is_gone(entry[0])]
            self._polled = [entry for entry in self._polled if entry not in gone]
        for _, on_end in gone:
            on_end()

    def _stop(self) -> None:
        self._ends = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(ENDING)
        self._finish(lambda ref: True)


POLLER = Poller()
