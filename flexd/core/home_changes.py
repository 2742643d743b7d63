"""Home rules that change while rows are in use: the map after a block of rows has gone to another rule.

Before the first row goes to a new rule, all rows of the table get turns by it among the spare slots of the dim-group,
the same ones on each rank of the rule. The turns by a rule are free again when no row has it any more. So a change that
has begun, and the way back, always have room. The choice depends on the map alone, so ranks that apply the same blocks
have the same map.
"""

from __future__ import annotations

from flexd.core.errors import PlacementError
from flexd.core.home_block import ChangedRule, ChangedRules, HomeBlock
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
    name = tables[block.table].name
    if block.old.copied or block.new.copied:
        raise PlacementError(
            f"table {name!r}: the rule {block.new if block.new.copied else block.old} cannot change while rows are in "
            "use",
            remedy="copy its rows by a plan or a pin at DEVICE, which costs a step the same"
            if block.new.copied
            else "give another in the trainer, and start again from a checkpoint",
        )
    before = rules_of(homes, block.table)
    try:
        after = before.after(block)
    except PlacementError as error:
        raise PlacementError(f"table {name!r}: {error.message}", remedy=error.remedy) from error
    parts = homes.parts_of(block.table)
    known = {before.upper: parts[-1]} if before.lower is None else {before.lower: parts[0], before.upper: parts[-1]}
    made = []
    for rule, first, end in ((after.lower, 0, after.boundary), (after.upper, after.boundary, after.rows)):
        if rule is not None:
            ranks = rule.ranks(homes.layout)
            turns = known[rule].turns if rule in known else _free_turns(homes, block.table, rule)
            made.append(HomePart(block.table, first, end, ranks.start, len(ranks), turns))
    return homes.with_parts(block.table, made, after.upper, after.lower)


def rules_of(homes: Homes, table: int) -> ChangedRule:
    """Return the rules that a table has now."""
    keyspace = homes.keyspace
    return ChangedRule(
        table, keyspace.tables[table].rows, keyspace.home_rules[table], homes.rules[table],
        homes.lower_rules.get(table), homes.boundary(table),
    )  # fmt: skip


def changed_rules(homes: Homes) -> ChangedRules:
    """Return the tables whose rules differ from those in the table list."""
    every = [rules_of(homes, table) for table in range(len(homes.keyspace.tables))]
    return ChangedRules(tuple(one for one in every if one.lower is not None or one.upper != one.first))


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
