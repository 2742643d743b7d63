"""Plans that measure slower do not stay; those that measure faster do."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexd.config.sections import PinConfig
from flexd.control.daemon.migration import VerificationReport
from flexd.control.protocol.report import PlacementState, StepReport, UsedExchange
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.decisions import LONGEST_SECONDS, NAME, DecisionFile, StateDatabase
from flexd.operations.verification import Verifier, measured_changes
from tests.support.planning_harness import PlanningHarness, filled_harness

STEP_SECONDS = 0.1


class VerifiedJob:
    """A job of four ranks and its automatic planner.

    Args:
        effect: change of the step time by the copies of the first plan, as a share.
        load: factor of the step time, by step.
    """

    def __init__(
        self,
        directory: Path,
        effect: float,
        load: Callable[[int], float] = lambda step: 1.0,
        seed: int = 0,
        planner: dict[str, Any] | None = None,
        budget_steps: int = 2_000,
    ) -> None:
        self.directory = directory
        self.it: PlanningHarness = filled_harness(
            directory, min_spacing_seconds=0.0, verify_budget_steps=budget_steps, **(planner or {})
        )
        self.it.coordinator.obedient = True
        self.rng = np.random.default_rng(seed)
        self.effect, self.load = effect, load
        self.reason = "measured"
        """Why rank 0 uses its exchange."""
        self.step = 0
        self._most_copies = 1
        self.actions: list[tuple[str, ...]] = []
        self.verdicts: list[VerificationReport] = []
        self.start()

    def start(self) -> None:
        """Start a daemon over the files of the one before."""
        history: Any = SimpleNamespace(
            record_action=lambda *action: self.actions.append(action), record_verification=self.verdicts.append,
            newest_verification=lambda: self.verdicts[-1] if self.verdicts else None,
        )  # fmt: skip
        drift: Any = SimpleNamespace(pop_reason=lambda: None)
        self.decisions = DecisionFile(StateDatabase(self.directory / NAME))
        self.verifier = Verifier(
            self.it.planning.maker, self.it.planning.executions, self.it.coordinator, self.decisions, history,
            coin=lambda: bool(self.rng.integers(2)),
        )  # fmt: skip
        self.auto = AutoPlanner(
            self.it.config.planner, self.it.planning, drift, self.it.coordinator.live, verifier=self.verifier
        )

    def report(self) -> None:
        """Let every rank report one step."""
        self.step += 1
        now = self.it.coordinator.now
        copied = float(len(now)) / max(1, self.most_copies)
        seconds = STEP_SECONDS * self.load(self.step) * (1 + self.effect * copied)
        seconds *= 1 + 0.01 * float(self.rng.standard_normal())
        for rank in range(4):
            report = StepReport(self.step, 1, PlacementState(now.version, 0), seconds, 0.0, (1, 0, 0))
            self.verifier.add(rank, replace(report, exchange=UsedExchange("chain", "" if rank else self.reason)))

    @property
    def most_copies(self) -> int:
        """Most rows above HOME that a newest plan has listed so far."""
        plan = self.it.planning.last_plan
        self._most_copies = max(self._most_copies, 0 if plan is None else len(plan.target))
        return self._most_copies

    def tick(self, times: int = 1) -> None:
        """Report steps and tick the planner."""
        for _ in range(times):
            self.auto.tick()
            self.report()

    def verdict(self, steps: int = 4_000, *, after: VerificationReport | None = None) -> VerificationReport:
        """Run until the first verification, or the one ``after`` another, has ended, and return it."""
        for _ in range(steps):
            self.tick()
            newest = self.verifier.newest
            if newest is not None and newest != after and newest.state != "running":
                self.tick()
                return newest
        raise AssertionError(f"no verdict: {self.verifier.newest}")

    def device_rows(self) -> int:
        return int(np.count_nonzero(self.it.coordinator.now.tiers != Tier.HOME))


def load_doubles(step: int) -> float:
    return 2.0 if step > 150 else 1.0


@pytest.mark.parametrize("load", [lambda step: 1.0, load_doubles], ids=["steady", "load doubles"])
def test_a_slower_plan_is_rolled_back_with_its_figure_and_its_kind_is_held_back(tmp_path: Path, load) -> None:  # type: ignore[no-untyped-def]
    job = VerifiedJob(tmp_path, effect=+0.05, load=load, planner={"interval_seconds": 0.01})
    ended = job.verdict()
    assert (ended.state, ended.rolled_back) == ("slower", True)
    assert ended.change == pytest.approx(0.05, abs=0.01)
    assert ended.low > 0
    assert job.device_rows() == 0, "the placement before the plan"
    last = job.it.coordinator.migrations[-1]
    assert last.migration_id == f"{ended.migration_id}.rollback"
    assert (last.record.trigger, last.record.requested_by) == ("verify", "flexd")
    assert "measured 5" in last.record.reason or "measured 4" in last.record.reason
    assert "% slower (95 % interval" in last.record.reason
    (action,) = job.actions
    assert (action[0], action[2]) == ("verify", ended.migration_id)
    assert action[3].startswith("slower: ")
    assert action[3].endswith("rolled back")
    # The interval has passed many times: the daemon proposes such plans and does not carry them out.
    migrations = len(job.it.coordinator.migrations)
    time.sleep(0.02)
    job.tick(3)
    assert len(job.it.coordinator.migrations) == migrations
    assert any(not each.dry_run for each in job.it.planning.proposals.all())
    (message,) = job.verifier.decisions.held_reasons()
    assert message.startswith(f"{ended.migration_id} measured")


def test_a_faster_plan_stays(tmp_path: Path) -> None:
    job = VerifiedJob(tmp_path, effect=-0.05, load=load_doubles)
    ended = job.verdict()
    assert (ended.state, ended.rolled_back) == ("faster", False)
    assert ended.change == pytest.approx(-0.05, abs=0.01)
    assert (job.device_rows(), job.verifier.decisions.held_reasons()) == (job.most_copies, ())
    assert job.verifier.ended == {"faster": 1}
    migrations = len(job.it.coordinator.migrations)
    job.tick(50)
    assert len(job.it.coordinator.migrations) == migrations, "a plan is verified once"


def test_a_plan_waits_for_ranks_that_measure_arms_of_their_own(tmp_path: Path) -> None:
    job = VerifiedJob(tmp_path, effect=-0.05, planner={"interval_seconds": 0.001})
    job.reason = "trial"
    job.tick(100)
    assert (job.verifier.newest, len(job.it.coordinator.migrations)) == (None, 1), "nor is there another plan"
    job.reason = "measured"
    assert job.verdict().state == "faster"


def test_the_next_plan_waits_until_the_one_before_is_carried_out_and_measured(tmp_path: Path) -> None:
    """Over a migration that still runs it would leave the first plan's copies in place, unmeasured."""
    job = VerifiedJob(tmp_path, effect=0.05, planner={"interval_seconds": 0.001})
    job.it.coordinator.obedient = False
    job.tick(50)
    (migration,) = job.it.coordinator.migrations
    job.it.coordinator.obedient = True
    job.it.coordinator.execute(migration)
    assert job.device_rows()
    assert job.verdict().migration_id == migration.migration_id
    assert job.device_rows() == 0
    job = VerifiedJob(tmp_path / "unmeasured", effect=0.05, planner={"interval_seconds": 0.001}, budget_steps=0)
    job.it.coordinator.obedient = False
    job.tick(50)
    assert len(job.it.coordinator.migrations) > 1, "what is not measured need not wait"


def test_the_next_plan_does_not_stop_a_rollback(tmp_path: Path) -> None:
    job = VerifiedJob(tmp_path, effect=-0.05, planner={"interval_seconds": 0.001})
    job.verdict()
    executions, coordinator = job.it.planning.executions, job.it.coordinator
    coordinator.obedient = False
    rollback = executions.start_rollback(executions.last.record, Placement.empty(), 1, "", "user")
    job.it.see(500_000, seed=3)
    job.tick(50)
    assert coordinator.migrations[-1] is rollback
    coordinator.execute(rollback)
    job.tick(50)
    assert coordinator.migrations[-1] is not rollback


def test_the_budget_of_steps_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexd.operations.verification.RESOLUTION", 0.0)
    ended = VerifiedJob(tmp_path, effect=0.0, load=lambda step: 1.0, budget_steps=300).verdict()
    assert ended.state in ("undecided", "faster", "slower")
    assert ended.steps <= 300 + 16 + 2
    assert ended.rolled_back == (ended.state != "faster")


@pytest.mark.parametrize("promoted", [0, 1, 3])
def test_of_a_plan_that_rather_takes_rows_back_all_changes_are_measured(tmp_path: Path, promoted: int) -> None:
    keyspace, layout = filled_harness(tmp_path).config.keyspace(), RankLayout(2, 2)
    base = Placement.of(np.arange(5), np.array([1, 2, 2, 1, 1], dtype=np.uint8))
    after = Placement.of(
        np.r_[np.arange(3), 10 + np.arange(promoted)], np.r_[1, 1, 2, np.full(promoted, 2)].astype(np.uint8)
    )
    changes = measured_changes(base, after, keyspace, layout, 2**20)
    assert changes.takes_back is (promoted < 3)
    if changes.takes_back:
        assert (changes.part, changes.without.digest()) == (1.0, base.digest())
        assert 0 < measured_changes(base, after, keyspace, layout, 2 * 256).part < 1


def test_copies_that_measured_faster_are_not_taken_back_because_prices_say_so(tmp_path: Path) -> None:
    job = VerifiedJob(tmp_path, effect=-0.05, planner={"interval_seconds": 0.01})
    kept = job.verdict()
    assert kept.state == "faster"
    copies = job.device_rows()
    # So few look-ups in a step that copies cost more than they save by the model.
    job.it.planning.maker.accesses_per_step = lambda world_size: 4.0  # type: ignore[method-assign]
    taken_back = job.verdict(after=kept)
    assert (taken_back.state, taken_back.rolled_back) == ("slower", True)
    assert taken_back.change == pytest.approx(0.05, abs=0.01)
    assert job.device_rows() == copies
    migrations = len(job.it.coordinator.migrations)
    time.sleep(0.02)
    job.tick(3)
    assert len(job.it.coordinator.migrations) == migrations, "such plans are held back now"
    (message,) = job.verifier.decisions.held_reasons()
    assert "plans for HOME wait until" in message


def test_copies_that_may_not_stay_go_unmeasured_and_in_spite_of_a_hold(tmp_path: Path) -> None:
    job = VerifiedJob(tmp_path, effect=-0.05, planner={"interval_seconds": 0.01})
    kept = job.verdict()
    assert job.device_rows()
    job.verifier.decisions.hold(("HOME",), "p1 measured 5 % slower", 600.0, time.time())
    excluded = job.it.config.model_copy(
        update={"planner": job.it.config.planner.model_copy(update={"exclude_tables": ["item"]})}
    )
    job.it.planning.apply_config(excluded)
    time.sleep(0.02)
    job.tick(5)
    assert (job.device_rows(), job.verifier.newest) == (0, kept)


def test_another_migration_interrupts(tmp_path: Path) -> None:
    job = VerifiedJob(tmp_path, effect=-0.05)
    job.tick(60)
    assert job.verifier.newest.state == "running"
    job.it.see(500_000, seed=3)
    _, execution = job.it.execute("by hand")
    job.tick(2)
    assert job.actions[0][3].startswith("interrupted: another migration was started; no verdict")
    assert job.verifier.newest.migration_id == execution.migration_id, "the user's plan is verified next"


def test_a_daemon_that_ends_in_between_leaves_no_verdict_and_a_stated_end(tmp_path: Path) -> None:
    job = VerifiedJob(tmp_path, effect=+0.05)
    job.tick(60)
    migration_id = job.decisions.current.verification
    assert migration_id
    job.actions.clear()
    job.start()
    (action,) = job.actions
    assert (action[0], action[2]) == ("verify", migration_id)
    assert action[3].startswith("interrupted: the daemon ended; no verdict")
    job.start()
    assert len(job.actions) == 1, "stated once"


@pytest.mark.parametrize("effect", [-0.05, 0.05])
def test_a_verdict_outlives_the_daemon_with_its_figures(tmp_path: Path, effect: float) -> None:
    job = VerifiedJob(tmp_path, effect=effect)
    ended = job.verdict()
    job.start()
    assert job.verifier.newest == ended
    assert len(job.verdicts) == 1


def test_holds_outlive_the_daemon_double_and_end(tmp_path: Path) -> None:
    job = VerifiedJob(tmp_path, effect=0.0)
    now = time.time()
    waits = []
    for _ in range(12):
        job.verifier.decisions.hold(("NODE",), "p1 measured 5 % slower", 600.0, now)
        (held,) = job.decisions.current.held_plans
        waits.append(held.seconds)
    assert (waits[:3], waits[-1]) == ([600.0, 1200.0, 2400.0], LONGEST_SECONDS)
    job.start()
    assert job.verifier.decisions.held_reason("NODE", now + 1).startswith("p1 measured 5 % slower")
    assert job.verifier.decisions.held_reason("DEVICE", now + 1) == ""
    assert job.verifier.decisions.held_reason("NODE", now + LONGEST_SECONDS + 1) == ""
    job.verifier.decisions.release("NODE")
    assert job.decisions.current.held_plans == ()


@pytest.mark.parametrize(
    "options", [{"budget_steps": 0}, {"planner": {"pins": [PinConfig(table="item", tier="NODE", rows=[1])]}}]
)
def test_plans_with_pins_and_with_the_setting_off_are_not_measured(tmp_path: Path, options: dict[str, Any]) -> None:
    job = VerifiedJob(tmp_path, effect=+0.05, **options)
    job.tick(100)
    assert (job.verifier.newest, len(job.it.coordinator.migrations)) == (None, 1)
