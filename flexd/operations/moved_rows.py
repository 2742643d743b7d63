"""Adds to a plan of copies the rows that live in other nodes than their homes."""

from __future__ import annotations

from flexd.config.planner import PlannerConfig
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Placement
from flexd.operations.affinity import AffinityMonitor
from flexd.operations.live_plan import slots_of_moves
from flexd.planner.affinity.outlook import AffinityOutlook
from flexd.planner.moves import MoveRoom, with_moves
from flexd.planner.plan import Plan


def plan_moves(
    plan: Plan,
    live: Placement,
    keyspace: KeySpace,
    topology: LiveTopology,
    settings: PlannerConfig,
    by_sums: frozenset[str],
    affinity: AffinityMonitor | None,
    accesses_per_step: float,
) -> tuple[Plan, AffinityOutlook | None]:
    """Learn homes by affinity, and return the plan with the rows that move by them, and what homes would win.

    Homes are those of the newest learning (``AffinityMonitor``), which a plan waits for only shortly. Without
    ``planner.moved_slots_share`` rows that have moved come home. While nothing is known of rows that are used
    together, they stay.

    Args:
        plan: of copies alone.
        live: with its moved rows.
        by_sums: tables that answer by sums, whose rows stay.
        affinity: None: rows that are used together are not sampled.
    """
    layout, room = topology.layout, None
    if settings.moved_slots_share > 0 and layout.nodes > 1:
        excluded = by_sums.union(settings.exclude_tables)
        room = MoveRoom(keyspace, layout, slots_of_moves(topology, settings), plan.target, excluded)
    outlook = wanted = None
    if affinity is not None:
        outlook, wanted = affinity.refresh(
            plan, layout, accesses_per_step, settings.horizon_steps, None if room is None else live, room
        )
    if room is None and not len(live.moved):
        return plan, outlook
    stays = Placement.empty() if room is None else room.fit_placement(live.moved)
    moved, saved_seconds = (stays, 0.0) if wanted is None else (wanted.moved, wanted.saved_seconds)
    if room is not None:
        moved = room.fit_placement(moved)
    made = with_moves(
        plan, moved, live, keyspace, layout, topology.replica_slots, settings.table_budgets, saved_seconds,
        live_fits=len(stays) == len(live.moved),
    )  # fmt: skip
    return made, outlook
