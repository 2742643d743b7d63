"""Verification of plans: measure the step with and without a plan, and roll back a plan that does not win.

::

    executed plan COMMITTED --> RUNNING --verdict--> FASTER: the plan stays
                                 |  |                SLOWER | SAME | UNDECIDED: rolled back; a plan that takes copies
                                 |  |                back only if SLOWER
                                 |  `--budget of steps spent--> UNDECIDED
                                 `--another migration, other ranks, a failed move, switched off--> INTERRUPTED

While it runs, ordinary migrations alternate between the placement of the plan and the one with its promotions, or what
it takes back, undone, or a random part of that. A coin decides which of the two blocks of a pair comes first. Copies
are exact, so training does not change. An interrupted verification gives no verdict, and the ranks keep the placement
that they have.
"""

import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import LiveTopology
from flexd.control.daemon.migration import Migration, MigrationState, VerificationReport
from flexd.control.protocol.report import StepReport
from flexd.core.errors import SnapshotError
from flexd.core.keyspace import KeySpace
from flexd.core.placement import REHOMED, Delta, Placement, RankLayout, Tier, by_slots
from flexd.core.step_phases import ExchangeReason
from flexd.core.switchback import FIRST_LOOK, Effect, SwitchbackRule, Verdict, keeps_plan
from flexd.operations.decisions import DecisionFile
from flexd.operations.executions import DAEMON_ACTOR, Executions, Trigger, TriggerKind
from flexd.operations.history import MigrationHistory
from flexd.operations.live_plan import PlanMaker
from flexd.operations.training_monitor import StepBlocks
from flexd.planner.plan import moved_bytes

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class MeasuredChanges:
    """The two placements between which a verification alternates: that of the plan, and the one here.

    Attributes:
        base: the placement that the plan started from.
        planned: the placement of the plan.
        without: the placement of the plan with (a random part of) its changes undone.
        part: share of the measured changes that are undone; 0.0 if there is nothing to measure.
        takes_back: whether the plan rather takes copies back. All its changes are measured then, otherwise the rows
            that it promoted or moved: what it takes back for them cannot return while their slots are full.
    """

    base: Placement
    planned: Placement
    without: Placement
    part: float
    takes_back: bool


def measured_changes(
    base: Placement, placement: Placement, keyspace: KeySpace, layout: RankLayout, max_move_bytes: int
) -> MeasuredChanges:
    """Return what to measure of the plan that led from ``base`` to ``placement``.

    Args:
        max_move_bytes: largest number of bytes of values and optimizer state that one change of blocks copies.
    """
    undone = placement.delta_to(base)
    takes_back = _takes_back(undone.new_tiers, undone.old_tiers)
    if not takes_back:
        undone = undone.select(np.flatnonzero(by_slots(undone.new_tiers) < by_slots(undone.old_tiers)))
    if len(undone) == 0:
        return MeasuredChanges(base, placement, placement, 0.0, takes_back)
    done = Delta(undone.keys, undone.new_tiers, undone.old_tiers)
    size = max(int(moved_bytes(way, keyspace, layout).sum()) for way in (done, undone))
    rows = len(undone)
    if size > max_move_bytes:
        rows = max(1, int(rows * max_move_bytes / size))
        undone = undone.select(np.sort(np.random.default_rng().choice(len(undone), rows, replace=False)))
    return MeasuredChanges(base, placement, placement.apply(undone), rows / len(done), takes_back)


def plan_kind(delta: Delta) -> str:
    """Return ``HOME`` for changes that take back more rows than they promote or move. Of others, the tiers to which
    they promote, such as ``NODE+DEVICE``, with ``MOVED`` if they move rows to other nodes; empty if there is nothing
    of these."""
    if _takes_back(delta.old_tiers, delta.new_tiers):
        return Tier.HOME.name
    promoted = delta.new_tiers[by_slots(delta.new_tiers) > by_slots(delta.old_tiers)]
    return "+".join(
        "MOVED" if tier == REHOMED else Tier(tier).name for tier in np.unique(np.minimum(promoted, REHOMED))
    )


def _takes_back(before: UInt8Array, after: UInt8Array) -> bool:
    slots_before, slots_after = by_slots(before), by_slots(after)
    return int((slots_after < slots_before).sum()) > int((slots_after > slots_before).sum())


logger = logging.getLogger("flexd")

CONFIDENCE = 0.95
"""Probability that a plan without effect is not called faster or slower."""
RESOLUTION = 0.01
"""A change of the step within +- this share counts as none and ends the verification."""
HOLD_SECONDS = 600.0
"""Time for which plans that promote to the same tiers, or that take copies back, are held back after one was rolled
back; doubles with each, up to a day. Users' plans are not held back."""
MAX_MOVE_BYTES = 2**26
"""Largest number of bytes of values and optimizer state that one change of blocks copies. Of a larger plan, a random
part of this size is measured."""
BLOCK_STEPS = 16
"""Steps of a block at least; it has at least three reports of every rank."""
MAX_PAIRS = 32
"""Pairs of blocks of a verification: more looks would make each of them less sensitive."""
STALLED_SECONDS = 900.0
"""A verification without a complete block for so long is interrupted, so that planning does not wait for ever."""
_NO_VERDICT = "no verdict, the ranks keep the placement that they have"


RUNNING, INTERRUPTED = "running", "interrupted"
"""States of a verification without a verdict."""


@dataclass
class _Pairs:
    """Blocks in pairs: one with the plan (True) and one without it."""

    rule: SwitchbackRule
    order: list[bool] = field(default_factory=list)
    """The blocks of the present pair that are still to come."""
    pair: dict[bool, float] = field(default_factory=dict)
    blocks: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    def add(self, seconds: float) -> None:
        """Add the block that was next."""
        self.pair[self.order.pop(0)] = seconds
        if not self.order:
            for side, measured in self.pair.items():
                self.blocks[side].append(measured)
            self.pair = {}

    @property
    def effect(self) -> Effect:
        return self.rule.effect(self.blocks[False], self.blocks[True])


@dataclass
class _Run:
    plan: Migration
    newest: Migration
    """The newest migration of this verification."""
    kind: str
    changes: MeasuredChanges
    ranks: LiveTopology
    pairs: _Pairs
    progressed_at: float
    moves: int = 0
    moving: bool = False
    at_plan: bool = True


class Verifier:
    """Verifies executed plans, one at a time. The daemon's loop calls ``tick``; any thread may call the rest.

    Args:
        maker: has the settings in effect.
        coin: returns whether the block with the plan comes first in a pair.

    Attributes:
        newest: the running verification, or the newest one, also of an earlier daemon; None before the first.
        ended: ended verifications by state.
        decisions: has the kinds of plans that are held back because one was not shown to win.
    """

    def __init__(
        self,
        maker: PlanMaker,
        executions: Executions,
        coordinator: Coordinator,
        decisions: DecisionFile,
        history: MigrationHistory,
        coin: Callable[[], bool] = lambda: random.random() < 0.5,
    ) -> None:
        self._maker = maker
        self._executions = executions
        self._coordinator = coordinator
        self.decisions = decisions
        self._history = history
        self._coin = coin
        self._blocks = StepBlocks()
        # Ranks that measure arms of their own (``flexd.embedding.tuning``).
        self._tuning: dict[int, bool] = {}
        self._run: _Run | None = None
        self._seen: Migration | None = None
        self.newest = self._kept()
        self.ended: Counter[str] = Counter()
        self._close_unfinished()

    @property
    def budget_steps(self) -> int:
        """Steps that a verification may take; 0: plans are not measured."""
        return self._maker.settings.verify_budget_steps

    def add(self, rank: int, report: StepReport) -> None:
        """Add the report of a rank."""
        self._tuning[rank] = report.exchange.reason == ExchangeReason.TRIAL
        if self._run is not None:
            self._blocks.add(rank, report)

    def tick(self, live: LiveTopology) -> bool:
        """Advance the verification; begin one if a plan has been executed. Returns whether a plan has to wait: for a
        verification, for a migration, over which it would leave copies that nobody measures, or for ranks that measure
        arms of their own: one measures at a time.

        Args:
            live: the ranks, all ready.
        """
        migration = self._executions.last
        if self._run is None and migration is not None and self._measures(migration, live):
            tuning = self._is_due(migration, live) and any(tuple(self._tuning.values()))
            if tuning or not migration.done:
                return True
        run = self._run or self._begin(live)
        if run is None:
            return False
        problem = self._problem(run, live)
        if problem:
            self._end(run, INTERRUPTED, problem)
        elif run.moving:
            if run.newest.state is MigrationState.COMMITTED:
                run.moving = False
                self._begin_block(run)
        else:
            self._measure(run, live)
        return self._run is not None

    def _begin(self, live: LiveTopology) -> _Run | None:
        # In this order: a migration that another thread starts in between is not done, and never has another's plan.
        plan, migration = self._executions.last_plan, self._executions.last
        if migration is None or migration is self._seen or not migration.done:
            return None
        due, self._seen = self._is_due(migration, live), migration
        if plan is None or migration.base is None or not due:
            return None
        placement, base = self._coordinator.placement(), migration.base
        if placement.version != migration.record.last_version:
            return None
        changes = measured_changes(base, placement, self._maker.keyspace, live.layout, MAX_MOVE_BYTES)
        if changes.part == 0.0 or (changes.takes_back and not plan.live_fits):
            return None
        pairs = min(MAX_PAIRS, self.budget_steps // (2 * BLOCK_STEPS))
        rule = SwitchbackRule(max(FIRST_LOOK, pairs), CONFIDENCE, RESOLUTION)
        self._blocks.clear()
        self._run = run = _Run(
            migration, migration, plan_kind(plan.delta), changes, live, _Pairs(rule), time.monotonic()
        )  # fmt: skip
        self.decisions.update(verification=migration.migration_id)
        self._report(run, RUNNING, "begun")
        logger.info("verification of %s: begun, at most %d steps", migration.migration_id, self.budget_steps)
        self._next_block(run, live)
        return run

    def _is_due(self, migration: Migration, live: LiveTopology) -> bool:
        unseen = migration is not self._seen and migration.state is MigrationState.COMMITTED
        return unseen and migration.base is not None and self._measures(migration, live)

    def _measures(self, migration: Migration, live: LiveTopology) -> bool:
        """Return whether plans of these ranks are verified."""
        allowed = self.budget_steps > 0 and not self._maker.settings.pins
        return allowed and migration.record.generation == live.generation

    def _problem(self, run: _Run, live: LiveTopology) -> str:
        if self._executions.last is not run.newest:
            return "another migration was started"
        if live.generation != run.ranks.generation:
            return "the ranks have changed"
        if not self.budget_steps:
            return "planner.verify_budget_steps is 0"
        if run.moving and run.newest.done and run.newest.state is not MigrationState.COMMITTED:
            return f"migration {run.newest.migration_id}: {run.newest.record.problem}"
        if time.monotonic() - run.progressed_at > STALLED_SECONDS:
            return f"no block of steps was complete within {STALLED_SECONDS:.0f} s"
        return ""

    def _measure(self, run: _Run, live: LiveTopology) -> None:
        seconds = self._blocks.seconds(run.ranks.layout.world_size)
        if seconds is None:
            return
        run.progressed_at = time.monotonic()
        run.pairs.add(seconds)
        spent = self._blocks.steps() >= self.budget_steps
        effect = run.pairs.effect
        verdict = run.pairs.rule.verdict(effect, last=spent) if spent or not run.pairs.order else None
        if verdict is None:
            self._report(run, RUNNING, effect.describe(CONFIDENCE))
            self._next_block(run, live)
        else:
            self._conclude(run, verdict, effect, live)

    def _next_block(self, run: _Run, live: LiveTopology) -> None:
        pairs = run.pairs
        if not pairs.order:
            first = self._coin()
            pairs.order = [first, not first]
        if pairs.order[0] is run.at_plan:
            self._begin_block(run)
            return
        run.at_plan = pairs.order[0]
        self._move(run, run.changes.planned if run.at_plan else run.changes.without, live)

    def _begin_block(self, run: _Run) -> None:
        now = run.newest.record
        self._blocks.begin(now.last_version or now.base_version, BLOCK_STEPS)

    def _move(self, run: _Run, target: Placement, live: LiveTopology) -> None:
        run.moves, run.moving = run.moves + 1, True
        migration_id = run.plan.migration_id
        reason = f"verification of {migration_id}: a block {'with' if run.at_plan else 'without'} it"
        record = Trigger(TriggerKind.VERIFY, reason).record(
            f"{migration_id}.verify-{run.moves}", self._executions.live_plan_id, run.ranks.generation
        )
        run.newest = self._executions.start(record, target)

    def _conclude(self, run: _Run, verdict: Verdict, effect: Effect, live: LiveTopology) -> None:
        message = effect.describe(CONFIDENCE)
        migration_id = run.plan.migration_id
        stays = keeps_plan(verdict, takes_back=run.changes.takes_back)
        if not stays and verdict is not Verdict.SLOWER:
            message = f"{message}: no gain shown"
        if stays:
            self.decisions.release(run.kind)
            if not run.at_plan:
                run.at_plan = True
                self._move(run, run.changes.planned, live)
        else:
            self.decisions.hold((run.kind,), f"{migration_id} measured {message}", HOLD_SECONDS, time.time())
            run.newest = self._executions.start_rollback(
                run.plan.record, run.changes.base, run.ranks.generation, f"measured {message}", DAEMON_ACTOR,
                kind=TriggerKind.VERIFY,
            )  # fmt: skip
        self._end(run, verdict.value, message, rolled_back=not stays)

    def _end(self, run: _Run, state: str, message: str, *, rolled_back: bool = False) -> None:
        found = self._report(run, state, message, rolled_back=rolled_back)
        self._run, self._seen = None, run.newest
        self.ended[state] += 1
        outcome = "rolled back" if rolled_back else "the plan stays"
        self._record(found, f"{state}: {message}; {_NO_VERDICT if state == INTERRUPTED else outcome}")

    def _report(self, run: _Run, state: str, message: str, *, rolled_back: bool = False) -> VerificationReport:
        effect = run.pairs.effect
        self.newest = found = VerificationReport(
            migration_id=run.plan.migration_id, state=state, change=effect.share, low=effect.low,
            high=effect.high, pairs=effect.pairs, part=run.changes.part, steps=self._blocks.steps(),
            rolled_back=rolled_back, message=message,
        )  # fmt: skip
        return found

    def _record(self, ended: VerificationReport, message: str) -> None:
        logger.info("verification of %s: %s", ended.migration_id, message)
        self._history.record_action("verify", DAEMON_ACTOR, ended.migration_id, message)
        self._history.record_verification(ended)
        self.decisions.update(verification="")

    def _kept(self) -> VerificationReport | None:
        """Return the newest verification of an earlier daemon. The history itself reports a file that is unreadable."""
        with contextlib.suppress(SnapshotError):
            return self._history.newest_verification()
        return None

    def _close_unfinished(self) -> None:
        left = self.decisions.current.verification
        if left:
            message = f"the daemon ended; {_NO_VERDICT}"
            self.newest = VerificationReport(migration_id=left, state=INTERRUPTED, message=message)
            self._record(self.newest, f"interrupted: {message}")
