"""A flag that a signal handler may set."""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue


class SignalFlag:
    """A flag that one thread waits for and any code may set, including signal handlers of that thread.

    ``threading.Event`` does not allow that: a handler runs between two instructions of the main thread. If these are
    inside ``Event.wait``, which holds the event's lock, ``Event.set`` in the handler blocks for ever.
    ``SimpleQueue.put`` is reentrant (Python reference, "queue").
    """

    def __init__(self) -> None:
        self._set = False
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        self._set = True
        self._wakeups.put(None)

    def clear(self) -> None:
        self._set = False
        # A concurrent ``set`` leaves ``_set`` true, so its lost wake-up does no harm.
        with contextlib.suppress(Empty):
            while True:
                self._wakeups.get_nowait()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the flag is set or the timeout has passed. Returns whether it is set."""
        if not self._set:
            with contextlib.suppress(Empty):
                self._wakeups.get(timeout=timeout_seconds)
        return self._set
