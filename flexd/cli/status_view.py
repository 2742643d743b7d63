"""Text of the daemon's status."""

from __future__ import annotations

from collections.abc import Mapping

from flexd.api.leadership import LeadershipStatus
from flexd.api.migration import MigrationReport
from flexd.api.replan import ReplanResult
from flexd.api.sketch import TableSketchStatus
from flexd.api.status import Status
from flexd.cli.blocks import PROBLEM, Block, Facts, Sentences, Table
from flexd.cli.plan_view import plan_facts
from flexd.cli.planning_view import planning_block
from flexd.cli.scale_out_view import scale_out_block
from flexd.cli.throttle_view import throttle_blocks
from flexd.core import units

MAX_TABLES = 20
"""The largest counters; the rest is one line (`-o json` lists all)."""
MAX_MISSING_RANKS = 16
MAX_DRIFTING_TABLES = 8


def status_blocks(status: Status) -> list[Block]:
    blocks: list[Block] = [_daemon(status), _stream(status), _sketch(status), _topology(status), _placement(status)]
    if status.drift.ratio is not None:
        blocks.append(_drift(status))
    if status.last_plan is not None:
        blocks.append(Facts("last plan", plan_facts(status.last_plan)))
    blocks.append(planning_block(status.planning))
    if status.migration is not None:
        blocks.append(Facts("migration", migration_facts(status.migration)))
    if status.throttle.adaptive or status.throttle.bytes_per_step or status.throttle.bytes_per_second:
        blocks += throttle_blocks(status.throttle)
    if status.scale_out is not None:
        blocks.append(scale_out_block(status.scale_out))
    if status.sketch.tables:
        blocks.append(_tables(status))
    return blocks


def replan_blocks(result: ReplanResult) -> list[Block]:
    blocks: list[Block] = [
        Sentences("", (f"{result.outcome}: {result.message}" if result.message else result.outcome,))
    ]
    if result.plan is not None:
        blocks.append(Facts("plan", plan_facts(result.plan)))
    if result.migration is not None:
        blocks.append(Facts("migration", migration_facts(result.migration)))
    return blocks


def migration_facts(migration: MigrationReport) -> tuple[tuple[str, str], ...]:
    facts = [
        ("id", f"{migration.migration_id} of plan {migration.plan_id}"),
        ("state", f"{migration.state}, {units.share(migration.progress)} done"),
        ("rows", f"{units.count(migration.rows_applied)} of {units.count(migration.rows)}"),
        (
            "chunks",
            f"{units.count(migration.chunks_applied)} applied, {units.count(migration.chunks_pushed)} pushed"
            # Chunks are made as they are pushed: their number is rarely known.
            + (f" of {units.count(migration.chunks)}" if migration.chunks > migration.chunks_pushed else ""),
        ),
        ("bytes", units.size(migration.bytes)),
    ]
    if migration.who:
        facts.insert(1, ("why", f"{migration.reason or migration.trigger or units.UNKNOWN} ({migration.who})"))
    if migration.last_version or migration.base_version:
        facts.append(("versions", f"{migration.base_version} -> {migration.last_version or migration.base_version}"))
    if migration.steps:
        steps = ", ".join(f"{step.name} {units.share(step.completion)}" for step in migration.steps)
        facts.append(("steps", steps))
    if migration.eta_seconds is not None:
        facts.append(("left", f"{units.age(migration.eta_seconds)} at the present rate"))
    if migration.problem:
        facts.append(("problem", migration.problem))
    return tuple(facts)


def _daemon(status: Status) -> Facts:
    if not status.healthy:
        health = "NOT HEALTHY"
    else:
        health = "ready" if status.ready else "NOT READY"
    facts = [
        ("job", status.job),
        ("flexd", f"{status.version}, up {units.age(status.uptime_seconds)}"),
        ("health", health),
        *(("", reason) for reason in status.reasons),
    ]
    if status.leadership is not None:
        facts.append(("leadership", _leadership(status.leadership)))
    if status.paused:
        facts.append(("paused", status.pause_reason or "yes"))
    return Facts("", tuple(facts), frozenset() if status.healthy and status.ready else frozenset(("health", "")))


def _leadership(shown: LeadershipStatus) -> str:
    leader = shown.holder or "nobody"
    words = f"{shown.role} ({shown.identity})" + ("" if shown.role == "leader" else f"; {leader} leads")
    return f"{words}, term {shown.term}" + (f"; {shown.problem}" if shown.problem else "")


def _stream(status: Status) -> Facts:
    stream = status.stream
    facts = [
        (
            "source",
            f"{stream.source}, {units.count(stream.lag_messages)} messages behind, "
            f"newest access {units.when(stream.newest_event_unix_seconds)}",
        ),
        (
            "rate",
            f"{units.rate(stream.accesses_per_second, 'accesses')}, "
            f"{units.rate(stream.messages_per_second, 'messages')}",
        ),
        ("counted", f"{units.count(stream.accesses)} accesses in {units.count(stream.messages)} messages"),
        ("rejected", _rejected(stream.rejected_messages, stream.rejected_accesses)),
    ]
    adjusted = [f"{rule} {units.count(n)}" for rule, n in stream.adjusted_accesses.items() if n]
    if adjusted:
        facts.append(("by rule", ", ".join(adjusted)))
    if stream.problem:
        facts.append(("problem", stream.problem))
    return Facts("stream", tuple(facts))


def _rejected(messages: Mapping[str, int], accesses: Mapping[str, int]) -> str:
    parts = [
        f"{units.count(sum(by_reason.values()))} {what} ({', '.join(f'{r} {units.count(n)}' for r, n in shown)})"
        for what, by_reason in (("messages", messages), ("accesses", accesses))
        if (shown := [(reason, number) for reason, number in by_reason.items() if number])
    ]
    return ", ".join(parts) or "nothing"


def _sketch(status: Status) -> Facts:
    sketch, profile = status.sketch, status.sketch.profile
    snapshot = status.snapshot
    made = (
        f"{profile.generation}: {units.count(profile.samples)} accesses over {units.age(profile.window_seconds)}, "
        f"coverage {units.share(profile.coverage)}, {units.age(profile.age_seconds)} old"
    )
    durable = f"{units.age(snapshot.age_seconds)} old" if snapshot.age_seconds is not None else "none yet"
    facts = [
        ("memory", f"{units.size(sketch.bytes)} in {units.plural(len(sketch.tables), 'table')}"),
        ("profile", made if profile.age_seconds is not None else "none yet"),
        (
            "snapshot",
            f"{durable}, {units.count(snapshot.written)} written, {units.count(snapshot.failures)} failed",
        ),
    ]
    if snapshot.problem:
        facts.append(("problem", snapshot.problem))
    return Facts("sketch", tuple(facts))


def _topology(status: Status) -> Facts:
    topology = status.topology
    if topology.world_size == 0:
        ranks = "not all have said hello" if topology.missing_ranks else "none have said hello"
    else:
        ranks = (
            f"{topology.world_size} = {topology.nodes} nodes x {topology.local_ranks}, attempt "
            f"{topology.attempt or units.UNKNOWN}, generation {topology.generation}, "
            f"{'ready' if topology.ready else 'NOT READY'}"
        )
    facts = [("ranks", ranks), ("priced as", topology.cluster or units.UNKNOWN)]
    if topology.missing_ranks:
        shown = ", ".join(str(rank) for rank in topology.missing_ranks[:MAX_MISSING_RANKS])
        more = len(topology.missing_ranks) - MAX_MISSING_RANKS
        facts.append(("missing", shown + (f" and {more} more" if more > 0 else "")))
    if topology.problem:
        facts.append(("problem", topology.problem))
    # While ranks are live the problem is empty, and a refused rank of another attempt would not be seen.
    if topology.refused_ranks and not topology.problem:
        newest = topology.refused_ranks[0]
        facts.append(("refused", f"rank {newest.rank} of attempt {newest.attempt}: {newest.reason}"))
    return Facts("topology", tuple(facts), PROBLEM | {"missing", "refused"})


def _placement(status: Status) -> Facts:
    placement = status.placement
    return Facts(
        "placement",
        (
            ("version", f"{placement.version}, digest {placement.digest}"),
            ("rows", units.by_tier(placement.rows) or "all at HOME"),
        ),
    )


def _drift(status: Status) -> Facts:
    drift = status.drift
    against = "never plans" if drift.threshold is None else f"plans above {drift.threshold:.2f}"
    facts = [
        ("ratio", f"{drift.ratio or 0:.3f} of what the live placement cost when it was planned ({against})"),
        ("exposed", f"{units.seconds(drift.exposed_seconds_then)} -> {units.seconds(drift.exposed_seconds)} a step"),
        (
            "between nodes",
            f"{units.size(drift.inter_node_bytes_then)} -> {units.size(drift.inter_node_bytes)} a rank and step",
        ),
        ("looked", f"{units.age(drift.age_seconds)} ago"),
    ]
    dearest = sorted(drift.tables, key=lambda table: -table.exposed_seconds)[:MAX_DRIFTING_TABLES]
    if len(drift.tables) > 1:
        facts.append(("tables", ", ".join(f"{table.table} {_times(table.ratio)}" for table in dearest)))
    return Facts("drift", tuple(facts))


def _times(ratio: float | None) -> str:
    return units.UNKNOWN if ratio is None else f"x {ratio:.3f}"


def _tables(status: Status) -> Table:
    largest = sorted(status.sketch.tables, key=lambda table: -table.bytes)
    rows = [
        (
            table.table,
            _kind(table),
            units.size(table.bytes),
            units.share(table.relative_error if table.kind == "logarithmic" else table.error_bound),
            _affinity(table.affinity, table.affinity_error),
        )
        for table in largest[:MAX_TABLES]
    ]
    if len(largest) > MAX_TABLES:
        rest = largest[MAX_TABLES:]
        rows.append((f"and {len(rest)} more", "", units.size(sum(table.bytes for table in rest)), "", ""))
    return Table(
        "counters",
        ("table", "kind", "memory", "error", "affinity"),
        tuple(rows),
        frozenset(("memory", "error", "affinity")),
    )


def _kind(table: TableSketchStatus) -> str:
    if table.kind == "logarithmic":
        return f"logarithmic, {table.counter_bits} bits"
    return "dense" if table.kind == "dense" else f"count-min {units.count(table.width)}"


def _affinity(affinity: float | None, error: float | None) -> str:
    if affinity is None:
        return units.UNKNOWN
    return f"{affinity:.3f}" if error is None else f"{affinity:.3f} +- {error:.3f}"
