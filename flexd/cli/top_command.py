"""``top``: the daemon live on one screen."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from pydantic import Field

from flexd.api.base import Model
from flexd.api.rank import RankPage
from flexd.api.status import Status
from flexd.api.table import TablePage
from flexd.api.timeline import Timeline, TrafficSample
from flexd.cli.blocks import Block, Facts, Table
from flexd.cli.client import DaemonClient
from flexd.cli.interactive import progress_line
from flexd.cli.options import OutputOption, SocketOption, UrlOption, connect
from flexd.cli.view import OutputFormat, emit
from flexd.core import units
from flexd.core.errors import FlexdError


class Screen(Model):
    """The contents of ``top``."""

    status: Status
    """The daemon."""
    timeline: Timeline = Field(default_factory=lambda: Timeline(interval_seconds=0.0))
    """Recent traffic."""
    ranks: RankPage
    """The first ranks."""
    tables: TablePage
    """The most accessed tables."""

    def blocks(self) -> list[Block]:
        return top_blocks(self.status, self.timeline, self.ranks, self.tables)


def top(
    every: Annotated[
        float, typer.Option("-d", "--delay", metavar="S", min=0.2, max=3600, help="Interval, in seconds.")
    ] = 2.0,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the daemon live on one screen until Control-C.

    Shows traffic against row-wise sharding, tiers, ranks, migration and tables. In a pipe, or with -o json, it shows
    them once.

    Example: flexd top --delay 1
    """
    client = connect(url, socket)
    if output is not OutputFormat.TABLE or not sys.stdout.isatty():
        screen = _look(client)
        emit(screen, screen.blocks(), output)
        return
    _live(client, every)


def _look(client: DaemonClient) -> Screen:
    return Screen(
        status=client.status(),
        timeline=client.timeline(),
        ranks=client.ranks(0, RANKS),
        tables=client.tables(0, TABLES, "accesses"),
    )


def _live(client: DaemonClient, every: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from flexd.cli.screen import renderable

    console = Console(highlight=False)
    # The first request fails as any command does; later ones wait for a daemon that restarts.
    screen, problem = _look(client), ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                heading = Text(f"flexd top, every {every:g} s (Control-C ends) {problem}", style="dim")
                live.update(Group(heading, Text(""), renderable(screen.blocks())), refresh=True)
                time.sleep(every)
                try:
                    screen, problem = _look(client), ""
                except FlexdError as error:
                    problem = f"- {error.message}"
        except KeyboardInterrupt:
            pass


TABLES = 8
RANKS = 16
_SPARK = " ▁▂▃▄▅▆▇█"
_SPARK_SAMPLES = 40
_RECENT_SAMPLES = 3
"""Number of samples to average, since one interval may have few reports."""


def top_blocks(status: Status, timeline: Timeline, ranks: RankPage, tables: TablePage) -> list[Block]:
    blocks: list[Block] = [_head(status), _traffic(timeline)]
    if status.migration is not None and status.migration.state in ("PENDING", "PUSHING", "APPLYING", "ABORTING"):
        blocks.append(Facts("migration", (("", progress_line(status.migration)),)))
    if ranks.total:
        blocks.append(_ranks(ranks))
    blocks.append(_tables(tables))
    return blocks


def _head(status: Status) -> Facts:
    health = "NOT HEALTHY" if not status.healthy else "ready" if status.ready else "NOT READY"
    if status.paused:
        health += f", paused: {status.pause_reason or ''}"
    stream, drift = status.stream, status.drift.ratio
    rows = units.by_tier(status.placement.rows)
    return Facts(
        "",
        (
            ("job", f"{status.job}, up {units.age(status.uptime_seconds)}, {health}"),
            *(("", reason) for reason in status.reasons),
            (
                "stream",
                f"{units.rate(stream.accesses_per_second, 'accesses')}, {units.count(stream.lag_messages)} messages "
                "behind",
            ),
            ("drift", units.UNKNOWN if drift is None else f"x {drift:.3f}"),
            ("placement", f"version {status.placement.version}: {rows or 'all at HOME'}"),
        ),
    )


def _traffic(timeline: Timeline) -> Facts:
    recent = [sample for sample in timeline.samples if sample.steps][-_RECENT_SAMPLES:]
    if not recent:
        return Facts("traffic of a rank and step", (("", "no rank has reported"),))
    inter, baseline = _mean(recent, "inter_node_bytes"), _mean(recent, "row_wise_inter_node_bytes")
    accesses = {tier: sum(s.accesses.get(tier, 0) for s in recent) for tier in ("HOME", "NODE", "DEVICE")}
    total = sum(accesses.values())
    hits = ", ".join(f"{tier} {units.share(number / total if total else None)}" for tier, number in accesses.items())
    return Facts(
        "traffic of a rank and step",
        (
            ("inter-node", f"{units.size(inter)}  {_spark([s.inter_node_bytes for s in timeline.samples])}"),
            ("of it sync", units.size(_mean(recent, "sync_inter_node_bytes"))),
            ("row-wise", f"{units.size(baseline)} ({units.change(baseline, inter)} against it)"),
            ("intra-node", units.size(_mean(recent, "intra_node_bytes"))),
            ("migration", units.size(_mean(recent, "migration_bytes"))),
            ("answered by", hits),
            ("step time", units.seconds(_mean(recent, "step_seconds"))),
        ),
    )


def _mean(samples: Sequence[TrafficSample], name: str) -> float | None:
    """Return the mean weighted by steps; None if no value is known."""
    known = [(getattr(sample, name), sample.steps) for sample in samples if getattr(sample, name) is not None]
    steps = sum(count for _, count in known)
    return sum(value * count for value, count in known) / steps if steps else None


def _spark(values: Sequence[float | None]) -> str:
    shown = [value for value in values if value is not None][-_SPARK_SAMPLES:]
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    return "".join(_SPARK[min(len(_SPARK) - 1, round(value / top * (len(_SPARK) - 1)))] for value in shown)


def _ranks(page: RankPage) -> Table:
    columns = ("rank", "node", "version", "step", "step time", "replicas", "inter", "load")
    sent = [(rank.inter_node_bytes_per_step or 0.0) + (rank.intra_node_bytes_per_step or 0.0) for rank in page.ranks]
    most = max(sent, default=0.0)
    rows = tuple(
        (
            str(rank.rank),
            str(rank.node),
            units.UNKNOWN if rank.placement_version is None else str(rank.placement_version),
            units.count(rank.step),
            units.seconds(rank.step_seconds),
            units.share(rank.replica_share),
            units.size(rank.inter_node_bytes_per_step),
            "#" * (round(16 * bytes_sent / most) if most else 0),
        )
        for rank, bytes_sent in zip(page.ranks, sent, strict=True)
    )
    more = f" (first {len(rows)} of {page.total})" if len(rows) < page.total else ""
    return Table(f"ranks{more}", columns, rows, frozenset(columns) - {"load"})


def _tables(page: TablePage) -> Table:
    columns = ("table", "share", "NODE", "DEVICE", "drift")
    rows = tuple(
        (
            table.table,
            units.share(table.share),
            units.count(table.placed_rows.get("NODE")),
            units.count(table.placed_rows.get("DEVICE")),
            units.UNKNOWN if table.drift_ratio is None else f"x {table.drift_ratio:.3f}",
        )
        for table in page.tables
    )
    more = f" (first {len(rows)} of {page.total})" if len(rows) < page.total else ""
    return Table(f"tables{more}", columns, rows, frozenset(columns) - {"table"})
