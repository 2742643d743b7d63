"""One migration: the execution of a plan's delta. Its states are those of ``migration_states``."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexd.control.daemon.migration_states import FINAL_STATES, MigrationState, Transition, TransitionEvent, next_state
from flexd.core.errors import ControlError
from flexd.core.placement import Delta, Placement

KEPT_TRANSITIONS = 256
"""Transitions of one migration that stay in memory: epochs that end every few seconds make any number."""
RATE_SECONDS = 30.0
"""Length of the window over which a migration's rate is measured."""
_RATE_SPACING_SECONDS = 0.25


@dataclass(frozen=True)
class ChunkedDelta:
    """A delta in chunks, with its totals.

    Attributes:
        chunks: deltas, in order, each from the placement that the one before leaves.
        rows: number of rows of all chunks.
        bytes_to_copy: bytes of values and optimizer state of all promoted rows, each once.
        returns_to: the version whose placement a rollback restores; None if it is no rollback.
    """

    chunks: Iterable[Delta]
    rows: int
    bytes_to_copy: int = 0
    returns_to: int | None = None


Chunks = ChunkedDelta | Iterable[Delta]
ChunkSource = Chunks | Callable[[Placement], Chunks]
"""The chunks, or a function that makes them from the placement at which the migration starts."""


@dataclass(frozen=True)
class MigrationMetadata:
    """Origin of a migration; recorded with it.

    Attributes:
        migration_id: unique.
        parent_plan_id: the plan that the live placement came from, "" if none.
        trigger: the kind of trigger.
        who: the user that requested it, or ``flexd``.
        reason: in words.
        predicted_saving_seconds: of a step, by the plan; None without one.
    """

    migration_id: str
    parent_plan_id: str = ""
    trigger: str = ""
    who: str = ""
    reason: str = ""
    predicted_saving_seconds: float | None = None


@dataclass(frozen=True)
class MigrationStep:
    """A named part of a migration; ``completion`` is 0 to 1. Parts overlap: chunks travel one behind the other."""

    name: str
    completion: float


@dataclass(frozen=True)
class MigrationProgress:
    """A migration at one moment.

    Attributes:
        reason: the reason why it ended early; empty otherwise.
        rows, bytes_to_copy: totals of its whole delta; 0 if not known (yet).
        chunks_pushed, chunks_agreed, chunks_applied: sent to the ranks; held by all of them for certain; applied by
            all of them. Chunks voided because an epoch ended are not counted.
        rows_pushed, rows_agreed, rows_applied: rows of these chunks.
        bytes_pushed: bytes of the pushed chunks on the control channel, for one rank.
        copied_bytes: bytes of values and optimizer state of the rows that applied chunks promote, each once.
        base_version: version of the placement it started from.
        last_version: the highest version that it has pushed; 0 before its first chunk.
        created_unix_seconds: time of submission.
        started_unix_seconds, ended_unix_seconds: 0 before.
        eta_seconds: time until all rows are applied, at the rate of the last ``RATE_SECONDS``; None if not known.
    """

    plan_id: str
    state: MigrationState
    reason: str = ""
    rows: int = 0
    bytes_to_copy: int = 0
    chunks_pushed: int = 0
    chunks_applied: int = 0
    rows_pushed: int = 0
    rows_agreed: int = 0
    rows_applied: int = 0
    bytes_pushed: int = 0
    copied_bytes: int = 0
    base_version: int = 0
    last_version: int = 0
    created_unix_seconds: float = 0.0
    started_unix_seconds: float = 0.0
    ended_unix_seconds: float = 0.0
    eta_seconds: float | None = None

    @property
    def share(self) -> float:
        """The share of the rows that every rank has applied, 0 to 1."""
        if self.state is MigrationState.COMMITTED:
            return 1.0
        return min(1.0, self.rows_applied / self.rows) if self.rows else 0.0

    @property
    def steps(self) -> tuple[MigrationStep, ...]:
        """``wait`` (for the ranks, and for the migration before), then ``push``, ``agree`` and ``apply`` of its rows.

        An abort adds ``stop``, which is complete when all pushed rows are applied.
        """
        whole = self.rows or self.rows_pushed
        steps = [MigrationStep("wait", 1.0 if self.started_unix_seconds else 0.0)]
        for name, rows in (("push", self.rows_pushed), ("agree", self.rows_agreed), ("apply", self.rows_applied)):
            done = self.state is MigrationState.COMMITTED
            steps.append(MigrationStep(name, 1.0 if done else min(1.0, rows / whole) if whole else 0.0))
        if self.state in (MigrationState.ABORTING, MigrationState.ABORTED):
            done = self.state is MigrationState.ABORTED
            steps.append(MigrationStep("stop", 1.0 if done else self.rows_applied / max(1, self.rows_pushed)))
        return tuple(steps)


class Migration:
    """Handle of one ``Coordinator.migrate``. Thread-safe; the coordinator alone changes it.

    Args:
        on_progress: see ``Coordinator.migrate``.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        plan_id: str,
        source: ChunkSource,
        generation: int | None = None,
        on_progress: Callable[[Migration], None] | None = None,
        metadata: MigrationMetadata | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan_id = plan_id
        self.generation = generation
        self.metadata = metadata or MigrationMetadata(plan_id)
        self._source: ChunkSource | None = source
        self._on_progress = on_progress
        self._clock = clock
        self._chunks: Iterator[Delta] = iter(())
        self._base: Placement | None = None
        self._returns_to: int | None = None
        self._changed = threading.Condition()
        self._abort_reason = ""
        self._observer: Callable[[Migration, Transition], None] | None = None
        self._transitions = 0
        self._kept: deque[Transition] = deque(maxlen=KEPT_TRANSITIONS)
        self._rate: deque[tuple[float, int]] = deque()
        now = time.time()
        self._now = MigrationProgress(plan_id, MigrationState.PENDING, created_unix_seconds=now)
        self._record_transition(None, None, self.metadata.reason, now)

    @property
    def migration_id(self) -> str:
        return self.metadata.migration_id

    @property
    def progress(self) -> MigrationProgress:
        with self._changed:
            return replace(self._now, eta_seconds=self._eta_seconds())

    @property
    def state(self) -> MigrationState:
        return self._now.state

    @property
    def reason(self) -> str:
        return self._now.reason

    @property
    def done(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """The newest ``KEPT_TRANSITIONS``, oldest first."""
        with self._changed:
            return tuple(self._kept)

    @property
    def base(self) -> Placement | None:
        """The placement it started from; None before it started."""
        return self._base

    @property
    def returns_to(self) -> int | None:
        """The version whose placement a rollback restores; None for other migrations, and before it started."""
        return self._returns_to

    def wait(self, timeout_seconds: float) -> MigrationState:
        """Wait until the state is final or the deadline passes, and return it."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self.done and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self.state

    def abort(self, reason: str = "aborted") -> None:
        """Stop at the next chunk; chunks pushed already are applied. No effect once it has ended."""
        with self._changed:
            self._abort_reason = self._abort_reason or reason or "aborted"

    @property
    def abort_reason(self) -> str:
        """The reason given to ``abort``; empty before."""
        return self._abort_reason

    def observe(self, observer: Callable[[Migration, Transition], None]) -> None:
        """Call ``observer`` with every transition, earlier ones included. Coordinator only.

        It is called with the migration's lock held, so it must only record.
        """
        with self._changed:
            for transition in self._kept:
                observer(self, transition)
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
                self._source, self._chunks = None, iter(())
            self._now = replace(self._now, state=after, reason=reason or self._now.reason, **stamps)
            self._record_transition(event, before, reason, now)
            self._changed.notify_all()

    def begin(self, placement: Placement) -> None:
        """Make the chunks from the placement at the start. Coordinator only. Raises what the chunk source raises."""
        source = self._source
        if source is None:
            raise ControlError(f"migration {self.migration_id} has ended")
        chunks = source(placement) if callable(source) else source
        rows = bytes_to_copy = 0
        if isinstance(chunks, ChunkedDelta):
            rows, bytes_to_copy, self._returns_to = chunks.rows, chunks.bytes_to_copy, chunks.returns_to
            chunks = chunks.chunks
        elif isinstance(chunks, Sequence):
            rows = sum(len(delta) for delta in chunks)
        with self._changed:
            self._chunks, self._base = iter(chunks), placement
            self._now = replace(self._now, rows=rows, bytes_to_copy=bytes_to_copy, base_version=placement.version)

    def next_chunk(self) -> Delta | None:
        """Return the next chunk that is not empty. Coordinator only. Raises what the chunk source raises."""
        return next((delta for delta in self._chunks if len(delta)), None)

    def count(self, **changes: int) -> None:
        """Add to the counters (``last_version`` is set). Coordinator only."""
        with self._changed:
            values = {
                name: value if name == "last_version" else getattr(self._now, name) + value
                for name, value in changes.items()
            }
            self._now = replace(self._now, **values)  # type: ignore[arg-type]
            if "rows_applied" in values:
                self._measure_rate()
            self._changed.notify_all()

    def notify(self) -> None:
        """Call ``on_progress``, which must not block. Coordinator only."""
        if self._on_progress is not None:
            self._on_progress(self)

    def _record_transition(
        self, event: TransitionEvent | None, before: MigrationState | None, reason: str, now: float
    ) -> None:
        state = self._now
        transition = Transition(
            self._transitions, now, event, before, state.state, reason, state.rows_pushed, state.rows_applied,
            state.last_version,
        )  # fmt: skip
        self._transitions += 1
        self._kept.append(transition)
        if self._observer is not None:
            self._observer(self, transition)

    def _measure_rate(self) -> None:
        now = self._clock()
        while len(self._rate) > 1 and self._rate[1][0] <= now - RATE_SECONDS:
            self._rate.popleft()
        if len(self._rate) > 1 and now - self._rate[-2][0] < _RATE_SPACING_SECONDS:
            self._rate.pop()
        self._rate.append((now, self._now.rows_applied))

    def _eta_seconds(self) -> float | None:
        now = self._now
        if now.state not in (MigrationState.PUSHING, MigrationState.APPLYING) or not now.rows or not self._rate:
            return None
        at, rows = self._rate[0]
        done, seconds = now.rows_applied - rows, self._clock() - at
        if done <= 0 or seconds <= 0:
            return None
        return max(0, now.rows - now.rows_applied) * seconds / done
