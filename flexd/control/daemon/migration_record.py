"""The record of a migration: whoever changes it writes here, and the API, the history and the metrics read it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexd.control.daemon.migration_states import MigrationState, Transition


@dataclass(frozen=True)
class EffectRecord:
    """Steps before and after a migration.

    Attributes:
        before_seconds, after_seconds: mean wall time of a step at the first and at the last placement version of the
            migration; None if no step was measured there.
        before_error_seconds, after_error_seconds: standard errors of the means; None if they are not known.
        before_steps, after_steps: steps measured.
    """

    before_seconds: float | None = None
    before_error_seconds: float | None = None
    before_steps: int = 0
    after_seconds: float | None = None
    after_error_seconds: float | None = None
    after_steps: int = 0

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
    """The verification of a migration, running or ended.

    Attributes:
        state: name of the state, ``running`` before it has ended.
        change: change of the step time by the measured rows, as a share; positive is slower. None without a pair.
        low, high: ends of its confidence interval; None if there are too few pairs.
        pairs: pairs of blocks measured.
        part: measured share of the rows that the plan promoted, or took back.
        steps: steps of the job that it has used.
        rolled_back: whether a rollback was started.
        words: progress or result in words.
    """

    migration_id: str
    state: str
    change: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    part: float = 1.0
    steps: int = 0
    rolled_back: bool = False
    words: str = ""


@dataclass(frozen=True)
class MigrationRecord:
    """A migration at one moment.

    Attributes:
        migration_id: unique.
        plan_id: the plan that it executes; its own id without one.
        parent_plan_id: the plan that the placement before it came from; "" if none.
        trigger: kind of its trigger.
        who: the user that requested it, or ``flexd``.
        reason: its cause in words.
        overridden_gates: closed gates that were overridden.
        promotions, demotions: rows of its plan that get, or lose, copies.
        why: sentences that state what its plan wins.
        predicted_saving_seconds: of a step, by its plan; None without one.
        generation: topology generation that it is for; None for any.
        problem: why it ended early; empty otherwise.
        rows, bytes_to_copy: totals of its whole delta; 0 if not known (yet).
        chunks_pushed, chunks_applied: sent to the ranks; applied by all of them. Chunks voided because an epoch ended
            are not counted.
        rows_pushed, rows_agreed, rows_applied: rows of the chunks sent, held by all ranks for certain, and applied by
            all of them.
        pushed_bytes: bytes of the pushed chunks on the control channel, for one rank.
        copied_bytes: bytes of values and optimizer state of the rows that applied chunks promote, each once.
        base_version: version of the placement that it started from.
        last_version: the highest version that it has pushed; 0 before its first chunk.
        created_unix_seconds: time of its submission.
        started_unix_seconds, ended_unix_seconds: 0 before.
        settled: whether none of its chunks is outstanding after its end, so that the counts are final.
        transitions: in order; of very many the first and the newest.
        effect: steps before and after it; None if none were measured.
        verdict: of its verification; None if its plan was not verified.
    """

    migration_id: str
    plan_id: str
    parent_plan_id: str = ""
    trigger: str = ""
    who: str = ""
    reason: str = ""
    overridden_gates: tuple[str, ...] = ()
    promotions: int = 0
    demotions: int = 0
    why: tuple[str, ...] = ()
    predicted_saving_seconds: float | None = None
    generation: int | None = None
    state: MigrationState = MigrationState.PENDING
    problem: str = ""
    rows: int = 0
    bytes_to_copy: int = 0
    chunks_pushed: int = 0
    chunks_applied: int = 0
    rows_pushed: int = 0
    rows_agreed: int = 0
    rows_applied: int = 0
    pushed_bytes: int = 0
    copied_bytes: int = 0
    base_version: int = 0
    last_version: int = 0
    created_unix_seconds: float = 0.0
    started_unix_seconds: float = 0.0
    ended_unix_seconds: float = 0.0
    settled: bool = False
    transitions: tuple[Transition, ...] = ()
    effect: EffectRecord | None = None
    verdict: VerdictRecord | None = None

    @property
    def seconds(self) -> float | None:
        """Time from submission to end; None if it has not ended."""
        if self.ended_unix_seconds == 0.0:
            return None
        return max(0.0, self.ended_unix_seconds - self.created_unix_seconds)

    @property
    def share(self) -> float:
        """The share of the rows that every rank has applied, 0 to 1."""
        if self.state is MigrationState.COMMITTED:
            return 1.0
        return min(1.0, self.rows_applied / self.rows) if self.rows else 0.0

    @property
    def steps(self) -> tuple[tuple[str, float], ...]:
        """Named parts and their completion, 0 to 1; chunks travel one behind the other, so parts overlap.

        ``wait`` (for the ranks, and for the migration before), then ``push``, ``agree`` and ``apply`` of its rows.

        An abort adds ``stop``, which is complete when all pushed rows are applied.
        """
        whole = self.rows or self.rows_pushed
        steps = [("wait", 1.0 if self.started_unix_seconds else 0.0)]
        for name, rows in (("push", self.rows_pushed), ("agree", self.rows_agreed), ("apply", self.rows_applied)):
            done = self.state is MigrationState.COMMITTED
            steps.append((name, 1.0 if done else min(1.0, rows / whole) if whole else 0.0))
        if self.state in (MigrationState.ABORTING, MigrationState.ABORTED):
            done = self.state is MigrationState.ABORTED
            steps.append(("stop", 1.0 if done else self.rows_applied / max(1, self.rows_pushed)))
        return tuple(steps)
