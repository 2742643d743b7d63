"""Save counters and stream positions together: when, in which order, and what became of it."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from flexd.core.errors import SnapshotError
from flexd.core.supervision import fault_point
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.stream.types import Positions, Source

_log = logging.getLogger(__name__)


class SnapshotCycle:
    """Belongs to the ingest thread; ``request`` may be called by any.

    Attributes:
        interval_seconds: between two snapshots; a change (by any thread) is effective after the next one.
        background: snapshots are written while ingest continues; False stops ingest until they are on disk.
        saved: snapshots on disk since the start.
        bytes: size of the newest one; 0 before.
        saved_at: monotonic seconds of the newest snapshot, NaN before the first.
        pause_seconds: for which the newest copy of the counters stopped ingest.

    Args:
        store: where state is saved; None saves nothing.
        generation: returns the number of the newest profile.
    """

    background = True

    def __init__(
        self,
        store: SnapshotStore | None,
        interval_seconds: float,
        source: Source,
        sketches: SketchSet,
        generation: Callable[[], int],
    ) -> None:
        self._store = store
        self._source = source
        self._sketches = sketches
        self._generation = generation
        self.interval_seconds = interval_seconds
        self._requested = threading.Event()
        self._next = time.monotonic() + interval_seconds
        self._writing: Future[None] | None = None
        self._positions: Positions = {}
        self.saved = self.commit_failures = self.bytes = 0
        self.saved_at = self.pause_seconds = math.nan

    def request(self) -> None:
        """Make the next snapshot due now."""
        self._requested.set()

    def is_due(self) -> bool:
        """Return whether a snapshot is to be begun now, and then count the interval anew."""
        if self.pending or not (self._requested.is_set() or time.monotonic() >= self._next):
            return False
        self._requested.clear()
        self._next = time.monotonic() + self.interval_seconds
        return True

    @property
    def pending(self) -> bool:
        """True from ``begin`` to ``finish``."""
        return self._writing is not None

    @property
    def written(self) -> bool:
        """True if ``finish`` would not wait."""
        return self._writing is not None and self._writing.done()

    def begin(self) -> None:
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
        store, sketches = self._store, self._sketches
        if store is None:
            return
        fault_point("snapshot.begin")
        # 1.
        began = time.monotonic()
        with sketches.lock:
            if sketches.damage is not None:
                raise SnapshotError("the counters are damaged and not saved", remedy="start the daemon again")
            description, arrays = sketches.state()
            self._positions = self._source.positions()
            meta = {"sketches": description, "positions": self._positions, "generation": self._generation()}
        self.pause_seconds = time.monotonic() - began
        fault_point("snapshot.copied")

        # 2.
        writing: Future[None] = Future()

        def write() -> None:
            try:
                path = store.save(meta, arrays)
                with contextlib.suppress(OSError):
                    self.bytes = path.stat().st_size
            except BaseException as error:
                writing.set_exception(error)
            else:
                writing.set_result(None)

        self._writing = writing
        if self.background:
            threading.Thread(target=write, name="flexd-snapshot", daemon=True).start()
        else:
            write()

    def finish(self) -> None:
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
        failure = self._source.commit(self._positions)
        fault_point("snapshot.committed")
        if failure is not None:
            self.commit_failures += 1
            _log.warning("ingest: commit: %s", failure)
