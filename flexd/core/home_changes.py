"""Home rules that change while rows are in use: the map after a block of rows has gone to another rule.

Before the first row goes to a new rule, all rows of the table get turns by it among the spare slots of the dim-group,
the same ones on each rank of the rule. The turns by a rule are free again when no row has it any more. So a change that
has begun, and the way back, always have room. The choice depends on the map alone, so ranks that apply the same blocks
have the same map.
"""

from __future__ import annotations

from flexd.core.errors import PlacementError
from flexd.core.home_block import HomeBlock
from flexd.core.home_rules import HomeRule
from flexd.core.homes import HomePart, Homes


def after_block(homes: Homes, block: HomeBlock) -> Homes:
    """Return the map after a block.

    Raises:
        PlacementError: the rows do not have the rule that the block states, they are not next to the boundary of their
            table, a rule names copies on every rank, or the ranks have no room for the new rule.
        TopologyError: a rule names a node or rank that the job does not have.
    """
    tables = homes.keyspace.tables
    if not 0 <= block.table < len(tables):
        raise PlacementError(f"a block of rows of table {block.table}, there are {len(tables)} tables")
    rows, name = tables[block.table].rows, tables[block.table].name
    if not 0 <= block.first_row < block.end_row <= rows or block.old == block.new:
        raise PlacementError(
            f"table {name!r} of {rows} rows: a block of rows {block.first_row} to {block.end_row} from rule "
            f"{block.old} to {block.new}"
        )
    if block.old.copied or block.new.copied:
        raise PlacementError(
            f"table {name!r}: the rule {block.new if block.new.copied else block.old} cannot change while rows are in "
            "use",
            remedy="give it in the trainer, and start again from a checkpoint",
        )
    upper, lower = homes.rules[block.table], homes.lower_rules.get(block.table)
    boundary = homes.boundary(block.table)
    if (block.old, block.first_row) == (upper, boundary) and lower in (None, block.new):
        lower, boundary = block.new, block.end_row
    elif (block.old, block.new, block.end_row) == (lower, upper, boundary):
        boundary = block.first_row
    else:
        state = f"{upper}" if lower is None else f"{lower} below row {boundary}, {upper} from there"
        raise PlacementError(
            f"table {name!r} has the home rule {state}: rows {block.first_row} to {block.end_row} cannot go from rule "
            f"{block.old} to {block.new}",
            remedy="finish the change that has begun, or take it back",
        )
    assert lower is not None  # noqa: S101
    ends = {lower: (0, boundary), upper: (boundary, rows)}
    known = {} if homes.lower_rules.get(block.table) is None else {lower: homes.parts_of(block.table)[0]}
    known[upper] = homes.parts_of(block.table)[-1]
    parts = []
    for rule in (lower, upper):
        first, end = ends[rule]
        if first == end:
            continue
        ranks = rule.ranks(homes.layout)
        turns = known[rule].turns if rule in known else _free_turns(homes, block.table, rule)
        parts.append(HomePart(block.table, first, end, ranks.start, len(ranks), turns))
    if boundary in (0, rows):
        return homes.with_parts(block.table, parts, upper if boundary == 0 else lower)
    return homes.with_parts(block.table, parts, upper, lower)


def divided(homes: Homes, block: HomeBlock, rows: int) -> list[HomeBlock]:
    """Return blocks of at most ``rows`` rows that do the same as a block, in the order in which they can be applied."""
    blocks = block.divided(rows)
    return blocks if block.old == homes.rules[block.table] else blocks[::-1]


def _free_turns(homes: Homes, table: int, rule: HomeRule) -> int:
    """Return ``HomePart.turns`` of the lowest window that is free on all ranks of a rule."""
    ranks = rule.ranks(homes.layout)
    first_key, rows = int(homes.keyspace.first_key[table]), homes.keyspace.tables[table].rows
    needed = (first_key + rows - 1) // len(ranks) - first_key // len(ranks) + 1
    group = homes.group_of(table)
    begins, ends = homes.turns(group)
    used = []
    for other in homes.groups[group].tables:
        other_first, other_rows = int(homes.keyspace.first_key[other]), homes.keyspace.tables[other].rows
        for part in homes.parts_of(other):
            if part.first_rank < ranks.stop and ranks.start < part.first_rank + part.span:
                last = (other_first + other_rows - 1) // part.span
                used.append((other_first // part.span + part.turns, last + part.turns + 1))
    mine = slice(ranks.start, ranks.stop)
    at = int(begins[mine].max())
    for begin, end in sorted(used):
        if begin - at >= needed:
            break
        at = max(at, end)
    if at + needed > int(ends[mine].min()):
        raise PlacementError(
            f"table {homes.keyspace.tables[table].name!r}: rule {rule} needs {needed} home slots in a row on each of "
            f"its ranks, and there are none",
            remedy="a larger spare_home_fraction of the collection",
        )
    return at - first_key // len(ranks)
