"""What the daemon tells of itself: the status for people, the figures for Prometheus. Reads, never changes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

from flexd import __version__
from flexd.api.base import TierName
from flexd.api.drift import DriftStatus, TableDriftStatus
from flexd.api.migration import MigrationReport
from flexd.api.plan import PlanReport
from flexd.api.sketch import ProfileStatus, SketchStatus, TableSketchStatus
from flexd.api.status import PlacementStatus, RefusedRankStatus, SnapshotStatus, Status, StreamStatus, TopologyStatus
from flexd.config.model import Config
from flexd.control.daemon.coordinator import Coordinator
from flexd.core.layout import Tier
from flexd.core.placement import Placement
from flexd.core.process_start import ProcessStart
from flexd.daemon.label_values import MIGRATION_STATES, with_zeros
from flexd.daemon.migration_view import history_figures, migration_report
from flexd.daemon.planning_view import (
    gate_report,
    planning_figures,
    planning_status,
    throttle_figures,
    throttle_status,
)
from flexd.daemon.scale_out import LeaderUnit
from flexd.daemon.scale_out_view import leader_figures, leader_status
from flexd.ingest import Ingestor, IngestStats
from flexd.ingest.stats import MESSAGE_REASONS
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.drift import DriftMonitor
from flexd.operations.executions import Execution
from flexd.operations.history.history import MigrationHistory
from flexd.operations.pacing import MigrationPacing
from flexd.operations.planning import PLAN_OUTCOMES, Planning
from flexd.operations.proposals import Proposal
from flexd.operations.training_monitor import TrainingMonitor
from flexd.planner.plan import Plan
from flexd.server import figures as f
from flexd.sketch.budget import TableChoice
from flexd.sketch.node_sources import TableSources
from flexd.sketch.profile import Profile


@dataclass(frozen=True)
class Condition:
    """What the life cycle knows and the parts do not."""

    started: ProcessStart
    healthy: bool
    ready: bool
    reasons: tuple[str, ...]
    pause_reason: str | None
    pauses: int


def rows_above_home(placement: Placement) -> dict[TierName, int]:
    """Rows in each replicated tier; all others are HOME."""
    counts: dict[TierName, int] = {
        "NODE": int((placement.tiers == Tier.NODE).sum()),
        "DEVICE": int((placement.tiers == Tier.DEVICE).sum()),
    }
    return counts


def coverage_of(profile: Profile) -> float:
    """Smallest coverage of a table that was touched; NaN if none was."""
    return min((table.coverage for table in profile.tables if table.weight > 0), default=math.nan)


def stream_status(config: Config, stats: IngestStats) -> StreamStatus:
    return StreamStatus(
        source=config.stream.source.kind,
        lag_messages=stats.lag_messages,
        messages_per_second=stats.messages_per_second,
        accesses_per_second=stats.accesses_per_second,
        messages=stats.messages,
        accesses=stats.accesses,
        rejected_messages=dict(stats.rejected_messages),
        rejected_accesses=dict(stats.rejected_accesses),
        adjusted_accesses=dict(stats.adjusted_accesses),
        newest_event_unix_seconds=stats.newest_event_seconds,
        problem=stats.problem,
    )


def ingest_figures(stats: IngestStats) -> f.IngestFigures:
    return f.IngestFigures(
        messages=stats.messages,
        accesses=stats.accesses,
        bytes=stats.bytes,
        rejected_messages=with_zeros(MESSAGE_REASONS, stats.rejected_messages),
        rejected_accesses=stats.rejected_accesses,
        adjusted_accesses=stats.adjusted_accesses,
        lag_messages=stats.lag_messages,
        dead_letters=stats.dead_letters,
        connected=stats.problem is None,
        newest_event_unix_seconds=stats.newest_event_seconds,
        messages_lost=stats.messages_lost,
        dead_letter_failures=stats.dead_letter_failures,
        source_failures=stats.source_failures,
        commit_failures=stats.commit_failures,
    )


class DaemonView:
    """Built over the running parts; every method may be called from any thread and blocks on nothing."""

    def __init__(
        self,
        config: Config,
        total_rows: int,
        ingestor: Ingestor,
        coordinator: Coordinator,
        planning: Planning,
        training: TrainingMonitor,
        drift: DriftMonitor,
        auto: AutoPlanner,
        pacing: MigrationPacing,
        history: MigrationHistory,
        leader: LeaderUnit | None = None,
    ) -> None:
        self._config = config
        self._total_rows = total_rows
        self._ingestor = ingestor
        self._coordinator = coordinator
        self._planning = planning
        self._training = training
        self._drift = drift
        self._auto = auto
        self._pacing = pacing
        self._history = history
        self._leader = leader

    def apply_config(self, config: Config) -> None:
        self._config = config

    def plan(self, plan: Plan, live: Placement) -> PlanReport:
        before = {str(tier): count for tier, count in rows_above_home(live).items()}
        return PlanReport.from_summary(plan.summary(), before)

    def proposal(self, proposal: Proposal) -> PlanReport:
        """With what led to it, and the gates of its profile."""
        report = self.plan(proposal.plan, proposal.live)
        trigger, gates = proposal.trigger, tuple(gate_report(gate) for gate in proposal.gates)
        return report.model_copy(update={"trigger": trigger.kind.value, "who": trigger.who, "gates": gates})

    def migration(self, execution: Execution) -> MigrationReport:
        return migration_report(execution)

    def status(self, condition: Condition) -> Status:
        planning = self._planning
        last, execution = planning.last_plan, planning.executions.last
        return Status(
            job=self._config.job,
            version=__version__,
            uptime_seconds=condition.started.uptime_seconds,
            healthy=condition.healthy,
            ready=condition.ready,
            reasons=condition.reasons,
            paused=condition.pause_reason is not None,
            pause_reason=condition.pause_reason,
            stream=stream_status(self._config, self._ingestor.stats()),
            sketch=self._sketch(),
            drift=self._drift_status(),
            topology=self._topology(),
            placement=self._placement(),
            last_plan=None if last is None else self.plan(last, planning.last_live),
            migration=None if execution is None else self.migration(execution),
            planning=planning_status(self._planning, self._auto),
            throttle=throttle_status(self._pacing.snapshot()),
            snapshot=self._snapshot(),
            scale_out=None if self._leader is None else leader_status(self._leader),
        )

    def _sketch(self) -> SketchStatus:
        choices = self._ingestor.choices()
        profile = self._planning.last_profile
        sources = _sources(profile)
        shown = ProfileStatus()
        if profile is not None:
            shown = ProfileStatus(
                generation=profile.generation,
                samples=profile.samples,
                coverage=coverage_of(profile),
                age_seconds=self._planning.profile_age_seconds(),
                window_seconds=profile.window_seconds,
            )
        return SketchStatus(
            bytes=sum(choice.bytes for choice in choices),
            tables=tuple(self._table(choice, sources.get(choice.table)) for choice in choices),
            profile=shown,
        )

    @staticmethod
    def _table(choice: TableChoice, sources: TableSources | None) -> TableSketchStatus:
        return TableSketchStatus(
            table=choice.table,
            kind=choice.kind,
            bytes=choice.bytes,
            error_bound=choice.error_share,
            error_probability=choice.failure_probability,
            relative_error=choice.relative_error,
            counter_bits=choice.counter_bits,
            width=_width(choice),
            hot_rows=choice.hot_rows,
            sampled_accesses=choice.sampled_accesses,
            affinity=None if sources is None else sources.affinity,
            affinity_error=None if sources is None else sources.affinity_error,
        )

    def _drift_status(self) -> DriftStatus:
        drift, threshold = self._drift.newest, self._config.planner.drift_threshold
        if drift is None:
            return DriftStatus(threshold=threshold)
        then, now = drift.then.total, drift.now.total
        return DriftStatus(
            ratio=drift.ratio,
            threshold=threshold,
            exposed_seconds_then=then.exposed_seconds,
            exposed_seconds=now.exposed_seconds,
            inter_node_bytes_then=then.inter_node_bytes,
            inter_node_bytes=now.inter_node_bytes,
            total_bytes_then=then.total_bytes,
            total_bytes=now.total_bytes,
            age_seconds=self._drift.age_seconds(),
            tables=tuple(
                TableDriftStatus(
                    table=name,
                    ratio=drift.table_ratios[name],
                    exposed_seconds=traffic.exposed_seconds,
                    inter_node_bytes=traffic.inter_node_bytes,
                )
                for name, traffic in drift.now.tables.items()
            ),
        )

    def _topology(self) -> TopologyStatus:
        live, control = self._coordinator.live(), self._coordinator.status()
        return TopologyStatus(
            generation=control.generation,
            attempt=control.attempt or None,
            nodes=live.layout.nodes if live else 0,
            local_ranks=live.layout.local_ranks if live else 0,
            ready=live is not None and live.ready,
            missing_ranks=control.missing_ranks,
            refused_ranks=tuple(
                RefusedRankStatus(attempt=each.attempt, rank=each.rank, reason=each.reason)
                for each in control.refused_ranks
            ),
            cluster=self._planning.cluster.name,
            problem=control.reason or None,
        )

    def _placement(self) -> PlacementStatus:
        placement = self._coordinator.placement()
        rows = {**rows_above_home(placement), "HOME": self._total_rows - len(placement)}
        return PlacementStatus(version=placement.version, rows=rows, digest=f"{placement.digest():016x}")

    def _snapshot(self) -> SnapshotStatus:
        stats = self._ingestor.stats()
        return SnapshotStatus(
            age_seconds=stats.snapshot_age_seconds,
            written=stats.snapshots,
            failures=stats.snapshot_failures,
            problem=stats.problem if stats.snapshot_failures else None,
        )

    def figures(self, condition: Condition) -> f.DaemonFigures:
        return f.DaemonFigures(
            job=self._config.job,
            version=__version__,
            started_unix_seconds=condition.started.unix_seconds,
            healthy=condition.healthy,
            ready=condition.ready,
            paused=condition.pause_reason is not None,
            pauses=condition.pauses,
            ingest=ingest_figures(self._ingestor.stats()),
            sketch=self._sketch_figures(),
            drift=self._drift_figures(),
            plan=self._plan_figures(),
            planning=planning_figures(self._planning, self._auto),
            throttle=throttle_figures(self._pacing.snapshot()),
            migration=self._migration_figures(),
            placement=self._placement_figures(),
            training=self._training.totals(),
            ranks=self._training.ranks(),
            control=self._control_figures(),
            snapshot=self._snapshot_figures(),
            scale_out=None if self._leader is None else leader_figures(self._leader),
        )

    def _sketch_figures(self) -> f.SketchFigures:
        choices, profile = self._ingestor.choices(), self._planning.last_profile
        sources = _sources(profile)
        return f.SketchFigures(
            bytes_by_table={choice.table: choice.bytes for choice in choices},
            error_bound_by_table={choice.table: choice.error_share for choice in choices},
            profile_age_seconds=self._planning.profile_age_seconds(),
            profile_coverage=math.nan if profile is None else coverage_of(profile),
            profile_samples=0 if profile is None else profile.samples,
            profile_generation=0 if profile is None else profile.generation,
            width_by_table={choice.table: _width(choice) for choice in choices},
            relative_error_by_table={choice.table: choice.relative_error for choice in choices},
            counter_bits_by_table={choice.table: choice.counter_bits for choice in choices},
            affinity_by_table={name: known.affinity for name, known in sources.items()},
            affinity_error_by_table={name: known.affinity_error for name, known in sources.items()},
        )

    def _drift_figures(self) -> f.DriftFigures:
        monitor, drift = self._drift, self._drift.newest
        looked = f.DriftFigures(
            age_seconds=monitor.age_seconds(), evaluations=monitor.evaluations, seconds=monitor.seconds
        )
        if drift is None:
            return looked
        then, now = drift.then.total, drift.now.total
        return replace(
            looked,
            ratio=drift.ratio,
            exposed_seconds=(then.exposed_seconds, now.exposed_seconds),
            inter_node_bytes=(then.inter_node_bytes, now.inter_node_bytes),
            total_bytes=(then.total_bytes, now.total_bytes),
            ratio_by_table=drift.table_ratios,
            exposed_seconds_by_table={name: t.exposed_seconds for name, t in drift.now.tables.items()},
            inter_node_bytes_by_table={name: t.inter_node_bytes for name, t in drift.now.tables.items()},
        )

    def _plan_figures(self) -> f.PlanFigures:
        planning, plan = self._planning, self._planning.last_plan
        return f.PlanFigures(
            plans=with_zeros(PLAN_OUTCOMES, planning.outcomes),
            seconds=planning.seconds,
            predicted_before_seconds=math.nan if plan is None else plan.before.exposed_seconds,
            predicted_after_seconds=math.nan if plan is None else plan.after.exposed_seconds,
            age_seconds=math.nan if plan is None else time.time() - plan.created_unix_seconds,
        )

    def _migration_figures(self) -> f.MigrationFigures:
        planning, execution = self._planning, self._planning.executions.last
        running = execution is not None and not execution.migration.done
        eta = None if execution is None else execution.migration.progress.eta_seconds
        return f.MigrationFigures(
            migrations=with_zeros(MIGRATION_STATES, planning.executions.migrations),
            rows=planning.executions.migrated["rows"],
            bytes=planning.executions.migrated["bytes"],
            chunks=planning.executions.migrated["chunks"],
            progress=self.migration(execution).progress if execution is not None and running else math.nan,
            eta_seconds=math.nan if eta is None else eta,
            illegal_transitions=self._coordinator.status().illegal_transitions,
            history=history_figures(self._history.snapshot),
        )

    def _placement_figures(self) -> f.PlacementFigures:
        placement = self._coordinator.placement()
        rows = rows_above_home(placement)
        return f.PlacementFigures(
            version=placement.version,
            version_by_rank=self._training.versions(),
            rows_by_tier=(self._total_rows - len(placement), rows["NODE"], rows["DEVICE"]),
            digest_mismatches=self._coordinator.status().digest_mismatches,
        )

    def _control_figures(self) -> f.ControlFigures:
        control = self._coordinator.status()
        return f.ControlFigures(
            epochs=control.epochs,
            topology_generation=control.generation,
            ranks=control.ranks,
            ranks_ready=control.ranks_ready,
            refused_messages=control.refused_messages,
            refused_chunks=control.refused_chunks,
        )

    def _snapshot_figures(self) -> f.SnapshotFigures:
        stats = self._ingestor.stats()
        return f.SnapshotFigures(
            age_seconds=stats.snapshot_age_seconds,
            written=stats.snapshots,
            failures=stats.snapshot_failures,
            bytes=_newest_bytes(self._config.state.dir / "snapshots"),
            pause_seconds=stats.snapshot_pause_seconds,
        )


def _sources(profile: Profile | None) -> dict[str, TableSources]:
    tables = () if profile is None else profile.tables
    return {table.table: table.sources for table in tables if table.sources is not None}


def _width(choice: TableChoice) -> int:
    return 1 << choice.log2_width if choice.kind == "count_min" else 0


def _newest_bytes(directory: Path) -> int:
    try:
        return max(directory.iterdir(), key=lambda path: path.stat().st_mtime).stat().st_size
    except (OSError, ValueError):
        return 0
