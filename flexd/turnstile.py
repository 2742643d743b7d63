"""A fair lock between one busy thread and the occasional reader."""

from __future__ import annotations

import threading
from types import TracebackType


class Turnstile:
    """A lock whose holder cannot take it again past somebody who waits: a busy ingest thread lets readers in."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._turn:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
