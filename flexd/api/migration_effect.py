"""The predicted saving of a migration beside the measured one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flexd.api.base import FiniteOrNone, Model
from flexd.api.families import gauges
from flexd.core import units

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.control.daemon.migration_record import MigrationRecord


class MeasuredSteps(Model):
    """Steps at one placement version, without those that applied chunks."""

    mean_seconds: FiniteOrNone = None
    """Mean wall time of a step."""
    error_seconds: FiniteOrNone = None
    """Standard error of the mean; null if too few were reported."""
    steps: int = 0
    """Steps that were measured."""


class MigrationEffect(Model):
    """The saving of a step that a plan predicted, beside the steps before and after its migration. A load that changes
    at the same time is in the difference; ``planner.verify`` separates the two."""

    predicted_saving_seconds: FiniteOrNone = None
    """Exposed seconds a step, by the plan; null for a rollback."""
    measured_saving_seconds: FiniteOrNone = None
    """Mean step before minus mean step after; null until both are measured."""
    measured_error_seconds: FiniteOrNone = None
    """Standard error of the measured saving."""
    before: MeasuredSteps | None = None
    """Steps at the placement that it started from; null if none was measured."""
    after: MeasuredSteps | None = None
    """Steps at the placement that it led to; null until it has committed and steps were measured."""

    def words(self) -> str:
        """Return the predicted saving of a step beside the measured one."""
        return f"{units.seconds(self.predicted_saving_seconds)}, measured {units.seconds(self.measured_saving_seconds)}"

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the newest migration's effect."""
        yield gauges(
            "flexd_migration_saving_seconds",
            "Of a step, by the newest migration: as its plan predicted, and as the steps before and after it differ; "
            "NaN where it is not known.",
            "kind",
            {"predicted": self.predicted_saving_seconds, "measured": self.measured_saving_seconds},
        )


def migration_effect(record: MigrationRecord) -> MigrationEffect | None:
    """Return the predicted saving of a migration beside the steps before and after it; None if neither is known."""
    effect = record.effect
    if effect is None:
        predicted = record.predicted_saving_seconds
        return None if predicted is None else MigrationEffect(predicted_saving_seconds=predicted)
    return MigrationEffect(
        predicted_saving_seconds=record.predicted_saving_seconds,
        measured_saving_seconds=effect.saving_seconds,
        measured_error_seconds=effect.error_seconds,
        before=_steps(effect.before_seconds, effect.before_error_seconds, effect.before_steps),
        after=_steps(effect.after_seconds, effect.after_error_seconds, effect.after_steps),
    )


def _steps(mean_seconds: float | None, error_seconds: float | None, steps: int) -> MeasuredSteps | None:
    if mean_seconds is None:
        return None
    return MeasuredSteps(mean_seconds=mean_seconds, error_seconds=error_seconds, steps=steps)
