"""The division of fast memory, for ``flexd plan``."""

from __future__ import annotations

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
