"""``explain``: the reason for a row's tier, and the memory that it is in."""

from __future__ import annotations

from typing import Annotated

import typer

from flexd.api import routes
from flexd.api.base import TierName
from flexd.api.explanation import Explanation, RowReport, ThresholdReport
from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.cli.options import OutputOption, SocketOption, UrlOption, connect
from flexd.cli.plan_view import gate_sentences
from flexd.cli.view import OutputFormat, emit
from flexd.core import units


def explain(
    target: Annotated[str, typer.Argument(metavar="TABLE[:ROW]", help="A table, or one row of it.")],
    hottest: Annotated[
        int, typer.Option("--hottest", help="Rows to show of a table, the most frequent first.", min=0, max=1000)
    ] = 10,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Explain the tier and the memory of a row, or the hottest rows of a table.

    Of a row: estimated look-ups, price in each tier, thresholds. Of a table: thresholds and the hottest rows. Where
    home rows are in two memories, also what the frames of fast memory hold.

    Example: flexd explain items:1234
    """
    table, row = split_target(target)
    answer = connect(url, socket).send(routes.EXPLAIN, table=table, row=row, hottest=hottest)
    emit(answer, explain_blocks(answer, single=row is not None), output)


def split_target(target: str) -> tuple[str, int | None]:
    """Split ``items:12`` into ("items", 12), and ``items`` into ("items", None). Only digits after the last colon are a
    row."""
    table, colon, row = target.rpartition(":")
    if colon and table and row.isascii() and row.isdigit():
        return table, int(row)
    return target, None


TIERS: tuple[TierName, ...] = ("HOME", "NODE", "DEVICE")


def explain_blocks(answer: Explanation, *, single: bool) -> list[Block]:
    """Return one row in full, or a table with its hottest rows, and the thresholds."""
    if single and answer.explained:
        row = answer.explained[0]
        return [
            _row_facts(answer, row),
            _prices(answer, row),
            _thresholds(answer),
            _sentence(answer, row),
            *_thin(answer),
        ]
    blocks: list[Block] = [_table_facts(answer), _tiers(answer), _thresholds(answer)]
    if answer.explained:
        blocks.append(_hottest(answer))
    return [*blocks, *_thin(answer)]


def _thin(answer: Explanation) -> list[Block]:
    words = gate_sentences(answer.gates)
    return [Sentences("a gate is closed: no such plan is carried out without --force", words)] if words else []


def _row_facts(answer: Explanation, row: RowReport) -> Facts:
    place = f"number {units.count(row.place)} of its table" if row.listed else "not listed: taken for an average one"
    facts = [
        ("row", f"{answer.table}:{row.row}, {place}"),
        ("tier", f"{row.live} now, {row.planned} in a plan made now"),
        (
            "look-ups",
            f"{_accesses(row.accesses_per_step)} a step of the job ({_accesses(row.accesses_lower)} to "
            f"{_accesses(row.accesses_upper)})",
        ),
        (
            "in a step",
            f"a rank looks it up {units.share(row.per_rank)}, a node {units.share(row.per_node)}, any rank "
            f"{units.share(row.anywhere)}",
        ),
        ("home", f"rank {row.home_rank} (key {row.key})"),
    ]
    if row.moved_to is not None:
        facts.append(("lives", f"in node {row.moved_to}: it has moved there, and rank {row.home_rank} keeps its place"))
    if row.source_node_share is not None:
        shown = ", ".join(f"node {node} {units.share(share)}" for node, share in enumerate(row.source_node_share[:16]))
        facts.append(("comes from", shown))
    if row.affinity_node is not None:
        facts.append(
            (
                "by affinity",
                f"belongs in node {row.affinity_node}: {units.share(row.affinity_share)} of its touches would come "
                "from there, with samples dealt"
                + ("" if row.moved_to is not None else " (planner.moved_slots_share lets rows move)"),
            )
        )
    return Facts("", tuple(facts))


def _accesses(value: float | None) -> str:
    if value is None:
        return units.UNKNOWN
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def _prices(answer: Explanation, row: RowReport) -> Table:
    columns = ("tier", "exposed a step", "saved against HOME", "slots", "worth of the slots", "")
    slots = {threshold.tier: threshold for threshold in answer.thresholds}
    home = row.seconds.get("HOME")
    rows = []
    for tier in TIERS:
        seconds, threshold = row.seconds.get(tier), slots.get(tier)
        if seconds is None or home is None or (tier != "HOME" and threshold is None):
            continue
        price = _slots_price(threshold)
        marks = [word for word, at in (("now", row.live), ("planned", row.planned)) if at == tier]
        rows.append(
            (
                tier,
                units.seconds(seconds),
                units.seconds(home - seconds) if threshold else "",
                units.count(threshold.slots) if threshold else "",
                units.seconds(price) if threshold else "",
                ", ".join(marks),
            )
        )
    return Table("price of the row in each tier", columns, tuple(rows), frozenset(columns[1:5]))


def _slots_price(threshold: ThresholdReport | None) -> float:
    return 0.0 if threshold is None else threshold.slots * (threshold.slot_seconds or 0.0)


def _thresholds(answer: Explanation) -> Table:
    columns = ("tier", "promoted from", "demoted below", "price of a slot")
    rows = tuple(
        (
            threshold.tier,
            _threshold(threshold.promote_accesses),
            _threshold(threshold.demote_accesses),
            units.seconds(threshold.slot_seconds),
        )
        for threshold in answer.thresholds
    )
    return Table("thresholds, look-ups of the job in a step", columns, rows, frozenset(columns[1:]))


def _threshold(accesses: float | None) -> str:
    return "no frequency pays" if accesses is None else _accesses(accesses)


def _table_facts(answer: Explanation) -> Facts:
    return Facts(
        "",
        (
            ("table", f"{answer.table}, {units.count(answer.rows)} rows, {units.count(answer.distinct_rows)} seen"),
            ("look-ups", f"{_accesses(answer.accesses_per_step)} a step of the job"),
            ("coverage", units.share(answer.coverage)),
            (
                "replica slots",
                f"{units.count(answer.slots_used)} of {units.count(answer.slots)} on the fullest rank, in the plan",
            ),
            ("latency", f"{units.seconds(answer.sync_latency_seconds)} a step to synchronise replicas at all"),
        ),
    )


def _tiers(answer: Explanation) -> Table:
    columns = ("tier", "rows now", "rows in a plan made now")
    rows = tuple(
        (tier, units.count(answer.live_rows.get(tier, 0)), units.count(answer.planned_rows.get(tier, 0)))
        for tier in TIERS
    )
    return Table("rows by tier", columns, rows, frozenset(columns[1:]))


def _hottest(answer: Explanation) -> Table:
    columns = ("row", "look-ups a step", "a node has it", "now", "planned", "saved at it", "why")
    rows = []
    for row in answer.explained:
        home, planned = row.seconds.get("HOME"), row.seconds.get(row.planned)
        saved = None if home is None or planned is None else home - planned
        rows.append(
            (
                str(row.row),
                _accesses(row.accesses_per_step),
                units.share(row.per_node),
                row.live,
                row.planned,
                units.seconds(saved),
                row.reason.replace("_", " "),
            )
        )
    return Table(
        "hottest rows", columns, tuple(rows), frozenset(("row", "look-ups a step", "a node has it", "saved at it"))
    )


def _sentence(answer: Explanation, row: RowReport) -> Sentences:
    home = row.seconds.get("HOME") or 0.0
    saved = {
        threshold.tier: home - (row.seconds.get(threshold.tier) or 0.0)
        for threshold in answer.thresholds
        if row.seconds.get(threshold.tier) is not None
    }
    tier: TierName = max(saved, key=lambda name: saved[name]) if saved else "HOME"
    best = saved.get(tier, 0.0)
    price = next((_slots_price(threshold) for threshold in answer.thresholds if threshold.tier == tier), 0.0)
    text = {
        "saves": f"At {row.planned} it saves {units.seconds(saved.get(row.planned, 0.0))} a step against HOME, "
        + ("more than its slots earn with any other row." if price > 0 else "and there are slots left."),
        "pinned": f"It is pinned to {row.planned}.",
        "excluded": "Its table is excluded: its rows stay at HOME.",
        "no_gain": "Every further copy costs more synchronisation than it saves: too few nodes look the row up in the "
        "same step.",
        "slot_price": f"{tier} would save {units.seconds(best)} a step, but the slots it takes earn "
        f"{units.seconds(price)} with hotter rows.",
        "migration": f"{tier} would save {units.seconds(best)} a step by the estimate, but by the lower bound of its "
        "look-ups that does not pay for copying it.",
        "latency": f"{tier} would save {units.seconds(best)} a step, but all such rows together do not pay for "
        f"{units.seconds(answer.sync_latency_seconds)} of latency that synchronising takes.",
    }[row.reason]
    lines = [text]
    if row.live != row.planned:
        lines.append(f"It is at {row.live} now and moves with the next plan.")
    return Sentences("why", tuple(lines))
