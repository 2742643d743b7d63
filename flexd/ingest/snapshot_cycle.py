"""Save counters and stream positions together: when, in which order, and what became of it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from flexd.core.errors import SnapshotError
from flexd.core.fault_points import fault_point
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.stream.types import Positions, Source

_log = logging.getLogger(__name__)


class SnapshotCycle:
    """Belongs to the ingest thread; ``request`` and ``set_interval`` may be called by any.

    Args:
        snapshots: where state is saved; None saves nothing.
        interval_seconds: between the end of the start-up, or of ``begin``, and the next snapshot.
        extra_state: see ``Ingestor``.
        background: snapshots are written while ingest continues.
    """

    def __init__(
        self,
        snapshots: SnapshotStore | None,
        interval_seconds: float,
        extra_state: Callable[[], Mapping[str, Any]],
        *,
        background: bool,
    ) -> None:
        self._snapshots = snapshots
        self._interval_seconds = interval_seconds
        self._extra_state = extra_state
        self._requested = threading.Event()
        self._next = math.inf
        self._background = background
        self._writing: Future[None] | None = None
        self._positions: Positions = {}
        self.saved = 0
        """Snapshots on disk since the start."""
        self.commit_failures = 0
        self.saved_at = math.nan
        """Monotonic seconds of the newest snapshot."""
        self.pause_seconds = math.nan
        """For which the newest copy of the counters stopped ingest."""

    def set_interval(self, seconds: float) -> None:
        """Change the time between two snapshots, effective after the next one."""
        self._interval_seconds = seconds

    def request(self) -> None:
        """Make the next snapshot due now."""
        self._requested.set()

    def start(self) -> None:
        """Count the interval from now."""
        self._next = min(self._next, time.monotonic() + self._interval_seconds)

    def restart(self) -> None:
        """Count the interval from now, after a snapshot was begun or could not be."""
        self._next = time.monotonic() + self._interval_seconds

    def is_due(self) -> bool:
        """Return whether a snapshot is to be begun now. One that was requested is due once."""
        if self.pending:
            return False
        requested = self._requested.is_set()
        self._requested.clear()
        return requested or time.monotonic() >= self._next

    @property
    def pending(self) -> bool:
        """True from ``begin`` to ``finish``."""
        return self._writing is not None

    @property
    def written(self) -> bool:
        """True if ``finish`` would not wait."""
        return self._writing is not None and self._writing.done()

    def begin(self, source: Source, sketches: SketchSet, generation: Callable[[], int]) -> None:
        """Make counters and positions durable. The order of the steps makes every access count once.

        1. Between two polls, when every message that the source has returned is counted, copy sketches, positions and
           profile generation while nothing else can change them. They go into one file: if they were saved apart, a
           crash between the two would count the messages in between twice or never.
        2. Write the snapshot and wait until it is on disk. Ingest continues meanwhile.
        3. Only then commit to the source (``finish``): the positions of step 1, not those reached since. The
           commit serves the broker's displays; a restart reads the snapshot's positions, so a crash between 2 and 3
           loses nothing.

        Raises:
            SnapshotError: the counters are damaged.
        """
        snapshots = self._snapshots
        if snapshots is None:
            return
        fault_point("snapshot.begin")
        extra = dict(self._extra_state())
        # 1.
        began = time.monotonic()
        with sketches.lock:
            if sketches.damage is not None:
                raise SnapshotError("the counters are damaged and not saved", remedy="start the daemon again")
            sketch_meta, arrays = sketches.state()
            positions = source.positions()
            meta = {
                "sketches": sketch_meta,
                "positions": positions,
                "generation": generation(),
                "saved": extra,
            }
        self.pause_seconds = time.monotonic() - began
        self._positions = positions
        fault_point("snapshot.copied")

        # 2.
        writing: Future[None] = Future()

        def write() -> None:
            try:
                snapshots.save(meta, arrays)
            except BaseException as error:
                writing.set_exception(error)
            else:
                writing.set_result(None)

        self._writing = writing
        if self._background:
            threading.Thread(target=write, name="flexd-snapshot", daemon=True).start()
        else:
            write()

    def finish(self, source: Source) -> None:
        """Run step 3 of ``begin``.

        Raises:
            SnapshotError: step 2 failed; the previous snapshot and its positions stay valid together.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
        self.saved += 1
        self.saved_at = time.monotonic()
        # 3.
        failure = source.commit(self._positions)
        fault_point("snapshot.committed")
        if failure is not None:
            self.commit_failures += 1
            _log.warning("ingest: commit: %s", failure)
