"""The queries over all components of a daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexd import __version__
from flexd.api.migration import migration_counts, throttle_status
from flexd.api.placement import drift_status, placement_status, prices_status
from flexd.api.plan import plan_report
from flexd.api.planning import planning_status
from flexd.api.rank import RankPage, rank_page, topology_status
from flexd.api.status import ConfigReport, DaemonStatus, snapshot_status, state_status
from flexd.api.stream import stream_status
from flexd.api.table import HotRowPage, TableOrder, TablePage, hot_row_page, sketch_status, table_page
from flexd.api.training import MAX_PLAN_MARKS, Timeline, slow_memory_status, timeline, training_status

if TYPE_CHECKING:
    from flexd.config.model import Config
    from flexd.control.daemon.coordinator import Coordinator
    from flexd.control.daemon.throttle import Throttle
    from flexd.core.keyspace import KeySpace
    from flexd.operations.autoplan import AutoPlanner
    from flexd.operations.drift import DriftMonitor
    from flexd.operations.history import EffectRecorder, MigrationHistory
    from flexd.operations.planning import Planning
    from flexd.operations.training_monitor import TrainingMonitor
    from flexd.sketch.ingestor import Ingestor
    from flexd.sketch.snapshot import SnapshotStore


@dataclass
class Components:
    """The running components of a daemon, and the queries that read them.

    Methods may be called from any thread and block on nothing that ingest or a migration holds for long.

    Attributes:
        settings: the effective configuration; replaced by a reload.
        snapshots: of this daemon.
    """

    settings: Config
    keyspace: KeySpace
    ingestor: Ingestor
    coordinator: Coordinator
    planning: Planning
    training: TrainingMonitor
    drift: DriftMonitor
    auto: AutoPlanner
    throttle: Throttle
    history: MigrationHistory
    snapshots: SnapshotStore
    effects: EffectRecorder

    def status(self, base: DaemonStatus) -> DaemonStatus:
        """Return ``base`` with the state of every component."""
        control, planning = self.coordinator.status(), self.planning
        last, migration = planning.last_plan, planning.executions.last
        placement, live = self.coordinator.placement(), self.coordinator.live()
        return base.model_copy(
            update={
                "stream": stream_status(self.settings, self.ingestor),
                "sketch": sketch_status(
                    self.ingestor.sketches.choices(), planning.last_profile, planning.profile_age_seconds()
                ),
                "drift": drift_status(self.drift, self.settings.planner.drift_threshold),
                "topology": topology_status(
                    live,
                    control,
                    self.coordinator.channel_counters(),
                    planning.maker.prices.cluster.name,
                ),
                "placement": placement_status(placement, self.keyspace, control.digest_mismatches),
                "training": training_status(
                    self.training.totals(),
                    self.training.ranks(),
                    self.training.phases(),
                    self.training.usage_warnings.totals(),
                ),
                "slow_memory": slow_memory_status(self.training.slow_memory.totals(), self.keyspace.tables),
                "prices": prices_status(planning.maker.prices),
                "last_plan": None
                if last is None
                else plan_report(
                    last, planning.last_live, None if planning.affinity is None else planning.affinity.outlook
                ),
                "migration": None if migration is None else self.effects.add_to(migration.report()),
                "migrations": migration_counts(planning.executions, control.illegal_transitions, self.history.lost),
                "planning": planning_status(planning, self.auto),
                "throttle": throttle_status(self.throttle),
                "snapshot": snapshot_status(self.ingestor, self.snapshots),
                "state": state_status(self.ingestor),
            }
        )

    def config(self) -> ConfigReport:
        return ConfigReport(version=__version__, config=self.settings.document())

    def tables(self, offset: int, limit: int, order: TableOrder) -> TablePage:
        drift = self.drift.newest
        return table_page(
            self.keyspace, self.ingestor, self.coordinator.placement(), self.planning.last_profile,
            {} if drift is None else drift.table_ratios, offset, limit, order,
        )  # fmt: skip

    def rows(self, table: str, offset: int, limit: int) -> HotRowPage:
        return hot_row_page(
            self.keyspace, self.ingestor, self.coordinator.placement(), self.coordinator.live(), table, offset, limit
        )

    def ranks(self, offset: int, limit: int) -> RankPage:
        return rank_page(
            self.coordinator.live(), self.training.ranks(), self.coordinator.placement().version,
            self.planning.maker.prices.cluster.name, offset, limit,
        )  # fmt: skip

    def timeline(self) -> Timeline:
        live = self.coordinator.live()
        return timeline(
            self.training.timeline.intervals(), self.history.newest_moves(MAX_PLAN_MARKS),
            None if live is None else live.layout,
            self._mean_row_bytes(),
        )  # fmt: skip

    def _mean_row_bytes(self) -> float:
        """Return the mean size of a looked-up row's values: tables weigh by the accesses counted."""
        accesses = self.ingestor.sketches.samples_by_table()
        sizes = [table.row_bytes for table in self.keyspace.tables]
        total = sum(accesses)
        if total == 0:
            return sum(sizes) / len(sizes)
        return float(sum(number * size for number, size in zip(accesses, sizes, strict=True)) / total)
