"""The plan for the live ranks and placement, as automatic planning, requests and the measure of drift make it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexd.config.planner import PlannerConfig
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Placement
from flexd.operations.plan_settings import TrainingJob, plan_limits
from flexd.planner.model.bag_answers import LENGTH_RANKS, answer_bytes, choose_answers
from flexd.planner.plan import Plan, make_plan
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster

LengthQuantiles = Callable[[str, Sequence[float]], npt.NDArray[np.float64]]
"""Returns the lengths of a table's sequences or bags at normalised ranks, as ``SketchSet``."""


def make_live_plan(
    profile: Profile,
    keyspace: KeySpace,
    topology: LiveTopology,
    cluster: Cluster,
    live: Placement,
    settings: PlannerConfig,
    job: TrainingJob,
    *,
    plan_id: str,
    parent_id: str = "",
    reason: str = "",
    step_seconds: float | None = None,
    bag_lengths: LengthQuantiles | None = None,
) -> Plan:
    """Return ``make_plan`` with the configured limits and shape of the training.

    Args:
        bag_lengths: None: answers of pooled tables are not compared.

    Raises:
        PlanError: as ``make_plan``.
    """
    shape = job.shape
    plan = make_plan(
        profile, keyspace, topology.layout, cluster, slots_of_copies(topology, settings), live, plan_id=plan_id,
        parent_id=parent_id, topology_generation=topology.generation, horizon_steps=settings.horizon_steps,
        now_unix_seconds=time.time(), reason=reason, shape=shape, limits=plan_limits(settings, job),
        exchange=job.exchange, step_seconds=step_seconds,
    )  # fmt: skip
    if bag_lengths is None or not job.answers:
        return plan
    lengths = {name: bag_lengths(name, LENGTH_RANKS) for name in job.answers}
    of_tables = answer_bytes(profile, keyspace, topology.layout, lengths, shape)
    chosen = choose_answers(of_tables, job.answers, cluster, plan.after.bytes, topology.layout, shape)
    return replace(plan, pooled_tables=chosen)


def slots_of_copies(topology: LiveTopology, settings: PlannerConfig) -> list[int]:
    """Return the replica slots of each dim-group that are not kept for rows that move."""
    kept = slots_of_moves(topology, settings)
    return [slots - of_moves for slots, of_moves in zip(topology.replica_slots, kept, strict=True)]


def slots_of_moves(topology: LiveTopology, settings: PlannerConfig) -> list[int]:
    """Return the replica slots of each dim-group that are kept for rows that move."""
    share = settings.moved_slots_share if topology.layout.nodes > 1 else 0.0
    return [int(share * slots) for slots in topology.replica_slots]
