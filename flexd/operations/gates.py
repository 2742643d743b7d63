"""Gates: refuse plans from a profile that is too thin, and withhold plans that save too little to be measured.

Either kind of plan would move rows because of noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexd.config.planner import MinSavingConfig, PlannerConfig
from flexd.core.errors import PlanError
from flexd.planner.plan import Plan
from flexd.sketch.profile import Profile

SAVING = "saving"
"""The gate that is measured on the plan; the others are measured on its profile."""
GATE_NAMES = ("samples", "coverage", "lag", SAVING)


@dataclass(frozen=True)
class Gate:
    """One measure of a profile and the bound that the configuration sets.

    Attributes:
        name: one of ``GATE_NAMES``.
        key: configuration key of the bound.
        measured: accesses, share, messages or seconds, in the order of ``GATE_NAMES``.
        required: the bound.
        at_most: whether the bound is an upper one.
        problem: description of the fault if the gate is closed.
        remedy: how to open a closed gate.
    """

    name: str
    key: str
    measured: float
    required: float
    at_most: bool
    problem: str
    remedy: str

    @property
    def open(self) -> bool:
        return self.measured <= self.required if self.at_most else self.measured >= self.required


def evaluate_gates(profile: Profile, settings: PlannerConfig) -> tuple[Gate, ...]:
    """Return the gates of a profile, open and closed, in the order of ``GATE_NAMES``."""
    seen = [table for table in profile.tables if table.weight > 0]
    weight = sum(table.weight for table in seen)
    coverage = sum(table.coverage * table.weight for table in seen) / weight if weight else 0.0
    return (
        Gate(
            "samples", "planner.min_samples", profile.samples, settings.min_samples, False,
            f"the profile is thin: {profile.samples} accesses seen, planner.min_samples is {settings.min_samples}",
            "wait for more of the stream, or lower planner.min_samples",
        ),
        Gate(
            "coverage", "planner.min_coverage", coverage, settings.min_coverage, False,
            f"the profile explains {coverage:.0%} of the accesses, planner.min_coverage is {settings.min_coverage:.0%}",
            "raise sketch.memory_bytes or sketch.max_hot_rows, or lower planner.min_coverage",
        ),
        Gate(
            "lag", "planner.max_lag_messages", profile.lag_messages, settings.max_lag_messages, True,
            f"{profile.lag_messages} messages of the stream are not read yet, planner.max_lag_messages is "
            f"{settings.max_lag_messages}",
            "wait until the daemon has caught up, lower stream.source.share, or raise planner.max_lag_messages",
        ),
    )  # fmt: skip


def saving_gate(plan: Plan, settings: MinSavingConfig) -> Gate:
    """Return the gate of ``planner.min_saving``.

    Open for a plan that changes nothing, and for one that is needed because the live placement breaks a limit."""
    required = max(settings.seconds, settings.share * (plan.step_seconds or 0.0))
    if len(plan.delta) == 0 or not plan.live_fits:
        required = min(required, plan.saved_seconds)
    share = "" if plan.saved_share is None else f" ({plan.saved_share:.3%} of it)"
    return Gate(
        SAVING, "planner.min_saving", plan.saved_seconds, required, False,
        f"the plan would save {1e6 * plan.saved_seconds:.3f} us a step{share}, planner.min_saving asks for "
        f"{1e6 * required:.3f} us",
        "nothing to do: the live placement stays; lower planner.min_saving to move rows for less",
    )  # fmt: skip


def require_open(checked: Sequence[Gate]) -> None:
    """Raise PlanError naming every closed gate, if there is one."""
    closed = [gate for gate in checked if not gate.open]
    if closed:
        raise PlanError("; ".join(gate.problem for gate in closed), remedy="; ".join(gate.remedy for gate in closed))
