"""A sketch set that one thread writes and any thread may read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout
from flexd.sketch.budget import TableChoice
from flexd.sketch.coaccess import CoAccess
from flexd.sketch.profile import Profile, TableProfile
from flexd.sketch.sketch_set import SketchSet


class GuardedSketches:
    """A ``SketchSet`` behind a lock.

    Attributes:
        sketches: the set. Hold ``lock`` to change or read it.
        lock: held by the writer for one message at a time, and by readers.
        damage: what interrupted a message, so that the counters hold an unknown part of it and must not be
            saved; None while they can be trusted.
    """

    def __init__(self, sketches: SketchSet) -> None:
        self.sketches = sketches
        self.lock = threading.Lock()
        self.damage: BaseException | None = None

    @property
    def newest_event_seconds(self) -> float:
        """NaN before the first access."""
        return self.sketches.newest_event_seconds

    def choices(self) -> tuple[TableChoice, ...]:
        """Return ``SketchSet.choices``."""
        return self.sketches.choices()

    def profile(
        self,
        accesses_per_step: Mapping[str, float] | float | None,
        generation: int,
        lag_messages: int,
        layout: RankLayout | None,
        idle_seconds: float,
    ) -> Profile:
        """Return ``SketchSet.profile`` as of ``idle_seconds`` after the newest event.

        The writer waits only while one table's counters are copied.
        """
        with self.lock:
            view = self._as_of(idle_seconds)
        return view.profile(accesses_per_step, generation, lag_messages, self.lock, layout)

    def table_profile(self, table: str, layout: RankLayout | None, idle_seconds: float) -> TableProfile:
        """Return ``SketchSet.table_profile`` as of ``idle_seconds`` after the newest event."""
        with self.lock:
            view = self._as_of(idle_seconds)
        return view.table_profile(table, self.lock, layout)

    def coaccess(self) -> CoAccess | None:
        """Return ``SketchSet.coaccess``; the writer waits only while the sample is copied."""
        with self.lock:
            sketches = self.sketches
            sample = sketches.coaccess_sample
            copied = None if sample is None else sample.copy()
        return None if copied is None else copied.read(sketches.table_names)

    def samples_by_table(self) -> tuple[int, ...]:
        """Return the accesses counted of each table, undecayed, in the order of the tables."""
        return self.sketches.samples_by_table()

    def query(self, table: str, rows: npt.NDArray[np.int64], idle_seconds: float) -> npt.NDArray[np.float64]:
        """Return ``SketchSet.query`` as of ``idle_seconds`` after the newest event."""
        with self.lock:
            return self._as_of(idle_seconds).query(table, rows)

    def sequence_length_quantiles(self, table: str, ranks: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return ``SketchSet.sequence_length_quantiles``."""
        with self.lock:
            return self.sketches.sequence_length_quantiles(table, ranks)

    def limit_clock(self, now_seconds: float) -> None:
        """Apply ``SketchSet.limit_clock``."""
        with self.lock:
            self.sketches.limit_clock(now_seconds)

    def set_backlog(self, backlog: bool) -> None:
        """Apply ``SketchSet.set_backlog``."""
        with self.lock:
            self.sketches.set_backlog(backlog)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]]:
        """Hold the lock and yield a copy of the state (description, arrays).

        No message may be in the middle of being counted. Readers wait until the context ends.
        """
        with self.lock:
            yield self.sketches.state()

    def _as_of(self, idle_seconds: float) -> SketchSet:
        return self.sketches.as_of(self.sketches.newest_event_seconds + idle_seconds)
