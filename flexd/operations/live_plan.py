"""The plan for the live ranks and placement: copies, and rows that live in other nodes than their homes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexd.config.planner import PlannerConfig
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.protocol.trainer_settings import TrainerSettings
from flexd.core.keyspace import DTYPE_BYTES, KeySpace, TableSpec
from flexd.core.layout import Tier
from flexd.core.placement import Placement
from flexd.operations.affinity import AffinityMonitor
from flexd.planner.affinity.outlook import AffinityOutlook
from flexd.planner.model.row_bytes import Exchange
from flexd.planner.model.workload import TrainingShape
from flexd.planner.moves import MoveRoom, with_moves
from flexd.planner.plan import Plan, PlanOrigin, make_plan
from flexd.planner.solver.limits import PlanLimits, RowPin
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster


def plan_moves(
    plan: Plan,
    live: Placement,
    keyspace: KeySpace,
    topology: LiveTopology,
    settings: PlannerConfig,
    at_owner: frozenset[str],
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
        at_owner: tables that are pooled at the owner, whose rows stay.
        affinity: None: rows that are used together are not sampled.
    """
    layout, room = topology.layout, None
    if settings.moved_slots_share > 0 and layout.nodes > 1:
        excluded = at_owner.union(settings.exclude_tables)
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
        plan, moved, live, keyspace, layout, topology.replica_slots, saved_seconds,
        live_fits=len(stays) == len(live.moved),
    )  # fmt: skip
    return made, outlook


_EXCHANGES = {"chain": Exchange.CHAIN, "direct": Exchange.DIRECT_DEDUP}


@dataclass(frozen=True)
class TrainingJob:
    """How the ranks train, as they say when they register.

    Attributes:
        exchange, comm_dtype: of their collections.
        pooling_at: "requester" or "owner" by name of each pooled table.
        passes: forward passes for each step of the optimizer, as the ranks report them. Their gradients are pushed
            once.
    """

    exchange: Exchange = Exchange.CHAIN
    comm_dtype: str | None = None
    pooling_at: Mapping[str, str] = field(default_factory=dict)
    passes: int = 1

    @classmethod
    def of(cls, trainer: TrainerSettings | None, tables: Sequence[TableSpec], passes: int = 1) -> TrainingJob:
        """Return what the trainer says of itself, and the defaults for values that this version does not know.

        Args:
            tables: of the job, in order.
        """
        if trainer is None:
            return cls(passes=passes)
        return cls(
            _EXCHANGES.get(trainer.exchange, cls.exchange),
            trainer.comm_dtype if trainer.comm_dtype in DTYPE_BYTES else None,
            trainer.pooling_at_by_table(tables),
            passes,
        )

    @property
    def shape(self) -> TrainingShape:
        return TrainingShape(micro_batches=self.passes, comm_dtype=self.comm_dtype)

    @property
    def at_owner(self) -> frozenset[str]:
        """Tables that are pooled at the owner; none of their rows is copied or moves."""
        return frozenset(name for name, pooling_at in self.pooling_at.items() if pooling_at == "owner")


def cheaper_exchange(plan: Plan) -> str:
    """Return the configured name of the cheaper of the chain, with the plan's copies if it is for the chain, and the
    direct exchange with dedup."""
    costs = plan.costs
    chain, direct = costs.baselines["two_hop"], costs.baselines["row_wise_dedup"]
    if costs.exchange is Exchange.CHAIN:
        chain = costs.after
    else:
        direct = costs.after
    return "direct" if direct.exposed_seconds < chain.exposed_seconds else "chain"


def plan_limits(settings: PlannerConfig, job: TrainingJob) -> PlanLimits:
    """Return pins and excluded tables. No row of a table that is pooled at the owner is copied."""
    return PlanLimits(
        pins=tuple(
            RowPin(pin.table, Tier[pin.tier], None if pin.rows is None else np.array(pin.rows, dtype=np.int64))
            for pin in settings.pins
        ),
        exclude_tables=job.at_owner.union(settings.exclude_tables),
    )


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
) -> Plan:
    """Return ``make_plan`` with the configured limits and shape of the training.

    Raises:
        PlanError: as ``make_plan``.
    """
    return make_plan(
        profile, keyspace, topology.layout, cluster, slots_of_copies(topology, settings), live,
        PlanOrigin(plan_id, parent_id, topology.generation, reason, time.time()),
        horizon_steps=settings.horizon_steps, shape=job.shape, limits=plan_limits(settings, job),
        exchange=job.exchange, step_seconds=step_seconds,
    )  # fmt: skip


def slots_of_copies(topology: LiveTopology, settings: PlannerConfig) -> list[int]:
    """Return the replica slots of each dim-group that are not kept for rows that move."""
    kept = slots_of_moves(topology, settings)
    return [slots - of_moves for slots, of_moves in zip(topology.replica_slots, kept, strict=True)]


def slots_of_moves(topology: LiveTopology, settings: PlannerConfig) -> list[int]:
    """Return the replica slots of each dim-group that are kept for rows that move."""
    share = settings.moved_slots_share if topology.layout.nodes > 1 else 0.0
    return [int(share * slots) for slots in topology.replica_slots]
