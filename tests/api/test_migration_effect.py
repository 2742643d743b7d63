"""The predicted saving of a migration beside the measured one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flexd.api.migration import MigrationEffect, migration_effect
from flexd.control.protocol.report import StepReport
from flexd.operations.effects import effect_of
from tests.support.planning_harness import PlanningHarness, filled_harness


def steps(it: PlanningHarness, version: int, *seconds: float, apply_seconds: float = 0.0) -> None:
    for rank in range(4):
        for each in seconds:
            it.training.add(rank, StepReport(1, 1, version, 0, each, apply_seconds, (1, 0, 0)))


def test_a_migration_has_its_predicted_saving_beside_the_steps_before_and_after(tmp_path: Path) -> None:
    it = filled_harness(tmp_path)
    steps(it, 0, 0.1, 0.12)
    plan, execution = it.execute("first")
    assert execution is not None
    migration = execution.migration

    def measured() -> MigrationEffect:
        found = migration_effect(replace(migration.record, effect=effect_of(migration, it.training.step_times)))
        assert found is not None
        return found

    waiting = measured()
    assert (waiting.predicted_saving_seconds, waiting.before, waiting.after) == (plan.saved_seconds, None, None)
    it.coordinator.execute(execution.migration)
    last = it.coordinator.now.version
    steps(it, last, 5.0, apply_seconds=4.0)
    effect = measured()
    assert effect.after is effect.measured_saving_seconds is None
    assert effect.before is not None
    assert effect.before.mean_seconds == pytest.approx((0.1 + 0.12) / 2)
    steps(it, last, 0.08, 0.06)
    effect = measured()
    assert effect.before is not None
    assert effect.after is not None
    assert (effect.after.mean_seconds, effect.after.steps) == (pytest.approx(0.07), 2)
    assert effect.measured_saving_seconds == pytest.approx(0.04)
    assert effect.measured_error_seconds is not None
    assert effect.measured_error_seconds > 0
    assert "measured 40 ms" in effect.words()
