"""The plan for the live ranks and placement: copies, and rows that live in other nodes than their homes.

It is priced by the cluster as steps show it: its curves corrected by what steps report, with the exposure that they
report.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.config.sections import PlannerConfig
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import LiveTopology
from flexd.control.protocol.report import PHASE_QUANTITIES, StepReport, TrainerSettings
from flexd.core.errors import PlanError
from flexd.core.keyspace import DTYPE_BYTES, KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.core.step_phases import StepPhase
from flexd.operations.affinity import AffinityMonitor
from flexd.operations.training_monitor import PHASES, PhaseAverages, TrainingMonitor, phase_values
from flexd.planner.affinity.outlook import AffinityOutlook
from flexd.planner.drift import Drift, compare_placements
from flexd.planner.model.prices import Exchange, PriceCorrection
from flexd.planner.model.workload import TrainingShape
from flexd.planner.moves import MoveRoom, with_moves
from flexd.planner.plan import Plan, PlanOrigin, make_plan
from flexd.planner.solver.assign import PlanLimits, RowPin
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster, Collective, CollectiveCurve, Exposed, Link

Float64Array = npt.NDArray[np.float64]


_SHARE_CHANGE, _COVER_CHANGE = 0.05, 0.1
"""Smaller changes are noise; plans made at other prices are hard to compare."""


def exposure(phases: PhaseAverages) -> Exposed:
    """Return the share of each part of the communication that did not run beside the training thread, and the compute
    that can cover the rest. Without collectives of a part its share is that of the whole."""
    communication = phases.quantity("intra_seconds") + phases.quantity("inter_seconds")
    overlapped = phases.quantity("overlapped_seconds")

    def share(*of: StepPhase) -> float | None:
        numbers = [PHASES[phase] for phase in of]
        total = float(communication[numbers].sum())
        return None if total <= 0 else min(1.0, max(0.0, 1.0 - float(overlapped[numbers].sum()) / total))

    whole = share(StepPhase.IDS, StepPhase.ROWS, StepPhase.PUSH, StepPhase.SYNC)
    parts = (share(StepPhase.IDS, StepPhase.ROWS), share(StepPhase.PUSH), share(StepPhase.SYNC))
    forward, backward, sync = (part if part is not None else whole if whole is not None else 1.0 for part in parts)
    return Exposed(forward, backward, sync, max(0.0, phases.cover_seconds))


_SHARES = attrgetter("forward", "backward", "sync")


def differs(known: Exposed, measured: Exposed) -> bool:
    """Return whether prices change by more than noise."""
    if any(abs(a - b) > _SHARE_CHANGE for a, b in zip(_SHARES(known), _SHARES(measured), strict=True)):
        return True
    larger, hidden = max(known.cover_seconds, measured.cover_seconds), min(_SHARES(measured)) < 1.0
    return hidden and (math.isinf(larger) or abs(known.cover_seconds - measured.cover_seconds) > _COVER_CHANGE * larger)


def priced_by(cluster: Cluster, measured: Exposed | None) -> Cluster:
    """Return the cluster with measured exposure instead of that of its file, named in its name."""
    if measured is None or min(*_SHARES(measured), *_SHARES(cluster.exposed)) >= 1.0:
        return cluster
    message = "nothing runs beside compute"
    if min(_SHARES(measured)) < 1.0:
        message = (
            f"outside compute forward {measured.forward:.2f}, backward {measured.backward:.2f}, "
            f"sync {measured.sync:.2f}; {1e3 * measured.cover_seconds:.3g} ms cover the rest"
        )
    return cluster.with_exposed(measured, f"{cluster.name} (measured: {message})")


def price_samples(
    values: Float64Array, layout: RankLayout, cluster: Cluster, exchange: str
) -> dict[Link, tuple[float, float]]:
    """Return the (predicted, measured) seconds of a step's exchange for each link that it uses.

    A collective takes as long as for the rank of its group that waits least: the others wait for that one too, which is
    no price of the link. Its bytes are those of the group's busiest rank. Sums over steps give the least only
    where the same rank is late in all of them; where ranks take turns they lie above it.

    Args:
        values: float64[rank, phase, quantity] of a mean step.
        cluster: as a job of this layout uses it (``Cluster.of_layout``).
        exchange: as ranks report it (``chain``, ``direct``).
    """
    nodes = [layout.node_ranks(node) for node in range(layout.nodes)]
    rails = [layout.rail_ranks(local) for local in range(layout.local_ranks)]
    all_to_all = {link: cluster.curve(link, Collective.ALL_TO_ALL) for link in (Link.INTRA_NODE, Link.INTER_NODE)}
    if exchange != "chain":
        everyone = [list(range(layout.world_size))]
        if layout.nodes == 1:
            return {Link.INTRA_NODE: _exchange(values, everyone, "intra", all_to_all[Link.INTRA_NODE])}
        over_all = all_to_all[Link.INTER_NODE] if cluster.world is None else cluster.world.all_to_all
        return {Link.INTER_NODE: _exchange(values, everyone, "inter", over_all)}
    found = {}
    if layout.local_ranks > 1:
        found[Link.INTRA_NODE] = _exchange(values, nodes, "intra", all_to_all[Link.INTRA_NODE])
    if layout.nodes > 1:
        found[Link.INTER_NODE] = _exchange(values, rails, "inter", all_to_all[Link.INTER_NODE])
    return found


def _exchange(
    values: Float64Array, groups: Sequence[Sequence[int]], link: str, curve: CollectiveCurve
) -> tuple[float, float]:
    """Sizes travel with the ids' phase in collectives of their own: a message of ids has the bytes of that phase over
    the messages of rows."""

    def over_groups(phase: StepPhase, quantity: str, within: Any) -> float:
        of_ranks = values[:, PHASES[phase], PHASE_QUANTITIES.index(f"{link}_{quantity}")]
        return float(np.mean([within(of_ranks[list(group)]) for group in groups]))

    predicted = measured = 0.0
    row_messages = over_groups(StepPhase.ROWS, "collectives", np.max)
    for phase in (StepPhase.IDS, StepPhase.ROWS, StepPhase.PUSH):
        number = over_groups(phase, "collectives", np.max)
        if number <= 0:
            continue
        busiest = over_groups(phase, "bytes", np.max)
        messages = row_messages if phase is StepPhase.IDS and row_messages else number
        predicted += number * curve.latency_seconds + busiest * curve.seconds_per_byte(busiest / max(messages, 1e-9))
        measured += max(0.0, over_groups(phase, "seconds", np.min))
    return predicted, measured


MIN_STEPS, MIN_SECONDS = 8, 1.0
"""Reports that are learnt from at once have at least so many steps of every rank, and so much of their time."""
LINK_WORDS = {Link.INTRA_NODE: "in nodes", Link.INTER_NODE: "between nodes"}


class _RankSums:
    """Steps of one rank that were not learnt from yet."""

    def __init__(self, exchange: str) -> None:
        self.values: Float64Array = np.zeros(())
        self.steps = 0
        self.seconds = 0.0
        self.exchange = exchange


class LivePrices:
    """Thread-safe. What was learnt holds for one topology generation and is not saved: it is learnt again within
    ``MIN_REPORTS`` times the larger of ``MIN_STEPS`` and ``MIN_SECONDS``, and after a restart links may be others.

    Args:
        cluster: of the topology file or preset.
        training: measures the exposure.
        ranks: the coordinator, which knows the live ranks.
    """

    def __init__(self, cluster: Cluster, training: TrainingMonitor, ranks: Coordinator) -> None:
        self._probed = cluster
        self._training = training
        self._live = ranks
        self._generation = -1
        self._lock = threading.Lock()
        self._ranks: dict[int, _RankSums] = {}
        self._corrections: dict[Link, PriceCorrection] = {}
        self._exposed: Exposed | None = None

    @property
    def cluster(self) -> Cluster:
        """The cluster that prices plans, whose name says what was corrected and measured."""
        return priced_by(self._corrected(), self.exposed())

    def exposed(self) -> Exposed | None:
        """Return the measured exposure of the communication; None before any rank has reported phases.

        It stays the same until it has changed by more than noise, because plans made at prices
        that differ by noise would move rows to and fro.
        """
        phases = self._training.phases()
        with self._lock:
            if phases is not None:
                measured = exposure(phases)
                if self._exposed is None or differs(self._exposed, measured):
                    self._exposed = measured
            return self._exposed

    def corrections(self) -> dict[Link, PriceCorrection]:
        """Return what was learnt of each link that steps of this generation have shown."""
        with self._lock:
            return dict(sorted(self._corrections.items()))

    def add(self, rank: int, report: StepReport) -> None:
        """Add the steps of one report; learn once every rank has enough of them."""
        if report.phases.steps < 1:
            return
        live = self._live.live()
        if live is None or not 0 <= rank < live.layout.world_size:
            return
        layout = live.layout
        with self._lock:
            if live.generation != self._generation:
                # Groups of other sizes, perhaps over other links.
                self._generation = live.generation
                self._ranks.clear()
                self._corrections.clear()
            sums = self._ranks.setdefault(rank, _RankSums(report.exchange.name))
            if report.exchange.name != sums.exchange:
                # Steps of two exchanges may be in this report.
                self._ranks[rank] = _RankSums(report.exchange.name)
                return
            sums.values = sums.values + phase_values(report)
            sums.steps += report.phases.steps
            sums.seconds += report.step_seconds
            if len(self._ranks) == layout.world_size and all(
                one.steps >= MIN_STEPS and one.seconds >= MIN_SECONDS for one in self._ranks.values()
            ):
                self._learn(live)

    def _learn(self, live: LiveTopology) -> None:
        layout = live.layout
        exchanges = {one.exchange for one in self._ranks.values()}
        values = np.stack([self._ranks[rank].values / self._ranks[rank].steps for rank in range(layout.world_size)])
        self._ranks = {rank: _RankSums(sums.exchange) for rank, sums in self._ranks.items()}
        if len(exchanges) != 1:
            return
        cluster = self._probed.of_layout(layout.nodes, layout.local_ranks)
        for link, sample in price_samples(values, layout, cluster, exchanges.pop()).items():
            self._corrections[link] = self._corrections.get(link, PriceCorrection()).learn(*sample)

    def _corrected(self) -> Cluster:
        factors = {link: learnt.factor for link, learnt in self.corrections().items() if learnt.used}
        if not factors:
            return self._probed
        names = ", ".join(f"{LINK_WORDS[link]} x{factor:.2f}" for link, factor in factors.items())
        return replace(self._probed.scale_seconds(factors), name=f"{self._probed.name} (corrected: {names})")


_EXCHANGES = {"chain": Exchange.CHAIN, "direct": Exchange.DIRECT_DEDUP}


@dataclass(frozen=True)
class TrainingJob:
    """Settings of the training, as the ranks say when they register.

    Attributes:
        exchange, comm_dtype: of their collections.
        uncopied: tables of which no row is copied or moves: those that are pooled at the owner, and those of unbounded
            ids whose rows are not counted.
        read_only: tables that are not trained.
        chooses_exchange: whether the ranks choose their exchange by measuring.
        passes: forward passes for each step of the optimizer, as the ranks report them. Their gradients are pushed
            once.
    """

    exchange: Exchange = Exchange.CHAIN
    comm_dtype: str | None = None
    uncopied: frozenset[str] = frozenset()
    passes: int = 1
    read_only: frozenset[str] = frozenset()
    chooses_exchange: bool = False

    @classmethod
    def of(
        cls,
        trainer: TrainerSettings | None,
        tables: Sequence[TableSpec],
        passes: int = 1,
        measured: str = "",
        *,
        counts_rows: bool = True,
    ) -> TrainingJob:
        """Return what the trainer says of itself, and the defaults for values that this version does not know.

        Args:
            tables: of the job, in order.
            measured: the exchange that a trainer with ``exchange="auto"`` has chosen; empty: the chain.
            counts_rows: accesses come from the ranks' taps, which count rows, where a stream has ids.
        """
        if trainer is None:
            return cls(passes=passes)
        at_owner = frozenset(name for name, place in trainer.pooling_at_by_table(tables).items() if place == "owner")
        return cls(
            _EXCHANGES.get(trainer.exchange, _EXCHANGES.get(measured, cls.exchange)),
            trainer.comm_dtype if trainer.comm_dtype in DTYPE_BYTES else None,
            at_owner if counts_rows else at_owner | trainer.unbounded_tables(tables),
            passes,
            trainer.read_only_tables(tables),
            trainer.exchange == "auto",
        )

    @property
    def shape(self) -> TrainingShape:
        return TrainingShape(self.passes, self.comm_dtype, self.read_only)


def cheaper_exchange(plan: Plan) -> str:
    """Return the configured name of the cheaper of the chain, with the plan's copies if it is for the chain, and the
    direct exchange with dedup."""
    costs = plan.costs
    planned_chain = costs.exchange is Exchange.CHAIN
    chain = costs.after if planned_chain else costs.baselines["two_hop"]
    direct = costs.baselines["row_wise_dedup"] if planned_chain else costs.after
    return "direct" if direct.exposed_seconds < chain.exposed_seconds else "chain"


def plan_limits(settings: PlannerConfig, job: TrainingJob) -> PlanLimits:
    """Return pins and excluded tables."""
    return PlanLimits(
        pins=tuple(
            RowPin(pin.table, Tier[pin.tier], None if pin.rows is None else np.array(pin.rows, dtype=np.int64))
            for pin in settings.pins
        ),
        exclude_tables=job.uncopied.union(settings.exclude_tables),
    )


@dataclass(frozen=True)
class PlanBasis:
    """The input of a plan: one look at ranks, placement, prices and accesses.

    Attributes:
        keyspace: with the dim-groups of the ranks, which part the read-only tables from the others.
        live: the placement.
        per_step: accesses of the whole job per step.
        step_seconds: measured wall time of a step; None if it is not known.
    """

    settings: PlannerConfig
    keyspace: KeySpace
    topology: LiveTopology
    job: TrainingJob
    cluster: Cluster
    live: Placement
    profile: Profile
    per_step: float
    step_seconds: float | None

    @property
    def limits(self) -> PlanLimits:
        return plan_limits(self.settings, self.job)

    @property
    def room(self) -> tuple[int, ...]:
        """Replica slots of a rank, by dim-group."""
        return self.keyspace.room_for_copies(self.topology.replica_slots)

    @property
    def kept_for_moves(self) -> float:
        """Share of slots and memory that is kept for rows that move."""
        return self.settings.rehomed_slots_share if self.topology.layout.nodes > 1 else 0.0

    @property
    def room_for_moves(self) -> list[int]:
        """Replica slots of each dim-group that are kept for rows that move: of the memory an equal part each."""
        memory_bytes, groups = self.topology.copies_memory_bytes, len(self.keyspace.groups)
        most = math.inf if memory_bytes is None else memory_bytes / groups
        return [
            int(self.kept_for_moves * min(slots, most / size))
            for slots, size in zip(self.room, self.keyspace.copy_bytes, strict=True)
        ]

    def plan(self, plan_id: str, parent_id: str = "", reason: str = "") -> Plan:
        """Return ``make_plan`` with the configured limits and shape of the training.

        If the job chooses its exchange and has read-only tables, whose copies cost nothing per step, the plan is for
        the exchange that takes less time with the copies of its plan.

        Raises:
            PlanError: as ``make_plan``.
        """
        origin = PlanOrigin(plan_id, parent_id, self.topology.generation, reason, time.time())
        plan = self._plan(self.job.exchange, origin)
        if not (self.job.read_only and self.job.chooses_exchange):
            return plan
        other = Exchange.CHAIN if self.job.exchange is Exchange.DIRECT_DEDUP else Exchange.DIRECT_DEDUP
        of_other = self._plan(other, origin)
        if of_other.costs.after.exposed_seconds >= plan.costs.after.exposed_seconds:
            return plan
        # It saves what steps take now, with the exchange that is used.
        return replace(of_other, costs=replace(of_other.costs, before=plan.costs.before))

    def _plan(self, exchange: Exchange, origin: PlanOrigin) -> Plan:
        of_copies = [slots - of_moves for slots, of_moves in zip(self.room, self.room_for_moves, strict=True)]
        memory_bytes = self.topology.copies_memory_bytes
        return make_plan(
            self.profile, self.keyspace, self.topology.layout, self.cluster, of_copies, self.live, origin,
            horizon_steps=self.settings.horizon_steps, shape=self.job.shape, limits=self.limits, exchange=exchange,
            step_seconds=self.step_seconds,
            copies_memory_bytes=None if memory_bytes is None else int((1 - self.kept_for_moves) * memory_bytes),
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
        settings: others may be set, for the next look.
        prices: the cluster that prices plans.
        profile: makes the profile of (accesses of the whole job per step, layout of the ranks).
        counts_rows: as of ``TrainingJob.of``.
    """

    def __init__(
        self,
        settings: PlannerConfig,
        keyspace: KeySpace,
        prices: LivePrices,
        profile: Callable[[float, RankLayout], Profile],
        coordinator: Coordinator,
        training: TrainingMonitor,
        *,
        counts_rows: bool = True,
    ) -> None:
        self.settings = settings
        self.keyspace = keyspace
        self.prices = prices
        self._profile = profile
        self._coordinator = coordinator
        self._training = training
        self._counts_rows = counts_rows

    def accesses_per_step(self, world_size: int) -> float | None:
        """Return the accesses of the whole job per step with so many ranks; None if not known yet."""
        return self._training.accesses_per_step(world_size) or self.settings.batch_accesses_per_step

    def basis(self) -> PlanBasis:
        """Look now. Raises PlanError if not all ranks are ready, or the accesses of a step are not known."""
        topology = self._coordinator.live()
        if topology is None or not topology.ready:
            raise PlanError(
                f"no plan without ranks: {self._coordinator.status().reason}",
                remedy="start the training, or check that it uses this daemon's control address",
            )
        per_step = self.accesses_per_step(topology.layout.world_size)
        if not per_step:
            raise PlanError(
                "the accesses of a training step are not known yet",
                remedy="wait for the ranks' first report, or set planner.batch_accesses_per_step",
            )
        training = self._training
        job = TrainingJob.of(
            topology.trainer, self.keyspace.tables, training.passes_per_step(), training.measured_exchange(),
            counts_rows=self._counts_rows,
        )  # fmt: skip
        return PlanBasis(
            self.settings, KeySpace(self.keyspace.tables, job.read_only), topology, job,
            self.prices.cluster, self._coordinator.placement(),
            self._profile(per_step, topology.layout), per_step, self._training.step_seconds(),
        )  # fmt: skip


def plan_moves(plan: Plan, basis: PlanBasis, affinity: AffinityMonitor | None) -> tuple[Plan, AffinityOutlook | None]:
    """Learn homes by affinity, and return the plan with the rows that move by them, and what homes would win.

    Homes are those of the newest learning (``AffinityMonitor``), which a plan waits for only shortly. Without
    ``planner.rehomed_slots_share`` rows that have moved come home. While nothing is known of rows that are used
    together, they stay.

    Args:
        plan: of copies alone.
        affinity: None: rows that are used together are not sampled.
    """
    settings, live, topology, keyspace, room = basis.settings, basis.live, basis.topology, basis.keyspace, None
    layout = topology.layout
    if settings.rehomed_slots_share > 0 and layout.nodes > 1:
        excluded = basis.job.uncopied.union(settings.exclude_tables)
        room = MoveRoom(keyspace, layout, basis.room_for_moves, plan.target, excluded)
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
        plan, moved, live, keyspace, layout, basis.room, saved_seconds,
        live_fits=len(stays) == len(live.rehomed),
    )  # fmt: skip
    return made, outlook
