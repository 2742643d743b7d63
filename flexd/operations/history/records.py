"""Records of the history: migrations, their transitions, and actions of users."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_states import Transition

ActionKind = Literal["pause", "resume", "throttle", "reload", "override", "withhold", "prefer", "forget", "verify"]
MAX_DETAIL_CHARACTERS = 2_000


@dataclass(frozen=True)
class ActionRecord:
    """An action of a user that is no migration.

    Attributes:
        kind: an ``ActionKind``; ``override`` is a plan executed although gates were closed,
            ``withhold`` the first of the plans that save less than ``planner.min_saving``, ``prefer`` and ``forget``
            are about an attempt of the job.
        who: the user.
        reason: the user's reason.
        detail: the outcome, truncated to ``MAX_DETAIL_CHARACTERS``.
    """

    unix_seconds: float
    kind: str
    who: str
    reason: str
    detail: str

    @staticmethod
    def of(unix_seconds: float, kind: ActionKind, who: str, reason: str, detail: str = "") -> ActionRecord:
        return ActionRecord(unix_seconds, kind, who, reason, detail[:MAX_DETAIL_CHARACTERS])


@dataclass(frozen=True)
class MigrationRecord:
    """A migration as it was when its newest entry was written.

    Attributes:
        migration_id: unique id.
        plan_id: id of the executed plan.
        parent_plan_id: id of the plan before it; "" if none.
        who: the user who requested it, or the daemon.
        trigger: kind of its trigger.
        reason: the cause in words.
        state: name of a ``MigrationState``.
        problem: why it ended early; "" if it did not.
        rows: rows of its whole delta; 0 if not known.
        rows_pushed: rows in pushed chunks.
        rows_applied: rows that every rank has applied.
        chunks_pushed: pushed chunks.
        chunks_applied: chunks that every rank has applied.
        copied_bytes: row values and optimizer state of the promoted rows that were applied, each once.
        pushed_bytes: bytes sent to one rank on the control channel.
        base_version: version of the placement that it started from; 0 before the start.
        last_version: highest version that it pushed; 0 before the first chunk.
        created_unix_seconds: time of its submission.
        started_unix_seconds: time of its start; 0 before.
        ended_unix_seconds: time of its end; 0 before.
        settled: whether none of its chunks is outstanding, so that the counts are final.
    """

    migration_id: str
    plan_id: str
    parent_plan_id: str
    who: str
    trigger: str
    reason: str
    state: str
    problem: str
    rows: int
    rows_pushed: int
    rows_applied: int
    chunks_pushed: int
    chunks_applied: int
    copied_bytes: int
    pushed_bytes: int
    base_version: int
    last_version: int
    created_unix_seconds: float
    started_unix_seconds: float
    ended_unix_seconds: float
    settled: bool

    @property
    def seconds(self) -> float | None:
        """Time from submission to end; None if it has not ended."""
        if self.ended_unix_seconds == 0.0:
            return None
        return max(0.0, self.ended_unix_seconds - self.created_unix_seconds)

    @staticmethod
    def of(migration: Migration, settled: bool) -> MigrationRecord:
        metadata, now = migration.metadata, migration.progress
        return MigrationRecord(
            migration_id=metadata.migration_id, plan_id=now.plan_id, parent_plan_id=metadata.parent_plan_id,
            who=metadata.who, trigger=metadata.trigger, reason=metadata.reason, state=now.state.name,
            problem=now.reason, rows=now.rows, rows_pushed=now.rows_pushed, rows_applied=now.rows_applied,
            chunks_pushed=now.chunks_pushed, chunks_applied=now.chunks_applied, copied_bytes=now.copied_bytes,
            pushed_bytes=now.bytes_pushed, base_version=now.base_version, last_version=now.last_version,
            created_unix_seconds=now.created_unix_seconds, started_unix_seconds=now.started_unix_seconds,
            ended_unix_seconds=now.ended_unix_seconds, settled=settled,
        )  # fmt: skip


@dataclass(frozen=True)
class TransitionRecord:
    """One ``Transition`` of a migration; ``event`` and ``before`` are "" for the submission."""

    number: int
    unix_seconds: float
    event: str
    before: str
    after: str
    reason: str
    rows_pushed: int
    rows_applied: int
    version: int

    @staticmethod
    def of(transition: Transition) -> TransitionRecord:
        return TransitionRecord(
            number=transition.number,
            unix_seconds=transition.unix_seconds,
            event=transition.event.value if transition.event else "",
            before=transition.before.name if transition.before else "",
            after=transition.after.name,
            reason=transition.reason,
            rows_pushed=transition.rows_pushed,
            rows_applied=transition.rows_applied,
            version=transition.version,
        )


@dataclass(frozen=True)
class EffectRecord:
    """Predicted saving of a step by a migration, beside the steps before and after it.

    A record of its own: ``MigrationRecord`` is rewritten by every event of its migration.

    Attributes:
        predicted_saving_seconds: by the plan; None without one.
        before_seconds, after_seconds: mean wall time of a step at the first and at the last placement version of the
            migration; None if no step was measured there.
        before_error_seconds, after_error_seconds: standard errors of the means; None if they are not known.
        before_steps, after_steps: steps measured.
    """

    migration_id: str
    predicted_saving_seconds: float | None
    before_seconds: float | None
    before_error_seconds: float | None
    before_steps: int
    after_seconds: float | None
    after_error_seconds: float | None
    after_steps: int

    @property
    def saving_seconds(self) -> float | None:
        """Mean step before minus mean step after; None until both are measured."""
        if self.before_seconds is None or self.after_seconds is None:
            return None
        return self.before_seconds - self.after_seconds

    @property
    def error_seconds(self) -> float | None:
        """Standard error of the saving; None if it is not known."""
        if self.before_error_seconds is None or self.after_error_seconds is None:
            return None
        return math.hypot(self.before_error_seconds, self.after_error_seconds)


@dataclass(frozen=True)
class VerdictRecord:
    """The ended verification of a migration.

    Attributes:
        unix_seconds: when it ended.
        state: the verdict, or ``interrupted``.
        change: change of the step time by the measured rows, as a share; positive is slower. None without a pair.
        low, high: ends of its confidence interval; None if there are too few pairs.
        pairs: pairs of blocks measured.
        part: measured share of the rows that the plan promoted.
        steps: training steps used.
        rolled_back: whether a rollback was started.
        words: the result in words.
    """

    migration_id: str
    unix_seconds: float
    state: str
    change: float | None
    low: float | None
    high: float | None
    pairs: int
    part: float
    steps: int
    rolled_back: bool
    words: str


@dataclass(frozen=True)
class HistoryEntry:
    """One entry to write: the migration, and the transition that led to its state, if any."""

    record: MigrationRecord
    transition: TransitionRecord | None


Entry = HistoryEntry | ActionRecord | EffectRecord | VerdictRecord
"""What a history takes."""
