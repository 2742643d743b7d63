"""``status``: the daemon on one screen."""

from __future__ import annotations

from collections.abc import Mapping

from flexd.api import routes
from flexd.api.sketch import TableSketchStatus
from flexd.api.state import StateStatus
from flexd.api.status import Status
from flexd.cli.blocks import PROBLEM, Block, Facts, Table
from flexd.cli.migration_commands import migration_facts
from flexd.cli.options import OutputOption, SocketOption, UrlOption, connect
from flexd.cli.plan_view import plan_facts, planning_block
from flexd.cli.slow_memory_blocks import slow_memory_blocks
from flexd.cli.throttle_command import throttle_blocks
from flexd.cli.view import OutputFormat
from flexd.cli.watch import Answer, WatchOption, emit_watched
from flexd.core import units


def status(
    watch: WatchOption = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the daemon on one screen.

    Shows health, stream, sketch, ranks, placement, last plan and migration.

    Example: flexd status -o json
    """
    client = connect(url, socket)

    def ask() -> Answer:
        answer = client.send(routes.STATUS)
        return answer, status_blocks(answer)

    emit_watched(ask, output, watch)


MAX_TABLES = 20
"""Number of tables to list, those with the largest counters; the rest is one line (`-o json` lists all)."""
MAX_MISSING_RANKS = 16
MAX_LOST_RANGES = 4
MAX_DRIFTING_TABLES = 8
MAX_LOST_TABLES = 4


def status_blocks(status: Status) -> list[Block]:
    blocks: list[Block] = [_daemon(status), _stream(status), _sketch(status), _topology(status), _placement(status)]
    if status.training.phases:
        blocks.append(_phases(status))
    if status.slow_memory is not None:
        blocks += slow_memory_blocks(status.slow_memory)
    if status.prices.links:
        blocks.append(_prices(status))
    if status.drift.ratio is not None:
        blocks.append(_drift(status))
    if status.last_plan is not None:
        blocks.append(Facts("last plan", plan_facts(status.last_plan)))
    blocks.append(planning_block(status.planning))
    if status.migration is not None:
        blocks.append(Facts("migration", migration_facts(status.migration)))
    if status.throttle.adaptive or status.throttle.bytes_per_step or status.throttle.bytes_per_second:
        blocks += throttle_blocks(status.throttle)
    if status.sketch.tables:
        blocks.append(_tables(status))
    return blocks


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
    if status.paused:
        by = f" (by {status.paused_by})" if status.paused_by else ""
        facts.append(("paused", f"{status.pause_reason or 'yes'}{by}"))
    return Facts("", tuple(facts), frozenset() if status.healthy and status.ready else frozenset(("health", "")))


def _stream(status: Status) -> Facts:
    stream = status.stream
    share = "" if stream.read_share == 1 else f" ({stream.read_share:.0%} of its partitions)"
    facts = [
        (
            "source",
            f"{stream.source}{share}, {units.count(stream.lag_messages)} messages behind, "
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
    marked = frozenset[str]()
    if lost := stream.losses():
        facts += [("lost", lost), *(("", r.words()) for r in stream.lost_ranges[-MAX_LOST_RANGES:])]
        marked = frozenset(("lost", ""))
    facts += [("skipped", skipped.words()) for skipped in stream.skipped_offsets[-MAX_LOST_RANGES:]]
    if stream.problem:
        facts.append(("problem", stream.problem))
    return Facts("stream", tuple(facts), PROBLEM | marked)


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
    facts += _restored(status.state)
    return Facts("sketch", tuple(facts), PROBLEM | {"not restored"})


def _restored(state: StateStatus) -> list[tuple[str, str]]:
    """Return what this start did not continue as it was saved."""
    facts = []
    changed = [f"{outcome} {units.count(number)}" for outcome, number in state.outcomes.items() if outcome != "kept"]
    if changed:
        facts.append(("restored", f"tables kept {units.count(state.outcomes.get('kept', 0))}, {', '.join(changed)}"))
    if state.lost_accesses:
        lost = [table for table in state.tables if table.outcome in ("emptied", "removed")]
        named = ", ".join(f"{table.table} ({table.detail})" for table in lost[:MAX_LOST_TABLES])
        more = f" and {len(lost) - MAX_LOST_TABLES} more" if len(lost) > MAX_LOST_TABLES else ""
        facts.append(("not restored", f"{units.count(state.lost_accesses)} accesses of {named}{more}"))
    return facts


def _topology(status: Status) -> Facts:
    topology = status.topology
    if topology.world_size == 0:
        ranks = "not all have registered" if topology.missing_ranks else "none have registered"
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
    if refusals := topology.refusals():
        facts.append(("refused", f"connections before they proved themselves: {refusals}"))
    if unused := status.training.unused_prefetches:
        given = status.training.prefetches
        share = units.share(unused / given) if given else units.UNKNOWN
        facts.append(
            (
                "not used ahead",
                f"{units.count(unused)} prefetched batches ({share} of them): the loop copies or moves ids "
                "after features= of flexd.prefetch returned them; do it in the loader",
            )
        )
    facts += [
        ("mistake", f"{mistake.kind}, {units.count(mistake.count)} times, on rank {mistake.rank}: {mistake.text}")
        for mistake in status.training.mistakes
    ]
    return Facts(
        "topology", tuple(facts), PROBLEM | {"missing", "refused", "not used ahead", "mistake", "contradiction"}
    )


def _placement(status: Status) -> Facts:
    placement = status.placement
    return Facts(
        "placement",
        (
            ("version", f"{placement.version}, digest {placement.digest}"),
            (
                "rows",
                (units.by_tier(placement.rows) or "all at HOME")
                + (f", {units.count(placement.moved_rows)} moved to other nodes" if placement.moved_rows else ""),
            ),
        ),
    )


def _phases(status: Status) -> Table:
    columns = ("phase", "computed", "exposed", "intra", "inter", "sent intra", "sent inter", "collectives")
    rows = tuple(
        (
            phase.phase,
            *(
                units.seconds(seconds)
                for seconds in (
                    phase.computed_seconds, phase.exposed_seconds, phase.intra_seconds, phase.inter_seconds
                )
            ),
            units.size(phase.intra_bytes),
            units.size(phase.inter_bytes),
            f"{(phase.intra_collectives or 0) + (phase.inter_collectives or 0):.3g}",
        )
        for phase in status.training.phases
    )  # fmt: skip
    used = status.training
    reason = f" ({used.exchange_reason})" if used.exchange_reason else ""
    exchange = f", exchange {used.exchange}{reason}" if used.exchange else ""
    return Table(f"a step by phase{exchange}", columns, rows, frozenset(columns[1:]), ("intra", "sent intra"))


_LINKS = {"intra_node": "in nodes", "inter_node": "between nodes"}


def _prices(status: Status) -> Facts:
    return Facts("prices", tuple((_LINKS.get(link.link, link.link), link.reason) for link in status.prices.links))


def _drift(status: Status) -> Facts:
    drift = status.drift
    against = "never plans" if drift.threshold is None else f"plans above {drift.threshold:.2f}"
    facts = [
        ("ratio", f"{drift.ratio or 0:.3f} of what a plan made now would cost ({against})"),
        (
            "exposed",
            f"{units.seconds(drift.exposed_seconds)}, planned {units.seconds(drift.plan_exposed_seconds)} a step",
        ),
        (
            "between nodes",
            f"{units.size(drift.inter_node_bytes)}, planned {units.size(drift.plan_inter_node_bytes)} a rank and step",
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
