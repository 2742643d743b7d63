"""Runs one job at a time in a background thread, for writing snapshots beside ingest."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundJob:
    """Runs at most one job at a time. All methods must be called from one thread.

    Args:
        background: False runs jobs inside ``start``.
    """

    def __init__(self, name: str, *, background: bool) -> None:
        self._name = name
        self._background = background
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._pending = False

    @property
    def pending(self) -> bool:
        """True from ``start`` until ``join`` returns or raises."""
        return self._pending

    @property
    def finished(self) -> bool:
        """True if a job is pending and ``join`` would not block."""
        return self._pending and (self._thread is None or not self._thread.is_alive())

    def start(self, work: Callable[[], None]) -> None:
        """Start ``work``. The previous job must have been joined."""
        assert not self._pending, "one job at a time"  # noqa: S101
        self._pending, self._failure, self._thread = True, None, None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error

        if self._background:
            self._thread = threading.Thread(target=run, name=self._name, daemon=True)
            self._thread.start()
        else:
            run()

    def join(self) -> None:
        """Wait for the job and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
        self._pending, failure, self._failure = False, self._failure, None
        if failure is not None:
            raise failure
