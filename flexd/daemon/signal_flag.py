"""What a signal handler may set."""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue


class SignalFlag:
    """A flag that one thread waits for and any code may set, signal handlers of that thread too.

    ``threading.Event`` is no such flag: a handler runs between two instructions of the main thread, and where these
    are inside ``Event.wait``, which holds the event's lock, ``Event.set`` waits for that lock for ever.
    ``SimpleQueue.put`` can be interrupted by itself (Python reference, "queue").
    """

    def __init__(self) -> None:
        self._asked = False
        self._news: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        self._asked = True
        self._news.put(None)

    def clear(self) -> None:
        self._asked = False
        # What is set meanwhile is seen by its flag.
        with contextlib.suppress(Empty):
            while True:
                self._news.get_nowait()

    def is_set(self) -> bool:
        return self._asked

    def wait(self, timeout_seconds: float) -> bool:
        """Whether it is set, at the latest after the timeout."""
        if not self._asked:
            with contextlib.suppress(Empty):
                self._news.get(timeout=timeout_seconds)
        return self._asked
