"""Plans that were made and can still be executed with ``flexd apply``, and the gates that hold plans back.

Gates refuse plans from a profile that is too thin, and withhold plans that save too little to be measured: either would
move rows because of noise.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from flexd.config.planner import MinSavingConfig, PlanGatesConfig
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.core.errors import ApiError, PlanError
from flexd.core.placement import Placement
from flexd.operations.triggers import Trigger
from flexd.planner.affinity.outlook import AffinityOutlook
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


def evaluate_gates(profile: Profile, settings: PlanGatesConfig) -> tuple[Gate, ...]:
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
        f"the plan would save {1e6 * plan.saved_seconds:.3f} us per step{share}, planner.min_saving asks for "
        f"{1e6 * required:.3f} us",
        "nothing to do: the live placement stays; lower planner.min_saving to move rows for less",
    )  # fmt: skip


def require_open(checked: Sequence[Gate]) -> None:
    """Raise PlanError naming every closed gate, if there is one."""
    closed = [gate for gate in checked if not gate.open]
    if closed:
        raise PlanError("; ".join(gate.problem for gate in closed), remedy="; ".join(gate.remedy for gate in closed))


LATEST = "latest"
MAX_PER_KIND = 4
MAX_AGE_SECONDS = 3600.0
"""An older proposal is not carried out."""
"""Limit of kept dry runs, and of kept proposals that are none. One of a million replicated rows takes about 27 MB."""


@dataclass(frozen=True)
class Proposal:
    """A plan with everything that decides whether it may still be executed.

    Attributes:
        live: the placement that the plan starts from.
        gates: the gates of its profile.
        trigger: why it was made.
        dry_run: whether it was made for display only.
        affinity: what homes and dealing by affinity would win; None if rows that occur together are not sampled.
    """

    plan: Plan
    live: Placement
    gates: tuple[Gate, ...]
    trigger: Trigger
    dry_run: bool = False
    affinity: AffinityOutlook | None = None

    @property
    def closed_gates(self) -> tuple[Gate, ...]:
        return tuple(gate for gate in self.gates if not gate.open)

    @property
    def withheld(self) -> str:
        """Why the plan saves too little to be executed; empty if it does not."""
        return next((gate.problem for gate in self.closed_gates if gate.name == SAVING), "")


class Proposals:
    """The newest dry runs and the newest other proposals. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Proposal] = OrderedDict()

    def add(self, proposal: Proposal) -> None:
        """Add a proposal and drop the oldest of its kind, so that dry runs never displace the daemon's proposals."""
        with self._lock:
            self._kept[proposal.plan.plan_id] = proposal
            same = [name for name, other in self._kept.items() if other.dry_run == proposal.dry_run]
            for name in same[:-MAX_PER_KIND]:
                del self._kept[name]

    def remove(self, plan_id: str) -> None:
        """Remove a proposal that was executed or can no longer be."""
        with self._lock:
            self._kept.pop(plan_id, None)

    def all(self) -> tuple[Proposal, ...]:
        """Return all proposals, oldest first."""
        with self._lock:
            return tuple(self._kept.values())

    def get(self, plan_id: str) -> Proposal:
        """Return a proposal by id, or the newest for ``LATEST``.

        Raises:
            ApiError: there is no proposal of that id (404).
        """
        kept = {proposal.plan.plan_id: proposal for proposal in self.all()}
        if plan_id == LATEST and kept:
            return next(reversed(kept.values()))
        if plan_id not in kept:
            remedy = f"proposals: {', '.join(kept)}" if kept else "flexd plan makes one"
            raise ApiError(f"no proposal {plan_id[:100]!r}", status=404, remedy=remedy)
        return kept[plan_id]


def outdated(
    proposal: Proposal, topology: LiveTopology | None, placement: Placement, *, migrating: bool, age_seconds: float,
) -> str:  # fmt: skip
    """Return why a proposal can no longer be executed, without evaluating the accesses; empty if it can."""
    if topology is None or not topology.ready:
        return "not all ranks are ready"
    generation = proposal.plan.origin.topology_generation
    if topology.generation != generation:
        return f"the ranks have changed: it is for topology generation {generation}, they are at {topology.generation}"
    if migrating:
        return "a migration is running: it moves what this plan starts from"
    if placement.version != proposal.live.version or placement.digest() != proposal.live.digest():
        return (
            f"the placement has moved on: it starts from version {proposal.live.version}, the ranks are at "
            f"{placement.version}"
        )
    if age_seconds > MAX_AGE_SECONDS:
        return f"it is {age_seconds:.0f} s old, {MAX_AGE_SECONDS:.0f} s at most"
    return ""


def require_current(outdated: str, plan_id: str) -> None:
    """Raise PlanError if ``outdated`` gives a reason."""
    if outdated:
        raise PlanError(f"plan {plan_id} is not executed: {outdated}", remedy="flexd plan makes a new one")
