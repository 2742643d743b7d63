"""Leader election by a lease, with rules that need no synchronised clocks.

- For its holder a lease is valid until ``duration`` after the moment *before* it sent the last successful renewal, by
  its own clock, less a margin for clocks that run at different rates.
- A standing that is over stays over. A renewal whose response arrives after that moment does not extend it, although by
  its sending time it would: the holder may have stood down, or stopped an action, in between. It acquires the lease
  again, under a higher term.
- A standby acquires another's lease only after it has *itself* read the record unchanged for a whole duration. The
  renewal that it read was sent before it was read, so the lease is no longer valid for its holder by then.
- Every acquisition has a higher term than all before it, including earlier ones of the same holder. Every action of a
  leader carries the term, and its receiver refuses a term lower than the highest it has received: an action of a
  process that was stopped between reading the clock and acting is then without effect.

The clock counts time in which the machine is suspended. Time in which a hypervisor stops the machine may be missing
from all of its clocks; such a leader is detected by its next renewal, and until then by its term.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from flexd.core.errors import LeaseError
from flexd.ha.lease_store import MAX_TERM, LeaseRecord, LeaseStore

CLOCK_MARGIN = 0.05
"""Share of the duration by which a lease ends early for its holder."""


def boot_seconds() -> float:
    """Return seconds since boot, including suspended time where the system provides it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Lease:
    """One process's view of the lease.

    One thread calls ``acquire_or_renew`` and ``release``; everything else is thread-safe and does no input or output.

    Args:
        identity: identity of this process; unique among all processes, including earlier starts.
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
        self._held: LeaseRecord | None = None
        self._guard = threading.Lock()
        self._standing: tuple[int, float] | None = None
        """Term that this process holds, and the end of its standing by ``clock``. Changed under the guard."""
        self._last_record: LeaseRecord | None = None
        self._unchanged_since = 0.0

    @property
    def location(self) -> str:
        """The file or object, for messages."""
        return self._store.location

    @property
    def term(self) -> int:
        """Term of the lease that this process holds; 0 if it holds none. An end that was seen once is final."""
        with self._guard:
            return self._current_term()

    def holds(self, term: int) -> bool:
        """Return whether this process may act as the leader of this term now."""
        return term > 0 and self.term == term

    @property
    def last_record(self) -> LeaseRecord | None:
        """The record that this process read or wrote last."""
        return self._last_record

    def acquire_or_renew(self) -> bool:
        """Renew the lease if it is held, or else acquire it if the rules allow. Returns whether it is held now.

        Raises:
            LeaseError: the store cannot be reached. A held lease stays valid until its time is up.
        """
        if self._held is not None and self.term:
            return self._renew(self._held)
        self._drop()
        return self._acquire()

    def release(self) -> None:
        """Release the lease, so that no standby has to wait for its end. Without effect if it is not held.

        Raises:
            LeaseError: the store cannot be reached; the lease ends by itself.
        """
        mine, term = self._held, self.term
        self._drop()
        if mine is not None and term:
            self._store.compare_and_set(mine, "", term, self.duration_seconds)

    def _renew(self, mine: LeaseRecord) -> bool:
        if self._write(mine, mine.term):
            return True
        # A renewal whose response was lost may have been written: then the record still has this term.
        record = self._read()
        still_held = record is not None and (record.holder, record.term) == (self.identity, mine.term)
        if still_held and self.term == mine.term:
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
        renews = self._held is not None
        written = self._store.compare_and_set(seen, self.identity, term, self.duration_seconds)
        if written is None:
            return False
        self._held = self._last_record = written
        with self._guard:
            # Checked and extended under one guard: no thread can see the end and then the extension.
            if renews and self._current_term() != term:
                return False
            self._standing = (term, sent + self.duration_seconds * (1 - CLOCK_MARGIN))
            return self._current_term() == term

    def _read(self) -> LeaseRecord | None:
        record = self._store.read()
        if record != self._last_record:
            # Timed after the read: the record's last renewal was sent before this moment.
            self._last_record, self._unchanged_since = record, self._clock()
        return record

    def _current_term(self) -> int:
        """Return the term of the standing, and end the standing if its time is up. Call it under the guard."""
        if self._standing is not None and self._clock() >= self._standing[1]:
            self._standing = None
        return 0 if self._standing is None else self._standing[0]

    def _drop(self) -> None:
        self._held = None
        with self._guard:
            self._standing = None
