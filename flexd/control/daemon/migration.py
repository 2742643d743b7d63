"""One migration: the execution of a plan's delta. Its states are those of ``migration_record``."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.control.daemon.migration_record import (
    FINAL_STATES,
    MigrationRecord,
    MigrationState,
    Transition,
    TransitionEvent,
    next_state,
)
from flexd.core.placement import Delta, Placement

KEPT_TRANSITIONS = 256
"""Transitions of one migration that are kept: epochs that end every few seconds make any number."""
RATE_SECONDS = 30.0
"""Length of the window over which a migration's rate is measured."""
_RATE_SPACING_SECONDS = 0.25


@dataclass(frozen=True)
class MigrationEvent:
    """A transition of a migration, or the completion of its figures.

    Attributes:
        transition: None means that every chunk of an ended migration is applied or void: its figures are final.
    """

    migration: Migration
    transition: Transition | None


class Migration:
    """Handle of one ``Coordinator.migrate``. Thread-safe; the coordinator alone changes it.

    Args:
        record: who requested it and why.
        target, delta, gains: see ``Coordinator.migrate``.
        clock: monotonic seconds.

    Attributes:
        record: it at this moment.
        target: the placement that it leads to.
        delta: the changes to it, in the order to push them. Until it starts, those from the placement of
            ``target.version``, if they are known.
        copied: int64[len(delta) + 1], bytes that the first rows of ``delta`` copy.
        base: the placement it started from; None before it started.
        abort_reason: the reason given to ``abort``; empty before.
    """

    def __init__(
        self,
        record: MigrationRecord,
        target: Placement,
        delta: Delta | None = None,
        gains: npt.NDArray[np.float64] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.target = target
        self.delta = delta
        self.gains = gains
        self.copied = np.zeros(1, dtype=np.int64)
        self.base: Placement | None = None
        self._changed = threading.Condition()
        self.abort_reason = ""
        self._observer: Callable[[MigrationEvent], None] | None = None
        self._rate: deque[tuple[float, int]] = deque()
        now = time.time()
        self.record = record.model_copy(update={"created_unix_seconds": now})
        self._record_transition(None, None, record.reason, now)

    @property
    def migration_id(self) -> str:
        return self.record.migration_id

    @property
    def state(self) -> MigrationState:
        return self.record.state

    @property
    def done(self) -> bool:
        return self.state in FINAL_STATES

    def wait(self, timeout_seconds: float) -> MigrationState:
        """Wait until the state is final or the deadline passes, and return it."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self.done and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self.state

    def abort(self, reason: str = "aborted") -> None:
        """Stop at the next chunk; chunks pushed already are applied. One that has not started does not start any more.
        No effect once it has ended."""
        with self._changed:
            self.abort_reason = self.abort_reason or reason or "aborted"

    def observe(self, observer: Callable[[MigrationEvent], None]) -> None:
        """Call ``observer`` with every transition, earlier ones included. Coordinator only.

        It is called with the migration's lock held, so it must only record.
        """
        with self._changed:
            for transition in self.record.transitions:
                observer(MigrationEvent(self, transition))
            self._observer = observer

    def fire(self, event: TransitionEvent, reason: str = "") -> None:
        """Make a transition. Coordinator only. Raises IllegalTransitionError if the state table does not have it."""
        with self._changed:
            before = self.state
            after = next_state(before, event, f"migration {self.migration_id}")
            now = time.time()
            stamps: dict[str, Any] = {}
            if event is TransitionEvent.START:
                stamps["started_unix_seconds"] = now
                self._rate.append((self._clock(), 0))
            if after in FINAL_STATES:
                stamps["ended_unix_seconds"] = now
                self.delta = self.gains = None
            self._update(state=after, problem=reason or self.record.problem, **stamps)
            self._record_transition(event, before, reason, now)
            self._changed.notify_all()

    def start_from(self, placement: Placement) -> bool:
        """Set the placement that it starts from; False if it was aborted before. Coordinator only."""
        with self._changed:
            if not self.abort_reason:
                self.base = placement
                self._update(base_version=placement.version)
            return not self.abort_reason

    def set_delta(self, delta: Delta, row_bytes: npt.NDArray[np.int64]) -> None:
        """Set the changes from its base to the target. Coordinator only."""
        with self._changed:
            self.delta = delta
            self.copied = np.concatenate([np.zeros(1, np.int64), np.cumsum(row_bytes)])
            self._update(rows=len(delta), bytes_to_copy=int(self.copied[-1]))

    def count(self, **changes: int) -> None:
        """Add to the counters (``last_version`` is set). Coordinator only."""
        with self._changed:
            values = {
                name: value if name == "last_version" else getattr(self.record, name) + value
                for name, value in changes.items()
            }
            self._update(**values)
            if "rows_applied" in values:
                self._measure_rate()
            self._changed.notify_all()

    def settle(self) -> None:
        """Record that no chunk is outstanding after its end. Coordinator only."""
        with self._changed:
            self._update(settled=True)

    def report(self) -> MigrationRecord:
        """Return the record with the time that it still takes, without its transitions."""
        with self._changed:
            return self.record.model_copy(update={"eta_seconds": self._eta_seconds(), "transitions": ()})

    def _update(self, **changes: Any) -> None:
        self.record = self.record.model_copy(update=changes)

    def _record_transition(
        self, event: TransitionEvent | None, before: MigrationState | None, reason: str, now: float
    ) -> None:
        at, before_it = self.record, self.record.transitions
        transition = Transition(
            number=before_it[-1].number + 1 if before_it else 0, unix_seconds=now, event=event, before=before,
            after=at.state, reason=reason, rows_pushed=at.rows_pushed, rows_applied=at.rows_applied,
            version=at.last_version,
        )  # fmt: skip
        kept = (*before_it[:1], *before_it[1:][2 - KEPT_TRANSITIONS :], transition)
        self._update(transitions=kept)
        if self._observer is not None:
            self._observer(MigrationEvent(self, transition))

    def _measure_rate(self) -> None:
        now = self._clock()
        while len(self._rate) > 1 and self._rate[1][0] <= now - RATE_SECONDS:
            self._rate.popleft()
        if len(self._rate) > 1 and now - self._rate[-2][0] < _RATE_SPACING_SECONDS:
            self._rate.pop()
        self._rate.append((now, self.record.rows_applied))

    def _eta_seconds(self) -> float | None:
        """Return the time until all rows are applied, at the rate of the last ``RATE_SECONDS``; None if not known."""
        now = self.record
        if now.state not in (MigrationState.PUSHING, MigrationState.APPLYING) or not now.rows or not self._rate:
            return None
        at, rows = self._rate[0]
        done, seconds = now.rows_applied - rows, self._clock() - at
        if done <= 0 or seconds <= 0:
            return None
        return max(0, now.rows - now.rows_applied) * seconds / done
