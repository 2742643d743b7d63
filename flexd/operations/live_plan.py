"""The plan for the live ranks and placement, as automatic planning, requests and the measure of drift make it."""

from __future__ import annotations

import time

from flexd.config.planner import PlannerConfig
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Placement
from flexd.operations.plan_settings import plan_limits, running_exchange, training_shape
from flexd.planner.plan import Plan, make_plan
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster


def make_live_plan(
    profile: Profile,
    keyspace: KeySpace,
    topology: LiveTopology,
    cluster: Cluster,
    live: Placement,
    settings: PlannerConfig,
    *,
    plan_id: str,
    parent_id: str = "",
    reason: str = "",
    step_seconds: float | None = None,
    bound_busiest_rank: bool = True,
) -> Plan:
    """Return ``make_plan`` with the configured limits and shape of the training.

    Raises:
        PlanError: as ``make_plan``.
    """
    return make_plan(
        profile, keyspace, topology.layout, cluster, topology.replica_slots, live, plan_id=plan_id,
        parent_id=parent_id, topology_generation=topology.generation, horizon_steps=settings.horizon_steps,
        now_unix_seconds=time.time(), reason=reason, shape=training_shape(settings), limits=plan_limits(settings),
        exchange=running_exchange(settings), step_seconds=step_seconds,
        bound_busiest_rank=bound_busiest_rank,
    )  # fmt: skip
