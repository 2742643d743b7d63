"""A replay as people read it."""

from __future__ import annotations

from typing import Any

from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.core import units


def simulate_blocks(summary: dict[str, Any]) -> list[Block]:
    """Facts, the strategies, the budget sweep if there was one, and what it all says."""
    blocks: list[Block] = [_facts(summary), _strategies(summary)]
    if summary["budget_sweep"]:
        blocks.append(_sweep(summary))
    return [*blocks, Sentences("in words", tuple(summary["words"]))]


def _facts(summary: dict[str, Any]) -> Facts:
    settings = summary["settings"]
    half_life = settings["half_life_steps"]
    return Facts(
        "",
        (
            ("accesses", f"{summary['accesses']}, {units.count(summary['accesses_per_step'])} a step of the job"),
            ("tables", f"{summary['tables']} with {units.count(summary['rows'])} rows"),
            (
                "cluster",
                f"{summary['nodes']} nodes x {summary['local_ranks']} ranks, priced as {summary['cluster']}",
            ),
            ("replica slots", f"{units.share(settings['replica_fraction'])} of the rows, of each rank"),
            (
                "re-planned",
                f"every {settings['interval_steps']} steps, half-life "
                f"{'none' if half_life is None else f'{half_life:g} steps'}, horizon "
                f"{settings['horizon_steps']:g} steps",
            ),
        ),
    )


def _strategies(summary: dict[str, Any]) -> Table:
    columns = (
        "strategy", "exposed", "saved", "waited-for bytes", "saved bytes", "sync", "migration", "all", "busiest rank",
        "rows", "plans",
    )  # fmt: skip
    rows = tuple(_row(figures) for figures in summary["strategies"].values())
    first, last = summary["compared_steps"]
    title = f"inter-node bytes of the job and exposed time, means of steps {first} to {last - 1}"
    spare = ("rows", "plans", "busiest rank", "sync", "migration", "all")
    return Table(title, columns, rows, frozenset(columns[1:]), spare)


def _row(figures: dict[str, Any]) -> tuple[str, ...]:
    inter, saved = figures["bytes"]["inter_node"], figures.get("saved")
    return (
        figures["title"],
        units.seconds(figures["exposed_seconds"]),
        units.UNKNOWN if saved is None else units.seconds(saved["exposed_seconds"]),
        units.size(figures["critical_inter_node_bytes"]),
        units.UNKNOWN if saved is None else units.size(saved["critical_inter_node_bytes"]),
        units.size(inter["sync"]),
        units.size(inter["migration"]),
        units.size(inter["total"]),
        f"{figures['busiest_rank_share']:.2f}",
        units.count(figures["replicated_rows"]),
        units.count(figures["plans"]),
    )


def _sweep(summary: dict[str, Any]) -> Table:
    columns = ("replica slots", "exposed", "saved", "waited-for bytes", "saved bytes", "rows")
    rows = []
    for figures in summary["budget_sweep"]:
        row = _row(figures)
        rows.append((units.share(figures["replica_fraction"]), *row[1:5], row[9]))
    return Table("the re-planned placement at other budgets", columns, tuple(rows), frozenset(columns))
