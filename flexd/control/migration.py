"""One migration: a plan's delta on its way to the ranks, as a checked state machine.

::

    PENDING --start--> PUSHING --exhausted--> APPLYING --applied--> COMMITTED
       |                |   ^                    |
       |                |   `----rolled_back-----'      (an epoch ended: chunks not agreed are pushed again)
       `-- supersede / cancel / fail --> SUPERSEDED / CANCELLED / FAILED   (APPLYING can only fail)

A migration that ends early leaves a prefix of its delta applied, which is a valid placement.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from flexd.errors import ControlError
from flexd.placement import Delta, Placement


class MigrationState(Enum):
    PENDING = "pending"
    PUSHING = "pushing"
    APPLYING = "applying"
    COMMITTED = "committed"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    FAILED = "failed"


class MigrationEvent(Enum):
    START = "start"
    EXHAUSTED = "exhausted"
    ROLLED_BACK = "rolled_back"
    APPLIED = "applied"
    SUPERSEDE = "supersede"
    CANCEL = "cancel"
    FAIL = "fail"


_S, _E = MigrationState, MigrationEvent

TRANSITIONS: dict[tuple[MigrationState, MigrationEvent], MigrationState] = {
    (_S.PENDING, _E.START): _S.PUSHING,
    (_S.PENDING, _E.SUPERSEDE): _S.SUPERSEDED,
    (_S.PENDING, _E.CANCEL): _S.CANCELLED,
    (_S.PENDING, _E.FAIL): _S.FAILED,
    (_S.PUSHING, _E.EXHAUSTED): _S.APPLYING,
    (_S.PUSHING, _E.SUPERSEDE): _S.SUPERSEDED,
    (_S.PUSHING, _E.CANCEL): _S.CANCELLED,
    (_S.PUSHING, _E.FAIL): _S.FAILED,
    (_S.APPLYING, _E.ROLLED_BACK): _S.PUSHING,
    (_S.APPLYING, _E.APPLIED): _S.COMMITTED,
    (_S.APPLYING, _E.FAIL): _S.FAILED,
}

FINAL_STATES = frozenset({_S.COMMITTED, _S.SUPERSEDED, _S.CANCELLED, _S.FAILED})

ChunkSource = Iterable[Delta] | Callable[[Placement], Iterable[Delta]]
"""The chunks, or a function that makes them from the placement at which the migration starts."""


@dataclass(frozen=True)
class MigrationProgress:
    """A migration at one moment.

    Attributes:
        reason: why it ended early; empty otherwise.
        chunks_pushed, chunks_agreed, chunks_applied: sent to the ranks; held by all of them for certain; applied by
            all of them. Chunks taken back because an epoch ended are not counted.
        rows_pushed, bytes_pushed: of these chunks, in rows and in bytes on the control channel (a rank).
        rows_applied: of the applied chunks.
        last_version: the highest placement version that this migration has pushed; 0 before.
    """

    plan_id: str
    state: MigrationState
    reason: str = ""
    chunks_pushed: int = 0
    chunks_agreed: int = 0
    chunks_applied: int = 0
    rows_pushed: int = 0
    bytes_pushed: int = 0
    rows_applied: int = 0
    last_version: int = 0


class Migration:
    """Handle of one ``Coordinator.migrate``. Thread-safe; the coordinator alone changes it."""

    def __init__(
        self,
        plan_id: str,
        source: ChunkSource,
        generation: int | None = None,
        on_progress: Callable[[Migration], None] | None = None,
    ) -> None:
        self.plan_id = plan_id
        self.generation = generation
        self._source: ChunkSource | None = source
        self._on_progress = on_progress
        self._chunks: Iterator[Delta] = iter(())
        self._changed = threading.Condition()
        self._cancel_reason = ""
        self._now = MigrationProgress(plan_id, MigrationState.PENDING)

    @property
    def progress(self) -> MigrationProgress:
        return self._now

    @property
    def state(self) -> MigrationState:
        return self._now.state

    @property
    def reason(self) -> str:
        return self._now.reason

    @property
    def done(self) -> bool:
        return self.state in FINAL_STATES

    def wait(self, timeout_seconds: float) -> MigrationState:
        """The state when it is final, or when the deadline passes."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self.done and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self.state

    def cancel(self, reason: str = "cancelled") -> None:
        """Asks to stop at the next chunk; chunks pushed already are applied. No effect once all are pushed."""
        with self._changed:
            self._cancel_reason = self._cancel_reason or reason

    @property
    def cancel_reason(self) -> str:
        """Not empty once ``cancel`` was called."""
        return self._cancel_reason

    def fire(self, event: MigrationEvent, reason: str = "") -> None:
        """Coordinator only. Raises ControlError if the state table has no such transition."""
        with self._changed:
            state = TRANSITIONS.get((self.state, event))
            if state is None:
                raise ControlError(f"migration {self.plan_id}: no {event.value} in state {self.state.value}")
            self._now = replace(self._now, state=state, reason=reason or self._now.reason)
            if state in FINAL_STATES:
                self._source, self._chunks = None, iter(())
            self._changed.notify_all()

    def begin(self, placement: Placement) -> None:
        """Coordinator only: the chunks are made now. What the chunk source raises is passed on."""
        source = self._source
        if source is None:
            raise ControlError(f"migration {self.plan_id} has ended")
        self._chunks = iter(source(placement) if callable(source) else source)

    def next_chunk(self) -> Delta | None:
        """Coordinator only: the next chunk that is not empty. What the chunk source raises is passed on."""
        return next((delta for delta in self._chunks if len(delta)), None)

    def count(self, **changes: int) -> None:
        """Coordinator only: adds to the counters (``last_version`` is set)."""
        with self._changed:
            values = {
                name: value if name == "last_version" else getattr(self._now, name) + value
                for name, value in changes.items()
            }
            self._now = replace(self._now, **values)  # type: ignore[arg-type]
            self._changed.notify_all()

    def notify(self) -> None:
        """Coordinator only: calls ``on_progress`` (which must not block)."""
        if self._on_progress is not None:
            self._on_progress(self)
