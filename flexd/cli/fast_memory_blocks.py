"""The division of fast memory, for ``flexd plan`` and ``flexd explain``."""

from __future__ import annotations

from flexd.api.explanation import HeldRowsReport, RowReport, TableFastMemoryReport
from flexd.api.fast_memory import FastMemoryGroup, FastMemoryReport
from flexd.cli.blocks import Block, Facts, Table
from flexd.core import units

MAX_GROUPS = 16
"""Dim-groups to list (``-o json`` has all)."""


def fast_memory_blocks(shown: FastMemoryReport) -> list[Block]:
    """Return the budget, its price, and frames and misses by dim-group, predicted beside measured."""
    per_mebibyte = None if shown.seconds_per_byte is None else shown.seconds_per_byte * 2**20
    facts = [
        ("frames", f"{units.size(shown.budget_bytes)} a rank"),
        ("a miss", f"{units.seconds(shown.miss_seconds)} of waiting, measured"),
        (
            "predicted wait",
            f"{units.seconds(shown.stall_seconds)} a step now, {units.seconds(shown.planned_stall_seconds)} as "
            f"planned; one more MiB saves {units.seconds(per_mebibyte)}",
        ),
    ]
    joint = [group for group in shown.groups if group.joint_slots is not None]
    if joint:
        facts.append(("with replica slots", ", ".join(map(_joint, joint[:MAX_GROUPS])) + " at the next start"))
    columns = ("dim-group", "home rows", "frames", "planned", "misses predicted", "measured", "planned misses")
    rows = tuple(
        (
            str(number), units.count(group.home_rows), units.count(group.frames), units.count(group.planned_frames),
            _misses(group.misses), _misses(group.measured_misses), _misses(group.planned_misses),
        )
        for number, group in enumerate(shown.groups[:MAX_GROUPS])
    )  # fmt: skip
    left = len(shown.groups) - MAX_GROUPS
    title = "frames of a rank, misses a step" + (f", {left} more dim-groups" if left > 0 else "")
    spare = ("home rows", "measured")
    return [Facts("fast memory", tuple(facts)), Table(title, columns, rows, frozenset(columns), spare)]


def _joint(group: FastMemoryGroup) -> str:
    return f"{units.count(group.joint_slots)} slots (now {units.count(group.slots)})"


def _misses(value: float | None) -> str:
    if value is None:
        return units.UNKNOWN
    return units.count(round(value)) if value >= 100 else f"{value:.3g}"


def row_memory_fact(row: RowReport, shown: TableFastMemoryReport) -> tuple[str, str]:
    """Return whether fast memory holds a row, what that costs a step, and what it would be as planned."""
    words = f"{_in_frame(row.in_frame)} now, {_in_frame(row.planned_in_frame)} as planned"
    missed = _row_misses(row, shown, row.in_frame)
    if missed:
        wait = None if shown.miss_seconds is None else missed * shown.miss_seconds
        words += f"; costs {_misses(missed)} reads a step" + ("" if wait is None else f", {units.seconds(wait)}")
    return ("fast memory", f"{words}; {_misses(row.in_pass)} uses a pass")


def table_memory_blocks(shown: TableFastMemoryReport) -> list[Block]:
    """Return the table's part of fast memory, and what one more frame would save."""
    columns = ("division", "frames", "rows of the table", "reads a step", "share", "held from", "next frame saves", "")
    rows = tuple(_division(name, held, shown) for name, held in (("now", shown.now), ("planned", shown.planned)))
    price = f"a read costs {units.seconds(shown.miss_seconds)}" if shown.miss_seconds is not None else "no price yet"
    title = f"fast memory of a rank, frames of {units.size(shown.frame_bytes)}, {price}"
    return [Table(title, columns, rows, frozenset(columns[1:]), ("share",))]


def _division(name: str, held: HeldRowsReport, shown: TableFastMemoryReport) -> tuple[str, ...]:
    share = None if held.misses is None or not shown.used_rows else held.misses / shown.used_rows
    return (
        name, units.count(held.frames), _misses(held.held_rows), _misses(held.misses), units.share(share),
        f"{held.least_touches:.3g} uses a pass" if held.least_touches else "all that are used",
        f"{_misses(held.next_frame_misses)} reads",
        "" if held.next_frame_seconds is None else units.seconds(held.next_frame_seconds),
    )  # fmt: skip


def _in_frame(held: float | None) -> str:
    if held is None:
        return units.UNKNOWN
    if held in (0.0, 1.0):
        return "in a frame" if held else "in slow memory"
    return f"in a frame with {units.share(held)}"


def _row_misses(row: RowReport, shown: TableFastMemoryReport, held: float | None) -> float:
    if row.in_pass is None or held is None:
        return 0.0
    return shown.passes * row.in_pass * (1.0 - held)
