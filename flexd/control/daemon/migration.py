"""A migration: its record, the table of the transitions between its states, its handle, and the gates that let a plan
begin one.

Whoever changes a migration writes its record; history, API and metrics have the same.

::

    PENDING --start--> PUSHING --exhausted--> APPLYING --applied--> COMMITTED
       |                |   ^                    |
       |                |   `------voided--------'       (an epoch ended: chunks not agreed are pushed again)
       |                |                        |
       |                `--abort--> ABORTING <---'--stopped (every pushed chunk is applied or void)--> ABORTED
       |
       `-- supersede / abort / fail --> SUPERSEDED / ABORTED / FAILED   (PUSHING: supersede; all but final: fail)

A migration that ends early leaves a prefix of its delta applied, which is a valid placement.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import computed_field

from flexd.core.errors import IllegalTransitionError
from flexd.core.model import DETAIL, HIDDEN, FiniteOrNone, Model, Show, gauge

if TYPE_CHECKING:  # they import numpy, which would double the time of a client command
    from flexd.core.arrays import Int64Array
    from flexd.core.placement import Delta, Placement
    from flexd.planner.plan import Plan


class MigrationState(StrEnum):
    PENDING = "pending"
    PUSHING = "pushing"
    APPLYING = "applying"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"
    FAILED = "failed"


class TransitionEvent(StrEnum):
    START = "start"
    EXHAUSTED = "exhausted"
    VOIDED = "voided"
    APPLIED = "applied"
    ABORT = "abort"
    STOPPED = "stopped"
    SUPERSEDE = "supersede"
    FAIL = "fail"


_S, _E = MigrationState, TransitionEvent

TRANSITIONS: Mapping[tuple[MigrationState, TransitionEvent], MigrationState] = MappingProxyType(
    {
        (_S.PENDING, _E.START): _S.PUSHING,
        (_S.PENDING, _E.SUPERSEDE): _S.SUPERSEDED,
        (_S.PENDING, _E.ABORT): _S.ABORTED,
        (_S.PENDING, _E.FAIL): _S.FAILED,
        (_S.PUSHING, _E.EXHAUSTED): _S.APPLYING,
        (_S.PUSHING, _E.SUPERSEDE): _S.SUPERSEDED,
        (_S.PUSHING, _E.ABORT): _S.ABORTING,
        (_S.PUSHING, _E.FAIL): _S.FAILED,
        (_S.APPLYING, _E.VOIDED): _S.PUSHING,
        (_S.APPLYING, _E.APPLIED): _S.COMMITTED,
        (_S.APPLYING, _E.ABORT): _S.ABORTING,
        (_S.APPLYING, _E.FAIL): _S.FAILED,
        (_S.ABORTING, _E.STOPPED): _S.ABORTED,
        (_S.ABORTING, _E.FAIL): _S.FAILED,
    }
)

FINAL_STATES = frozenset({_S.COMMITTED, _S.ABORTED, _S.SUPERSEDED, _S.FAILED})


class Transition(Model):
    """One change of a migration's state, with its progress at that time."""

    number: int
    """Counts from 0, its submission; of very many the first and the newest are kept."""
    unix_seconds: float
    """When."""
    event: TransitionEvent | None = None
    """The event; null for the submission."""
    before: MigrationState | None = None
    """State before; null for the submission."""
    after: MigrationState
    """State after."""
    reason: str = ""
    """Reason, if that is known."""
    rows_pushed: int = 0
    """Rows sent to the ranks by then."""
    rows_applied: int = 0
    """Rows applied by every rank by then."""
    version: int = 0
    """Highest placement version that it had pushed by then; 0 before its first chunk."""


class VerificationReport(Model):
    """The verification of one migration: its step time with and without the copies of the plan."""

    migration_id: str
    """The migration of the plan."""
    state: str
    """``running``, the verdict (``faster``, ``slower``, ``same``, ``undecided``), or ``interrupted``."""
    change: FiniteOrNone = None
    """Measured change of the step time by the copies, as a share; below 0 is faster. Null before the first pair."""
    low: FiniteOrNone = None
    """Lower end of its confidence interval; null while there are too few pairs."""
    high: FiniteOrNone = None
    """Upper end of its confidence interval; null while there are too few pairs."""
    pairs: int = 0
    """Pairs of blocks measured."""
    part: float = 1.0
    """Measured share of the rows that the plan promoted, or took back."""
    steps: int = 0
    """Training steps used."""
    rolled_back: bool = False
    """True if the plan was rolled back."""
    message: str = ""
    """Progress or result."""


class MigrationRecord(Model):
    """A migration: running, or of the history. Bytes are row values and optimizer state of promoted rows, each once."""

    migration_id: str
    """Id of the migration."""
    state: MigrationState = MigrationState.PENDING
    """Its state."""
    rows: int = 0
    """Rows of its delta; of its plan until it starts."""
    rows_applied: int = 0
    """Part of them that every rank has applied."""
    plan_id: Annotated[str, DETAIL] = ""
    """The plan it carries out; its own id without one."""
    parent_plan_id: Annotated[str, DETAIL] = ""
    """The plan that the placement before it came from; empty if none."""
    trigger: str = ""
    """Its trigger: ``interval``, ``drift``, ``topology``, ``manual``, or ``verify`` for a move of a verification."""
    requested_by: str = ""
    """The person or program that requested it."""
    reason: str = ""
    """The reason given."""
    problem: str = ""
    """Reason why it failed, is held up, or ended early."""
    overridden_gates: Annotated[tuple[str, ...], DETAIL] = ()
    """Gates that were closed and overridden."""
    promotions: Annotated[int, HIDDEN] = 0
    """Rows of its plan that get copies."""
    demotions: Annotated[int, HIDDEN] = 0
    """Rows of its plan that lose copies."""
    why: Annotated[tuple[str, ...], HIDDEN] = ()
    """The gains of its plan, in sentences."""
    predicted_saving_seconds: Annotated[FiniteOrNone, Show("saving predicted")] = None
    """Exposed seconds of a step, by its plan; null without one."""
    generation: Annotated[int | None, HIDDEN] = None
    """Topology generation that it is for; null for any."""
    chunks_pushed: Annotated[int, DETAIL] = 0
    """Chunks sent to the ranks. Those voided because an epoch ended are not counted."""
    chunks_applied: Annotated[int, DETAIL] = 0
    """Part of them that every rank has applied."""
    rows_pushed: Annotated[int, DETAIL] = 0
    """Rows of the chunks sent."""
    bytes_to_copy: Annotated[int, DETAIL] = 0
    """Bytes of its delta; of its plan until it starts."""
    copied_bytes: int = 0
    """Part of them that is on every rank."""
    pushed_bytes: Annotated[int, DETAIL] = 0
    """Sent over the control channel to each rank."""
    base_version: Annotated[int, DETAIL] = 0
    """Placement version that it started from."""
    last_version: Annotated[int, DETAIL] = 0
    """Highest placement version that it pushed; 0 if none."""
    created_unix_seconds: FiniteOrNone = None
    """When it was requested."""
    started_unix_seconds: Annotated[FiniteOrNone, DETAIL] = None
    """When its first chunk was made."""
    ended_unix_seconds: Annotated[FiniteOrNone, DETAIL] = None
    """When it ended."""
    returns_to: Annotated[int | None, HIDDEN] = None
    """Version whose placement it restores; null if it is no rollback."""
    settled: Annotated[bool, DETAIL] = False
    """True if no chunk of it is in flight any more after its end, so that rows and bytes are final."""
    eta_seconds: FiniteOrNone = None
    """Until every rank has applied it, at its rate so far; null if that is not known."""
    transitions: tuple[Transition, ...] = ()
    """Changes of its state, in order; only of one migration that is asked for."""
    verification: Annotated[VerificationReport | None, Show(unit=lambda found: found.state)] = None
    """Its steps with and without the copies of its plan; null if they were not compared."""

    FAMILIES = (
        gauge(
            "flexd_migration_progress_ratio", "Of the migration in flight, 0-1; NaN if none is.",
            lambda newest: None if newest.ended_unix_seconds or not newest.migration_id else newest.progress,
        ),
    )  # fmt: skip

    @property
    def rollback_version(self) -> int:
        """The version that its rollback restores; for a rollback, the version that it restores itself."""
        return self.base_version if self.returns_to is None else self.returns_to

    @property
    def verifies(self) -> bool:
        """True for a move of a verification."""
        return self.trigger == "verify"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def seconds(self) -> float | None:
        """From the request to its end; null before."""
        if self.ended_unix_seconds is None:
            return None
        return max(0.0, self.ended_unix_seconds - (self.created_unix_seconds or 0.0))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def progress(self) -> float:
        """Share of its rows that every rank has applied."""
        if self.state is MigrationState.COMMITTED:
            return 1.0
        return min(1.0, self.rows_applied / self.rows) if self.rows else 0.0


class GateReport(Model):
    """One measure that must be good enough before a plan is made."""

    gate: str
    """``samples``, ``coverage``, ``lag`` or ``saving`` (of the plan itself)."""
    key: str
    """Key of the configuration."""
    measured: FiniteOrNone = None
    """Accesses, share, messages or seconds per step, by the gate."""
    required: FiniteOrNone = None
    """The bound."""
    at_most: bool = False
    """True for an upper bound."""
    open: bool = True
    """True if this gate allows a plan."""
    message: str = ""
    """The fault, if the gate is closed."""


class ActionRecord(Model):
    """Another action that the daemon carried out for a user, or by itself."""

    unix_seconds: FiniteOrNone = None
    """When."""
    kind: str
    """``pause``, ``resume``, ``throttle``, ``reload``, ``override`` of gates that were closed, ``withhold`` of
    plans that save too little, or ``verify``, the measured effect of the migration that is named as the reason."""
    requested_by: str = ""
    """The person or program that gave it."""
    reason: str = ""
    """The reason given."""
    detail: str = ""
    """Its result."""


KEPT_TRANSITIONS = 256
"""Transitions of one migration that are kept: epochs that end every few seconds make any number."""


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
        target, plan: see ``Coordinator.migrate``.

    Attributes:
        record: it at this moment.
        delta: the changes to the target, in the order to push them; None before it starts and after its end.
        copied: int64[len(delta) + 1], bytes that the first rows of ``delta`` copy.
        base: the placement it started from; None before it started.
        abort_reason: the reason given to ``abort``; empty before.
    """

    def __init__(self, record: MigrationRecord, target: Placement, plan: Plan | None = None) -> None:
        self.target = target
        self.plan = plan
        self.delta: Delta | None = None
        self.copied: Int64Array | None = None
        self.base: Placement | None = None
        self._changed = threading.Condition()
        self.abort_reason = ""
        self._observer: Callable[[MigrationEvent], None] | None = None
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
        with self._changed:
            self._changed.wait_for(lambda: self.done, timeout_seconds)
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
            before, now = self.state, time.time()
            after = TRANSITIONS.get((before, event))
            if after is None:
                raise IllegalTransitionError(f"migration {self.migration_id}: no {event.value} in state {before.value}")
            stamps: dict[str, Any] = {}
            if event is TransitionEvent.START:
                stamps["started_unix_seconds"] = now
            if after in FINAL_STATES:
                stamps["ended_unix_seconds"] = now
                self.delta = self.copied = self.plan = None
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

    def set_delta(self, delta: Delta, copied: Int64Array) -> None:
        """Set the changes from its base to the target. Coordinator only."""
        with self._changed:
            self.delta, self.copied = delta, copied
            self._update(rows=len(delta), bytes_to_copy=int(copied[-1]))

    def count(self, **changes: int) -> None:
        """Add to the counters (``last_version`` is set). Coordinator only."""
        with self._changed:
            values = {
                name: value if name == "last_version" else getattr(self.record, name) + value
                for name, value in changes.items()
            }
            self._update(**values)

    def settle(self) -> None:
        """Record that no chunk is outstanding after its end. Coordinator only."""
        with self._changed:
            self._update(settled=True)

    def report(self) -> MigrationRecord:
        """Return the record with the time that it still takes, without its transitions."""
        now, eta_seconds = self.record, None
        if now.state in (MigrationState.PUSHING, MigrationState.APPLYING) and now.rows_applied:
            seconds = max(0.0, time.time() - (now.started_unix_seconds or 0.0))
            eta_seconds = max(0, now.rows - now.rows_applied) * seconds / now.rows_applied
        return now.model_copy(update={"eta_seconds": eta_seconds, "transitions": ()})

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
