"""The record of a migration, the table of the transitions between its states, and the gates that let a plan begin one.

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

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from pydantic import computed_field

from flexd.core import units
from flexd.core.errors import IllegalTransitionError
from flexd.core.model import DETAIL, HIDDEN, FiniteOrNone, Model, Show, gauge

_Parts = Annotated[dict[str, float], Show(unit=units.share, detail=True)]


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


def next_state(state: MigrationState, event: TransitionEvent, what: str = "migration") -> MigrationState:
    """Return the state after ``event``.

    Args:
        what: names the migration in the error.

    Raises:
        IllegalTransitionError: the table has no such transition.
    """
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise IllegalTransitionError(f"{what}: no {event.value} in state {state.value}")
    return after


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
    measured_saving_seconds: Annotated[FiniteOrNone, Show("measured")] = None
    """Mean step before minus mean step after, without those that applied chunks; null until both are measured. A load
    that changes at the same time is in it; ``planner.verify`` separates the two."""
    measured_error_seconds: Annotated[FiniteOrNone, DETAIL] = None
    """Standard error of the measured saving; null if it is not known."""
    generation: Annotated[int | None, HIDDEN] = None
    """Topology generation that it is for; null for any."""
    chunks_pushed: Annotated[int, DETAIL] = 0
    """Chunks sent to the ranks. Those voided because an epoch ended are not counted."""
    chunks_applied: Annotated[int, DETAIL] = 0
    """Part of them that every rank has applied."""
    rows_pushed: Annotated[int, DETAIL] = 0
    """Rows of the chunks sent."""
    rows_agreed: Annotated[int, HIDDEN] = 0
    """Part of them that all ranks hold for certain."""
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
    """Until every rank has applied it, at the present rate; null if that is not known."""
    transitions: tuple[Transition, ...] = ()
    """Changes of its state, in order; only of one migration that is asked for."""
    verification: Annotated[VerificationReport | None, Show(unit=lambda found: found.state)] = None
    """Its steps with and without the copies of its plan; null if they were not compared."""

    FAMILIES = (
        gauge(
            "flexd_migration_progress_ratio", "Of the migration in flight, 0-1; NaN if none is.",
            lambda newest: None if newest.ended_unix_seconds or not newest.migration_id else newest.progress,
        ),
        gauge(
            "flexd_migration_saving_seconds",
            "Of a step, by the newest migration: as its plan predicted, and as the steps before and after it differ; "
            "NaN where it is not known.",
            lambda newest: {kind: getattr(newest, f"{kind}_saving_seconds") for kind in ("predicted", "measured")},
            ("kind",),
        ),
    )  # fmt: skip

    @property
    def rollback_version(self) -> int:
        """The version that its rollback restores; for a rollback, the version that it restores itself."""
        return self.base_version if self.returns_to is None else self.returns_to

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

    @computed_field(return_type=_Parts)  # type: ignore[prop-decorator]
    @property
    def progress_by_part(self) -> dict[str, float]:
        """Completion of its parts, which overlap: ``wait`` for its turn, ``push``, ``agree`` and ``apply`` of its rows,
        and after an abort ``stop``."""
        whole, done = self.rows or self.rows_pushed, self.state is MigrationState.COMMITTED
        parts = {"wait": 1.0 if self.started_unix_seconds else 0.0}
        for name, rows in (("push", self.rows_pushed), ("agree", self.rows_agreed), ("apply", self.rows_applied)):
            parts[name] = 1.0 if done else min(1.0, rows / whole) if whole else 0.0
        if self.state in (MigrationState.ABORTING, MigrationState.ABORTED):
            stopped = self.state is MigrationState.ABORTED
            parts["stop"] = 1.0 if stopped else self.rows_applied / max(1, self.rows_pushed)
        return parts


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
