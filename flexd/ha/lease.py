"""Who leads, by rules that need no synchronised clocks.

- A holder believes in its lease until ``duration`` after the moment *before* it sent the last renewal that succeeded,
  by its own clock, less a margin for clocks that run at different rates.
- A stand-by takes the lease of another only after it has *itself* seen the record unchanged for a whole duration. The
  renewal that it saw was sent before it was seen, so the holder has stopped believing by then.
- Every acquisition has a higher term than all before it, a holder's own earlier ones included. Whoever acts for a
  leader is told the term, and refuses a lower one than it has seen: what a process does between its look at the clock
  and the act itself (it may be stopped there for an hour) is then without effect.

The clock counts time in which the machine sleeps. Time in which a hypervisor stops it may be missing from every clock
of a machine; such a leader is found out by its next renewal, and until then by its term.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flexd.core.errors import LeaseError
from flexd.ha.lease_store import MAX_TERM, LeaseRecord, LeaseStore

CLOCK_MARGIN = 0.05
"""Share of the duration by which a holder stops believing early."""


def boot_seconds() -> float:
    """Seconds since the machine was booted, with those in which it slept where the system can tell."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Lease:
    """One process's view of the lease. ``attempt`` and ``release`` belong to one thread; the rest is thread-safe and
    does no input or output.

    Args:
        identity: of this process, different from that of every other one that ever asks, a restart included.
        highest_known_term: called before an acquisition; the new term is higher than what it returns. For what
            remembers
            terms longer than the store does (a deleted Kubernetes object starts again from nothing).
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: LeaseStore,
        identity: str,
        duration_seconds: float,
        highest_known_term: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = boot_seconds,
    ) -> None:
        self.identity = identity
        self.duration_seconds = duration_seconds
        self._store = store
        self._lowest_term = highest_known_term
        self._clock = clock
        self._mine: LeaseRecord | None = None
        self._standing: tuple[int, float] | None = None
        self._last_record: LeaseRecord | None = None
        self._unchanged_since = 0.0

    @property
    def location(self) -> str:
        """For people: which file or object."""
        return self._store.location

    @property
    def term(self) -> int:
        """Of the lease that this process holds; 0 if it holds none."""
        standing = self._standing
        return standing[0] if standing is not None and self._clock() < standing[1] else 0

    def holds(self, term: int) -> bool:
        """Whether this process may act as the leader of this term, now."""
        return term > 0 and self.term == term

    @property
    def last_record(self) -> LeaseRecord | None:
        """The record as it was last read or written here."""
        return self._last_record

    def acquire_or_renew(self) -> bool:
        """Renews the lease if it is held, or else takes it if that is allowed. Returns whether it is held now.

        Raises:
            LeaseError: the store cannot be reached. A lease that is held stays so until its time is up.
        """
        if self._mine is not None and self.term:
            return self._renew(self._mine)
        self._drop()
        return self._acquire()

    def release(self) -> None:
        """Gives the lease back, so that nobody has to wait for its end; without effect if it is not held.

        Raises:
            LeaseError: the store cannot be reached; the lease ends by itself.
        """
        mine, term = self._mine, self.term
        self._drop()
        if mine is not None and term:
            self._store.compare_and_set(mine, "", term, self.duration_seconds)

    def _renew(self, mine: LeaseRecord) -> bool:
        if self._write(mine, mine.term):
            return True
        # A renewal whose answer was lost may have been written: then the record is still this term's.
        record = self._read()
        still_mine = record is not None and (record.holder, record.term) == (self.identity, mine.term)
        if still_mine and self.term == mine.term:
            return self._write(record, mine.term)
        self._drop()
        return False

    def _acquire(self) -> bool:
        record = self._read()
        now = self._clock()
        if record is not None and record.holder not in ("", self.identity):
            patience = max(record.duration_seconds, self.duration_seconds)
            if now - self._unchanged_since < patience:
                return False
        term = max(0 if record is None else record.term, self._lowest_term()) + 1
        if term > MAX_TERM:
            raise LeaseError(
                f"{self.location}: no term is left after {MAX_TERM}", remedy="start with a lease of a new name"
            )
        return self._write(record, term)

    def _write(self, seen: LeaseRecord | None, term: int) -> bool:
        sent = self._clock()
        written = self._store.compare_and_set(seen, self.identity, term, self.duration_seconds)
        if written is None:
            return False
        self._mine = self._last_record = written
        self._standing = (term, sent + self.duration_seconds * (1 - CLOCK_MARGIN))
        return self.term == term

    def _read(self) -> LeaseRecord | None:
        record = self._store.read()
        if record != self._last_record:
            # After the read: the record was there before this moment, so its last renewal was sent before it.
            self._last_record, self._unchanged_since = record, self._clock()
        return record

    def _drop(self) -> None:
        self._mine = self._standing = None
