"""The metrics page: one frozen ``DaemonFigures`` a scrape, in Prometheus' naming (base units, ``_total``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from flexd.api.families import MAX_LABEL_VALUES as MAX_LABEL_VALUES
from flexd.api.families import counter as _counter
from flexd.api.families import counters as _counters
from flexd.api.families import gauge as _gauge
from flexd.api.families import gauges as _gauges
from flexd.operations.training_monitor import LINKS, TRAFFIC_KINDS, RankAverages, TrainingTotals
from flexd.server.availability_metrics import availability_metrics
from flexd.server.figures import (
    TIER_NAMES,
    ControlFigures,
    DaemonFigures,
    DriftFigures,
    IngestFigures,
    MigrationFigures,
    PlacementFigures,
    PlanFigures,
    SketchFigures,
    SnapshotFigures,
)
from flexd.server.planning_metrics import decision_metrics, planning_metrics, throttle_metrics
from flexd.server.scale_out_metrics import scale_out_metrics


class Metrics:
    """A registry of its own, so that nothing else in the process shows up here.

    Args:
        figures: called once a scrape, from an HTTP thread; must not block.
    """

    def __init__(self, figures: Callable[[], DaemonFigures]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(FiguresCollector(figures))
        ProcessCollector(registry=self.registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """(page, content type): OpenMetrics if the ``Accept`` header asks for it, else Prometheus text."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type


class FiguresCollector(Collector):
    """Turns one ``DaemonFigures`` into metric families; keeps nothing between scrapes."""

    def __init__(self, figures: Callable[[], DaemonFigures]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry then does not collect at registration, when the daemon is not up yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        figures = self._figures()
        yield InfoMetricFamily(
            "flexd_build", "The running flexd.", value={"version": figures.version, "training_job": figures.job}
        )
        yield _gauge("flexd_start_time_seconds", "Start of the daemon, Unix time.", figures.started_unix_seconds)
        yield _gauge("flexd_healthy", "1 while the daemon's loop ticks.", figures.healthy)
        yield _gauge("flexd_ready", "1 while the daemon is useful (as /readyz).", figures.ready)
        yield _gauge("flexd_paused", "1 while planning and pushing are held.", figures.paused)
        yield _counter("flexd_pauses", "Pauses asked for.", figures.pauses)
        yield from _ingest(figures.ingest)
        yield from _sketch(figures.sketch)
        yield from _drift(figures.drift)
        yield from _plan(figures.plan)
        yield from planning_metrics(figures.planning)
        yield from _migration(figures.migration)
        yield from throttle_metrics(figures.throttle)
        yield from decision_metrics(figures.decisions)
        yield from _placement(figures.placement)
        yield from _training(figures.training, figures.ranks)
        yield from _control(figures.control)
        yield from _snapshot(figures.snapshot)
        if figures.scale_out is not None:
            yield from scale_out_metrics(figures.scale_out)
        yield _counters("flexd_config_reloads", "Reloads by outcome.", "outcome", figures.config.reloads)
        yield _gauge("flexd_config_pending_keys", "Changed keys that need a restart.", figures.config.pending_keys)
        if figures.availability is not None:
            yield from availability_metrics(figures.availability)


def _ingest(ingest: IngestFigures) -> Iterator[Metric]:
    yield _counter("flexd_ingest_messages", "Stream messages read and counted.", ingest.messages)
    yield _counter("flexd_ingest_accesses", "Accesses counted.", ingest.accesses)
    yield _counter("flexd_ingest_bytes", "Payload bytes of the messages read.", ingest.bytes)
    yield _counters(
        "flexd_ingest_rejected_messages", "Messages not counted, by reason.", "reason", ingest.rejected_messages
    )
    yield _counters(
        "flexd_ingest_rejected_accesses",
        "Accesses not counted inside good messages, by reason.",
        "reason",
        ingest.rejected_accesses,
    )
    yield _counters(
        "flexd_ingest_adjusted_accesses",
        "Accesses counted by rule: late (at their own time) and future_clamped (as of the newest event).",
        "rule",
        ingest.adjusted_accesses,
    )
    yield _gauge("flexd_ingest_lag_messages", "Messages in the stream not read yet.", ingest.lag_messages)
    yield _gauge("flexd_ingest_connected", "0 while the source reports a problem.", ingest.connected)
    yield _counter("flexd_ingest_dead_letters", "Samples of rejected messages kept.", ingest.dead_letters)
    yield _counter(
        "flexd_ingest_dead_letter_failures", "Samples that could not be written.", ingest.dead_letter_failures
    )
    yield _counter(
        "flexd_ingest_lost_messages", "Messages that existed and the source could not deliver.", ingest.messages_lost
    )
    yield _counter("flexd_ingest_source_failures", "Failed reads of the source.", ingest.source_failures)
    yield _counter("flexd_ingest_commit_failures", "Positions that could not be committed.", ingest.commit_failures)
    yield _gauge(
        "flexd_ingest_newest_event_time_seconds",
        "Newest event time seen, Unix time; NaN before the first.",
        ingest.newest_event_unix_seconds,
    )


def _sketch(sketch: SketchFigures) -> Iterator[Metric]:
    yield _gauges("flexd_sketch_bytes", "Memory of the counter of each table.", "table", sketch.bytes_by_table)
    yield _gauges(
        "flexd_sketch_error_bound_ratio",
        "Largest over-estimate as a share of the table's accesses; 0 for other kinds.",
        "table",
        sketch.error_bound_by_table,
    )
    yield _gauges(
        "flexd_sketch_width",
        "Counters in each row of counters of a table's count-min; 0 for other kinds.",
        "table",
        sketch.width_by_table,
    )
    yield _gauges(
        "flexd_sketch_relative_error_ratio",
        "Relative standard error of one row's estimate by logarithmic counters; 0 for other kinds.",
        "table",
        sketch.relative_error_by_table,
    )
    yield _gauges(
        "flexd_sketch_counter_bits",
        "Bits of one row's logarithmic counter; 0 for other kinds.",
        "table",
        sketch.counter_bits_by_table,
    )
    yield _gauges(
        "flexd_table_affinity",
        "Excess over chance of two accesses of a row coming from one node: 0 none, 1 always; an unbiased estimate, so "
        "noise can make it negative; NaN if unknown.",
        "table",
        sketch.affinity_by_table,
    )
    yield _gauges(
        "flexd_table_affinity_error", "Standard error of the affinity.", "table", sketch.affinity_error_by_table
    )
    yield _gauge("flexd_profile_age_seconds", "Since the newest profile.", sketch.profile_age_seconds)
    yield _gauge("flexd_profile_coverage_ratio", "Accesses the newest profile explains, 0-1.", sketch.profile_coverage)
    yield _gauge("flexd_profile_samples", "Accesses behind the newest profile.", sketch.profile_samples)
    yield _gauge("flexd_profile_generation", "Profiles made; goes on over restarts.", sketch.profile_generation)


def _drift(drift: DriftFigures) -> Iterator[Metric]:
    yield _gauge(
        "flexd_drift_ratio",
        "Exposed communication of a step at the live placement, now / when it was planned; NaN before the first look.",
        drift.ratio,
    )
    for name, text, (then, now) in (
        ("flexd_drift_exposed_seconds", "Exposed communication of a step.", drift.exposed_seconds),
        ("flexd_drift_inter_node_bytes", "Bytes between nodes, per rank and step.", drift.inter_node_bytes),
        ("flexd_drift_total_bytes", "Bytes over all links, per rank and step.", drift.total_bytes),
    ):
        yield _gauges(name, f"Live placement, under the profile of its plan and now. {text}", "profile",
                      {"planned": then, "present": now})  # fmt: skip
    yield _gauges(
        "flexd_table_drift_ratio",
        "Exposed communication of each table's bytes at the live placement, now / when it was planned.",
        "table",
        drift.ratio_by_table,
    )
    yield _gauges(
        "flexd_table_exposed_seconds",
        "Exposed communication of each table's bytes a step at the live placement, now, without latencies.",
        "table",
        drift.exposed_seconds_by_table,
    )
    yield _gauges(
        "flexd_table_inter_node_bytes",
        "Bytes of each table between nodes, per rank and step, at the live placement, now.",
        "table",
        drift.inter_node_bytes_by_table,
    )
    yield _gauge("flexd_drift_age_seconds", "Since the newest look at the drift.", drift.age_seconds)
    yield SummaryMetricFamily(
        "flexd_drift_evaluation_duration_seconds",
        "Wall time of looking at the drift.",
        count_value=drift.evaluations,
        sum_value=drift.seconds,
    )


def _plan(plan: PlanFigures) -> Iterator[Metric]:
    yield _counters("flexd_plans", "Plans asked for, by outcome.", "outcome", plan.plans)
    yield SummaryMetricFamily(
        "flexd_plan_duration_seconds",
        "Wall time of planning.",
        count_value=sum(plan.plans.values()),
        sum_value=plan.seconds,
    )
    predicted = GaugeMetricFamily(
        "flexd_plan_predicted_step_communication_seconds",
        "Communication of one step as the newest plan prices it, before and after.",
        labels=["placement"],
    )
    predicted.add_metric(["before"], plan.predicted_before_seconds)
    predicted.add_metric(["after"], plan.predicted_after_seconds)
    yield predicted
    yield _gauge(
        "flexd_plan_predicted_saving_ratio",
        "Of a step's communication, by the newest plan, 0-1; NaN before the first.",
        1 - plan.predicted_after_seconds / plan.predicted_before_seconds
        if plan.predicted_before_seconds > 0
        else math.nan,
    )
    yield _gauge("flexd_plan_age_seconds", "Since the newest plan.", plan.age_seconds)


def _migration(migration: MigrationFigures) -> Iterator[Metric]:
    yield _counters("flexd_migrations", "Migrations ended, by final state.", "state", migration.migrations)
    yield _counter("flexd_migration_rows", "Rows whose tier changed on every rank.", migration.rows)
    yield _counter("flexd_migration_bytes", "Row values and optimizer state copied.", migration.bytes)
    yield _counter("flexd_migration_chunks", "Chunks applied by every rank.", migration.chunks)
    yield _gauge(
        "flexd_migration_progress_ratio", "Of the migration in flight, 0-1; NaN if none is.", migration.progress
    )
    yield _gauge(
        "flexd_migration_eta_seconds",
        "Until the migration in flight is applied; NaN if unknown.",
        migration.eta_seconds,
    )
    yield _counter(
        "flexd_migration_illegal_transitions",
        "Transitions that the state table refused: a fault of flexd.",
        migration.illegal_transitions,
    )
    history = migration.history
    yield _counter("flexd_history_entries", "Entries written to the history of migrations.", history.entries)
    yield _counter("flexd_history_lost_entries", "Entries of the history that were dropped unwritten.", history.lost)
    yield _counter(
        "flexd_history_failures", "Writes of the history that failed, and are tried again.", history.failures
    )
    yield _counter(
        "flexd_history_quarantined", "History files that were not usable and were quarantined.", history.quarantined
    )


def _placement(placement: PlacementFigures) -> Iterator[Metric]:
    yield _gauge("flexd_placement_version", "Chunks applied by every rank.", placement.version)
    yield _gauges(
        "flexd_rank_placement_version",
        "As each rank reported it last.",
        "rank",
        {str(rank): version for rank, version in sorted(placement.version_by_rank.items())},
    )
    yield _gauges(
        "flexd_placement_rows", "Rows in each tier.", "tier", _by_tier(placement.rows_by_tier), keep=len(TIER_NAMES)
    )
    yield _counter(
        "flexd_placement_digest_mismatches",
        "Reports whose placement digest was not the daemon's.",
        placement.digest_mismatches,
    )


def _training(training: TrainingTotals, by_rank: Mapping[int, RankAverages]) -> Iterator[Metric]:
    yield _counters(
        "flexd_training_accesses",
        "Lookups, by the tier of the row that answered.",
        "tier",
        _by_tier(training.accesses_by_tier),
    )
    sent = CounterMetricFamily(
        "flexd_training_sent_bytes",
        "Bytes that the ranks measured where they send, by kind of traffic and link.",
        labels=["kind", "link"],
    )
    for kind in TRAFFIC_KINDS:
        for link in LINKS:
            sent.add_metric([kind, link], training.sent_bytes.get((kind, link), 0))
    yield sent
    yield SummaryMetricFamily(
        "flexd_training_step_duration_seconds",
        "Wall time of training steps, over all ranks.",
        count_value=training.steps,
        sum_value=training.step_seconds,
    )
    yield _counter(
        "flexd_training_apply_seconds", "Step time spent in applying chunks, over all ranks.", training.apply_seconds
    )
    yield _gauge("flexd_training_step", "The newest step that any rank reported.", training.newest_step)
    ranks = by_rank.items()
    for name, text, values in (
        ("step_seconds", "Wall time of a step.", {str(rank): known.step_seconds for rank, known in ranks}),
        ("inter_node_bytes", "Sent to other nodes in a step.", {str(rank): known.inter_bytes for rank, known in ranks}),
        ("replica_hit_ratio", "Look-ups that rows above HOME answered, 0-1.",
         {str(rank): known.replica_share for rank, known in ranks}),
    ):  # fmt: skip
        yield _gauges(f"flexd_rank_{name}", f"Of each rank, over its newest steps. {text}", "rank", values)


def _control(control: ControlFigures) -> Iterator[Metric]:
    yield _counter("flexd_control_epochs", "Epochs of the control channel begun.", control.epochs)
    yield _gauge("flexd_control_topology_generation", "Changes of the live ranks.", control.topology_generation)
    yield _gauge("flexd_control_ranks", "Ranks that the live attempt has.", control.ranks)
    yield _gauge("flexd_control_ranks_ready", "Of which have joined the control channel.", control.ranks_ready)
    yield _counters(
        "flexd_control_refused_messages", "Control messages refused, by kind.", "kind", control.refused_messages
    )
    yield _counter("flexd_control_refused_chunks", "Chunks that a rank refused whole.", control.refused_chunks)


def _snapshot(snapshot: SnapshotFigures) -> Iterator[Metric]:
    yield _gauge("flexd_snapshot_age_seconds", "Since the newest durable snapshot.", snapshot.age_seconds)
    yield _gauge("flexd_snapshot_bytes", "Size of the newest snapshot.", snapshot.bytes)
    yield _gauge(
        "flexd_snapshot_pause_seconds", "How long counting stood still for the newest snapshot.", snapshot.pause_seconds
    )
    yield _counter("flexd_snapshots", "Snapshots written.", snapshot.written)
    yield _counter("flexd_snapshot_failures", "Snapshots that could not be written.", snapshot.failures)


def _by_tier(values: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(TIER_NAMES, values, strict=True))
