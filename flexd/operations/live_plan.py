"""The plan for the live ranks and placement: copies, and rows that live in other nodes than their homes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexd.config.planner import PlannerConfig
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.protocol.report import TrainerSettings
from flexd.core.errors import PlanError
from flexd.core.keyspace import DTYPE_BYTES, KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.operations.affinity import AffinityMonitor
from flexd.operations.live_prices import LivePrices
from flexd.operations.training_monitor import TrainingMonitor
from flexd.planner.affinity.outlook import AffinityOutlook
from flexd.planner.drift import Drift, compare_placements
from flexd.planner.model.row_bytes import Exchange
from flexd.planner.model.workload import TrainingShape
from flexd.planner.moves import MoveRoom, with_moves
from flexd.planner.plan import Plan, PlanOrigin, make_plan
from flexd.planner.solver.limits import PlanLimits, RowPin
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster

_EXCHANGES = {"chain": Exchange.CHAIN, "direct": Exchange.DIRECT_DEDUP}


@dataclass(frozen=True)
class TrainingJob:
    """Settings of the training, as the ranks say when they register.

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


@dataclass(frozen=True)
class PlanBasis:
    """The input of a plan: one look at ranks, placement, prices and accesses.

    Attributes:
        live: the placement.
        per_step: accesses of the whole job per step.
        step_seconds: measured wall time of a step; None if it is not known.
    """

    keyspace: KeySpace
    topology: LiveTopology
    job: TrainingJob
    cluster: Cluster
    live: Placement
    profile: Profile
    per_step: float
    step_seconds: float | None

    def plan(self, settings: PlannerConfig, plan_id: str, parent_id: str = "", reason: str = "") -> Plan:
        """Return ``make_plan`` with the configured limits and shape of the training. Raises PlanError."""
        return make_plan(
            self.profile, self.keyspace, self.topology.layout, self.cluster, slots_of_copies(self.topology, settings),
            self.live, PlanOrigin(plan_id, parent_id, self.topology.generation, reason, time.time()),
            horizon_steps=settings.horizon_steps, shape=self.job.shape,
            limits=plan_limits(settings, self.job), exchange=self.job.exchange, step_seconds=self.step_seconds,
        )  # fmt: skip

    def drift(self, target: Placement, placement: Placement) -> Drift:
        """Return how much more ``placement`` costs than ``target``, by these accesses and prices."""
        return compare_placements(
            self.profile, self.keyspace, self.topology.layout, self.cluster, target, placement, self.job.shape,
            self.job.exchange,
        )  # fmt: skip


class PlanMaker:
    """Looks at what plans are made from. Thread-safe.

    Args:
        prices: the cluster that prices plans.
        profile: makes the profile of (accesses of the whole job per step, layout of the ranks).
    """

    def __init__(
        self,
        keyspace: KeySpace,
        prices: LivePrices,
        profile: Callable[[float, RankLayout], Profile],
        coordinator: Coordinator,
        training: TrainingMonitor,
    ) -> None:
        self.keyspace = keyspace
        self.prices = prices
        self._profile = profile
        self._coordinator = coordinator
        self._training = training

    def topology(self) -> LiveTopology:
        """Return the ranks. Raises PlanError if not all are ready."""
        live = self._coordinator.live()
        if live is None or not live.ready:
            raise PlanError(
                f"no plan without ranks: {self._coordinator.status().reason}",
                remedy="start the training, or check that it uses this daemon's control address",
            )
        return live

    def accesses_per_step(self, settings: PlannerConfig, world_size: int) -> float | None:
        """Return the accesses of the whole job per step with so many ranks; None if not known yet."""
        return self._training.accesses_per_step(world_size) or settings.batch_accesses_per_step

    def basis(self, settings: PlannerConfig) -> PlanBasis:
        """Look now. Raises PlanError if not all ranks are ready, or the accesses of a step are not known."""
        topology = self.topology()
        per_step = self.accesses_per_step(settings, topology.layout.world_size)
        if not per_step:
            raise PlanError(
                "the accesses of a training step are not known yet",
                remedy="wait for the ranks' first report, or set planner.batch_accesses_per_step",
            )
        job = TrainingJob.of(topology.trainer, self.keyspace.tables, self._training.passes_per_step())
        placement = self._coordinator.placement()
        return PlanBasis(
            self.keyspace, topology, job, self.prices.cluster, placement, self._profile(per_step, topology.layout),
            per_step, self._training.step_seconds(),
        )  # fmt: skip


def plan_moves(
    plan: Plan, basis: PlanBasis, settings: PlannerConfig, affinity: AffinityMonitor | None
) -> tuple[Plan, AffinityOutlook | None]:
    """Learn homes by affinity, and return the plan with the rows that move by them, and what homes would win.

    Homes are those of the newest learning (``AffinityMonitor``), which a plan waits for only shortly. Without
    ``planner.rehomed_slots_share`` rows that have moved come home. While nothing is known of rows that are used
    together, they stay.

    Args:
        plan: of copies alone.
        affinity: None: rows that are used together are not sampled.
    """
    live, topology, keyspace, room = basis.live, basis.topology, basis.keyspace, None
    layout = topology.layout
    if settings.rehomed_slots_share > 0 and layout.nodes > 1:
        excluded = basis.job.at_owner.union(settings.exclude_tables)
        room = MoveRoom(keyspace, layout, slots_of_moves(topology, settings), plan.target, excluded)
    outlook = wanted = None
    if affinity is not None:
        outlook, wanted = affinity.refresh(
            plan, layout, basis.per_step, settings.horizon_steps, None if room is None else live, room
        )
    if room is None and not len(live.rehomed):
        return plan, outlook
    stays = Placement.empty() if room is None else room.fit_placement(live.rehomed)
    moved, saved_seconds = (stays, 0.0) if wanted is None else (wanted.moved, wanted.saved_seconds)
    if room is not None:
        moved = room.fit_placement(moved)
    made = with_moves(
        plan, moved, live, keyspace, layout, topology.replica_slots, saved_seconds,
        live_fits=len(stays) == len(live.rehomed),
    )  # fmt: skip
    return made, outlook


def slots_of_copies(topology: LiveTopology, settings: PlannerConfig) -> list[int]:
    """Return the replica slots of each dim-group that are not kept for rows that move."""
    kept = slots_of_moves(topology, settings)
    return [slots - of_moves for slots, of_moves in zip(topology.replica_slots, kept, strict=True)]


def slots_of_moves(topology: LiveTopology, settings: PlannerConfig) -> list[int]:
    """Return the replica slots of each dim-group that are kept for rows that move."""
    share = settings.rehomed_slots_share if topology.layout.nodes > 1 else 0.0
    return [int(share * slots) for slots in topology.replica_slots]
