"""The simulation: every strategy gets the same steps, and its bytes are counted and priced step by step.

A strategy is an exchange, a planner, and the accesses that the planner knows.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array
from flexd.core.errors import ConfigError
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Delta, Placement, RankLayout
from flexd.planner.model.prices import Exchange, exposed_share
from flexd.planner.model.workload import TrainingShape
from flexd.planner.plan import PlanOrigin, delta_chunks, make_plan, moved_bytes
from flexd.simulate.accesses import Accesses, StepPasses, TouchCounter, exact_profile
from flexd.simulate.byte_counter import PHASES, BitWords, CollectiveBytes, StepByteCounter, sent_bytes
from flexd.sketch.profile import Profile
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings
from flexd.topology.cluster import INTER, Cluster, Collective, CollectiveCurve, Link


class PlanningInput(Enum):
    """Accesses that a strategy plans from."""

    NOTHING = "nothing"
    """It keeps every row at HOME."""
    FIRST_QUARTER = "first_quarter"
    """The exact counts of the first quarter of the run, once: a plan made offline."""
    STREAM = "stream"
    """The daemon's sketches of all steps so far, with decay, again and again."""
    NEXT_WINDOW = "next_window"
    """The exact counts of the steps up to the next plan, which no planner can know, and rows move at no cost."""


@dataclass(frozen=True)
class ReplayStrategy:
    """One strategy.

    Attributes:
        name: key in the results.
        title: for tables.
        merges_passes: each row's gradient is pushed once per step, not once per micro-batch.
        dedup: a rank requests each row once; False: for every look-up.
    """

    name: str
    title: str
    exchange: Exchange
    planning_input: PlanningInput = PlanningInput.NOTHING
    merges_passes: bool = True
    dedup: bool = True


ROW_WISE = ReplayStrategy("row_wise", "row-wise", Exchange.DIRECT_DEDUP, merges_passes=False, dedup=False)
ROW_WISE_DEDUP = ReplayStrategy("row_wise_dedup", "row-wise, dedup", Exchange.DIRECT_DEDUP, merges_passes=False)
DIRECT = ReplayStrategy("direct", "flexd, direct with dedup", Exchange.DIRECT_DEDUP)
TWO_HOP = ReplayStrategy("two_hop", "two-hop chain", Exchange.CHAIN)
STATIC = ReplayStrategy("static", "flexd, planned once", Exchange.CHAIN, PlanningInput.FIRST_QUARTER)
REPLANNED = ReplayStrategy("replanned", "flexd, re-planned", Exchange.CHAIN, PlanningInput.STREAM)
ORACLE = ReplayStrategy("oracle", "oracle of the next window", Exchange.CHAIN, PlanningInput.NEXT_WINDOW)

STRATEGIES = (ROW_WISE, ROW_WISE_DEDUP, TWO_HOP, STATIC, REPLANNED, ORACLE)


def collective_seconds(collectives: Sequence[CollectiveBytes], cluster: Cluster) -> Float64Array:
    """Return float64 [phases]: collectives follow one another; each waits for its busiest rank.

    A collective takes its latency and the transfer. One over both links uses them at the same time: the slower counts.
    """
    total = np.zeros(PHASES)
    for one in collectives:
        curves = [cluster.curve(link, one.collective) for link in Link]
        over_world = one.collective is Collective.ALL_TO_ALL and bool(one.sent.any(axis=0).all())
        if over_world and cluster.world is not None:
            curves[INTER] = cluster.world.all_to_all
        latency = 0.0 if one.piggybacked else curves[one.link].latency_seconds
        total[one.phase] += latency + max(map(_transfer, curves, one.peak.astype(np.float64)))
    return total


def _transfer(curve: CollectiveCurve, message_bytes: float) -> float:
    return message_bytes / curve.bandwidth(message_bytes) if message_bytes else 0.0


STATIC_SHARE = 4
"""The offline plans are made from the first of so many parts of the run."""


@dataclass(frozen=True)
class SimulationSettings:
    """Settings of the simulated daemon, in steps: one step is one second of event time.

    Attributes:
        replica_fraction: replica slots of a rank, as a share of the rows of each dim-group.
        interval_steps: between two plans.
        half_life_steps: of the sketches; inf counts for ever.
        horizon_steps: within which a migration must pay for itself.
        sketch_bytes: memory of the counters.
        chunk_rows, chunk_bytes: of a migration, as ``control`` configures them.
        migration_bytes_per_step: rows and state copied in one step, as the collection caps them.

    Raises:
        ConfigError: a value out of range.
    """

    replica_fraction: float = 0.05
    interval_steps: int = 5
    half_life_steps: float = 20.0
    horizon_steps: float = 300.0
    sketch_bytes: int = 64 * 2**20
    chunk_rows: int = 4096
    chunk_bytes: int = 4 * 2**20
    migration_bytes_per_step: int = 4 * 2**20

    def __post_init__(self) -> None:
        if not 0 <= self.replica_fraction <= 1:
            raise ConfigError(f"replica_fraction {self.replica_fraction}", remedy="a fraction of 0 to 1")
        for name, value in vars(self).items():
            if name != "replica_fraction" and not value > 0:
                raise ConfigError(f"{name} {value}", remedy="give a number above 0")

    def slots(self, keyspace: KeySpace) -> tuple[int, ...]:
        """Replica slots of a rank, by dim-group."""
        return tuple(int(self.replica_fraction * group.rows) for group in keyspace.groups)


@dataclass
class StrategyRun:
    """Bytes, seconds and placements of one strategy.

    Attributes:
        sent: int64 [steps, ranks, phases, 2], bytes each rank sent to others, by ``TrafficPhase`` (last ``MIGRATION``)
            and link.
        seconds: float64 [steps, phases], of the busiest rank.
        exposed_share: float64 [phases], share that compute does not hide: a migration runs between steps and is never
            hidden.
        replicated_rows: int64 [steps], rows above HOME.
        migrated_rows: int64 [steps], rows that changed tier at the start of the step.
        plan_steps: steps at which a new plan's first rows moved.
    """

    strategy: ReplayStrategy
    sent: Int64Array
    seconds: Float64Array
    exposed_share: Float64Array
    replicated_rows: Int64Array
    migrated_rows: Int64Array
    plan_steps: list[int]

    @property
    def exposed_seconds(self) -> Float64Array:
        """float64 [steps]: time that a step waits."""
        return self.seconds @ self.exposed_share

    def job_bytes(self, phases: Sequence[int], link: int) -> Int64Array:
        """int64 [steps]: sent by all ranks together."""
        sent: Int64Array = self.sent[:, :, list(phases), link].sum(axis=(1, 2))
        return sent


@dataclass(frozen=True)
class Simulation:
    """A replay of accesses: runs by name of the strategy.

    Attributes:
        touches: means over all steps (``TouchCounter``).
    """

    accesses: Accesses
    layout: RankLayout
    cluster: Cluster
    settings: SimulationSettings
    runs: dict[str, StrategyRun] = field(default_factory=dict)
    touches: dict[str, Any] = field(default_factory=dict)
    accesses_per_step: float = 0.0


class _StrategyRunner:
    """One strategy on its way through the steps."""

    def __init__(self, strategy: ReplayStrategy, simulation: Simulation, counter: StepByteCounter) -> None:
        self.strategy, self._simulation, self._counter = strategy, simulation, counter
        self._placement = Placement.empty()
        self._words = BitWords(simulation.accesses.keyspace, simulation.layout)
        self._pending_chunks: deque[Delta] = deque()
        self._new_plan = False
        steps, world = simulation.accesses.steps, simulation.layout.world_size
        self.run = StrategyRun(
            strategy,
            sent=np.zeros((steps, world, PHASES, 2), dtype=np.int64),
            seconds=np.zeros((steps, PHASES)),
            exposed_share=np.append(exposed_share(simulation.cluster.exposed), 1.0),
            replicated_rows=np.zeros(steps, dtype=np.int64),
            migrated_rows=np.zeros(steps, dtype=np.int64),
            plan_steps=[],
        )

    def plan(self, profile: Profile) -> None:
        """Make a plan against the placement as it is; its chunks follow, one step after another."""
        layout, settings, accesses = self._simulation.layout, self._simulation.settings, self._simulation.accesses
        free = self.strategy.planning_input is PlanningInput.NEXT_WINDOW
        plan = make_plan(
            profile, accesses.keyspace, layout, self._simulation.cluster, settings.slots(accesses.keyspace),
            Placement.empty() if free else self._placement,
            PlanOrigin(self.strategy.name, "", 0, "replay", 0.0),
            horizon_steps=math.inf if free else settings.horizon_steps,
            shape=TrainingShape(micro_batches=accesses.micro_batches),
        )  # fmt: skip
        if free:
            self._placement = plan.target
            self._words = BitWords.of(accesses.keyspace, layout, plan.target)
            return
        self._pending_chunks = deque(
            delta_chunks(plan.delta, accesses.keyspace, layout, settings.chunk_rows, settings.chunk_bytes)
        )
        self._new_plan = True

    def step(self, step: int, keys: StepPasses) -> None:
        collectives = self._migrate(step)
        collectives += self._counter.step(
            keys, self._placement, self.strategy.exchange, self._words, merges_passes=self.strategy.merges_passes,
            dedup=self.strategy.dedup,
        )  # fmt: skip
        self.run.sent[step] = sent_bytes(collectives, self._simulation.layout.world_size)
        self.run.seconds[step] = collective_seconds(collectives, self._simulation.cluster)
        self.run.replicated_rows[step] = len(self._placement)

    def _migrate(self, step: int) -> list[CollectiveBytes]:
        """Apply pending chunks up to the cap of a step, at least one, as ``ChunkInbox`` does."""
        simulation, spent = self._simulation, 0
        found: list[CollectiveBytes] = []
        while self._pending_chunks:
            chunk = self._pending_chunks[0]
            spent += int(moved_bytes(chunk, simulation.accesses.keyspace, simulation.layout).sum())
            if found and spent > simulation.settings.migration_bytes_per_step:
                break
            self._pending_chunks.popleft()
            self._placement = self._placement.apply(chunk)
            self._words.apply(chunk)
            self.run.migrated_rows[step] += len(chunk)
            found += self._counter.migration(chunk)
        if self.run.migrated_rows[step] and self._new_plan:
            self.run.plan_steps.append(step)
            self._new_plan = False
        return found


class _SimulatedDaemon:
    """The daemon's sketches of the accesses."""

    def __init__(self, simulation: Simulation) -> None:
        half_life = simulation.settings.half_life_steps
        self._keyspace, self._world_size = simulation.accesses.keyspace, simulation.layout.world_size
        self._sketches = SketchSet(
            self._keyspace.tables,
            SketchSettings(
                memory_bytes=simulation.settings.sketch_bytes,
                half_life_seconds=None if math.isinf(half_life) else half_life,
                max_future_seconds=1.0,
            ),
        )
        self._accesses = 0
        self._steps = 0

    def see(self, step: int, keys: Sequence[Int64Array]) -> None:
        tables = self._keyspace.tables
        for index, mine in enumerate(keys):
            table_of, rows = self._keyspace.table_rows(mine)
            order = np.argsort(table_of, kind="stable")
            bounds = np.searchsorted(table_of[order], np.arange(len(tables) + 1))
            for table in np.flatnonzero(np.diff(bounds)):
                part = rows[order[bounds[table] : bounds[table + 1]]]
                self._sketches.ingest(tables[table].name, part, index % self._world_size, float(step))
        self._accesses += sum(len(mine) for mine in keys)
        self._steps += 1

    @property
    def accesses_per_step(self) -> float:
        return self._accesses / max(1, self._steps)

    def profile(self) -> Profile:
        return self._sketches.profile(self.accesses_per_step)


def simulate(
    accesses: Accesses,
    layout: RankLayout,
    cluster: Cluster,
    settings: SimulationSettings,
    strategies: Sequence[ReplayStrategy] = STRATEGIES,
    progress: Callable[[int], None] | None = None,
) -> Simulation:
    """Replay all steps through all strategies. Deterministic.

    A plan made after step t from what was seen up to then reaches the ranks during step t + 1 and is applied at the
    start of step t + 2, as through the control channel.

    Args:
        progress: called with each finished step.

    Raises:
        ConfigError: fewer than 4 steps.
        PlanError: a planner refuses (see ``make_plan``).
    """
    steps = accesses.steps
    if steps < STATIC_SHARE:
        raise ConfigError(f"{steps} steps", remedy=f"at least {STATIC_SHARE}")
    simulation = Simulation(accesses, layout, cluster.of_layout(layout.nodes, layout.local_ranks), settings)
    counter = StepByteCounter(accesses.keyspace, layout)
    runners = [_StrategyRunner(strategy, simulation, counter) for strategy in strategies]
    by_planning_input = {
        planning_input: [runner for runner in runners if runner.strategy.planning_input is planning_input]
        for planning_input in PlanningInput
    }
    daemon, touches = _SimulatedDaemon(simulation), TouchCounter(layout)
    due: list[tuple[_StrategyRunner, Profile]] = []

    def counted(of_steps: range) -> Profile:
        passes = [one for at in of_steps for one in accesses.passes(at)]
        return exact_profile(passes, accesses.keyspace, layout, accesses.micro_batches)

    for step in range(steps):
        if step % settings.interval_steps == 0 and by_planning_input[PlanningInput.NEXT_WINDOW]:
            coming = counted(range(step, min(steps, step + settings.interval_steps)))
            for runner in by_planning_input[PlanningInput.NEXT_WINDOW]:
                runner.plan(coming)
        passes = accesses.passes(step)
        keys = StepPasses.of(passes, layout)
        for of_pass in keys.each:
            touches.see(of_pass)
        for runner in runners:
            runner.step(step, keys)
        # Plans of the step before arrive while this one runs.
        for runner, made_from in due:
            runner.plan(made_from)
        due = []
        daemon.see(step, [mine for keys in passes for mine in keys])
        if step + 1 == steps // STATIC_SHARE and by_planning_input[PlanningInput.FIRST_QUARTER]:
            quarter = counted(range(step + 1))
            due += [(runner, quarter) for runner in by_planning_input[PlanningInput.FIRST_QUARTER]]
        if (step + 1) % settings.interval_steps == 0 and by_planning_input[PlanningInput.STREAM]:
            profile = daemon.profile()
            due += [(runner, profile) for runner in by_planning_input[PlanningInput.STREAM]]
        if progress is not None:
            progress(step)
    runs = {runner.strategy.name: runner.run for runner in runners}
    return replace(simulation, runs=runs, touches=touches.figures(), accesses_per_step=daemon.accesses_per_step)
