"""Writes snapshots beside ingest: one at a time, in a thread that lives as long as one write."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundJob:
    """At most one running job. Belongs to one thread.

    Args:
        background: False runs jobs inside ``begin``.
    """

    def __init__(self, name: str, *, background: bool) -> None:
        self._name = name
        self._background = background
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._begun = False

    @property
    def begun(self) -> bool:
        """A job runs, or its end has not been asked for."""
        return self._begun

    @property
    def ended(self) -> bool:
        """A job has ended whose end has not been asked for."""
        return self._begun and (self._thread is None or not self._thread.is_alive())

    def begin(self, work: Callable[[], None]) -> None:
        """Starts ``work``; the previous job's end must have been asked for."""
        assert not self._begun, "one job at a time"  # noqa: S101
        self._begun, self._failure, self._thread = True, None, None

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

    def end(self) -> None:
        """Waits for the job and raises what it raised."""
        if self._thread is not None:
            self._thread.join()
        self._begun, failure, self._failure = False, self._failure, None
        if failure is not None:
            raise failure
