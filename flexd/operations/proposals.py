"""Plans that were made and can still be carried out: what ``flexd apply`` chooses from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.core.errors import ApiError, PlanError
from flexd.core.placement import Placement
from flexd.operations.gates import Gate
from flexd.operations.triggers import Trigger
from flexd.planner.drift import PlacementTraffic
from flexd.planner.plan import Plan

LATEST = "latest"
MAX_PER_KIND = 4
"""Kept dry runs, and kept proposals of the daemon's own: a million replicated rows take about 27 MB each."""


@dataclass(frozen=True)
class Proposal:
    """A plan that was made, with what decides whether it may be carried out.

    Attributes:
        live: the placement it starts from.
        gates: of the profile it was made from.
        trigger: why it was made.
        traffic: of its target, under the profile it was made from.
        dry_run: somebody only wanted to see it.
    """

    plan: Plan
    live: Placement
    gates: tuple[Gate, ...]
    trigger: Trigger
    traffic: PlacementTraffic
    dry_run: bool = False

    @property
    def closed_gates(self) -> tuple[Gate, ...]:
        return tuple(gate for gate in self.gates if not gate.open)


class Proposals:
    """The newest of each kind, bounded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Proposal] = OrderedDict()

    def add(self, proposal: Proposal) -> None:
        """The oldest of the same kind leaves: looking never pushes out what the daemon proposed."""
        with self._lock:
            self._kept[proposal.plan.plan_id] = proposal
            same = [name for name, other in self._kept.items() if other.dry_run == proposal.dry_run]
            for name in same[:-MAX_PER_KIND]:
                del self._kept[name]

    def remove(self, plan_id: str) -> None:
        """It was carried out, or is of no use any more."""
        with self._lock:
            self._kept.pop(plan_id, None)

    def all(self) -> tuple[Proposal, ...]:
        """Oldest first."""
        with self._lock:
            return tuple(self._kept.values())

    def get(self, plan_id: str) -> Proposal:
        """By id, or the newest for ``LATEST``.

        Raises:
            ApiError: none of that id is kept (404).
        """
        kept = {proposal.plan.plan_id: proposal for proposal in self.all()}
        if plan_id == LATEST and kept:
            return next(reversed(kept.values()))
        if plan_id not in kept:
            remedy = f"kept are {', '.join(kept)}" if kept else "none is kept: flexd plan makes one"
            raise ApiError(f"no proposal {plan_id[:100]!r}", status=404, remedy=remedy)
        return kept[plan_id]


def outdated(
    proposal: Proposal, topology: LiveTopology | None, placement: Placement, *, migrating: bool, age_seconds: float,
    max_age_seconds: float,
) -> str:  # fmt: skip
    """Why it cannot be carried out any more, by what is known without looking at the accesses; empty if it can."""
    if topology is None or not topology.ready:
        return "the ranks are not all there"
    if topology.generation != proposal.plan.topology_generation:
        return (
            f"the ranks have changed: it is for topology generation {proposal.plan.topology_generation}, they are at "
            f"{topology.generation}"
        )
    if migrating:
        return "a migration is running: it moves what this plan starts from"
    if placement.version != proposal.live.version or placement.digest() != proposal.live.digest():
        return (
            f"the placement has moved on: it starts from version {proposal.live.version}, the ranks are at "
            f"{placement.version}"
        )
    if age_seconds > max_age_seconds:
        return f"it is {age_seconds:.0f} s old, planner.max_proposal_age_seconds is {max_age_seconds:.0f}"
    return ""


def refuse_if(outdated: str, plan_id: str) -> None:
    """Raises PlanError if there is a reason."""
    if outdated:
        raise PlanError(f"plan {plan_id} is not carried out: {outdated}", remedy="flexd plan makes a new one")
