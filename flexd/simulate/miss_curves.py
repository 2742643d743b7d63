"""Curves of misses of simulated accesses: what frames of a rank's home rows would miss."""

from __future__ import annotations

from flexd.core.layout import RankLayout
from flexd.planner.memory.miss_curve import MissCurve
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import make_loads
from flexd.simulate.accesses import Accesses
from flexd.simulate.exact_profile import exact_profile


def miss_curves(accesses: Accesses, layout: RankLayout, steps: range | None = None) -> tuple[MissCurve, ...]:
    """Return a curve a dim-group, from the touches of every row in these steps (default: all).

    Raises:
        PlanError: nothing was looked up in them.
    """
    passes = [one for step in steps or range(accesses.steps) for one in accesses.passes(step)]
    profile = exact_profile(passes, accesses.keyspace, layout, accesses.micro_batches)
    loads = make_loads(profile, accesses.keyspace, layout, TrainingShape(micro_batches=accesses.micro_batches))
    groups = accesses.keyspace.groups
    return tuple(MissCurve.of(load, layout, groups[load.group].rows) for load in loads)
