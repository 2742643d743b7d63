"""Home rules that change block by block: every row always has one place, and no other row moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import PlacementError
from flexd.core.home_block import NO_CHANGES, ChangedRule, ChangedRules, HomeBlock
from flexd.core.home_changes import after_block, changed_rules
from flexd.core.home_rules import HomeRule
from flexd.core.homes import NO_KEY, Homes
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout


def rules_of(layout: RankLayout) -> list[HomeRule]:
    nodes = [HomeRule("node", number) for number in range(layout.nodes)]
    return [HomeRule(), *nodes, *(HomeRule("rank", number) for number in range(layout.world_size))]


@st.composite
def homes(draw: st.DrawFn) -> Homes:
    """Return homes with room for every table by two rules on one rank."""
    layout = RankLayout(draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    tables = [
        TableSpec(
            f"t{i}", draw(st.integers(1, 40)), draw(st.sampled_from([4, 8])),
            homes=str(draw(st.sampled_from(rules_of(layout)))),
        )
        for i in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    keyspace = KeySpace(tables)
    return Homes(keyspace, layout, spare=[6 * group.rows for group in keyspace.groups])


def drawn_block(draw: st.DataObject, found: Homes) -> HomeBlock | None:
    table = draw.draw(st.integers(0, len(found.keyspace.tables) - 1))
    rows, upper, boundary = found.keyspace.tables[table].rows, found.rules[table], found.boundary(table)
    lower = found.lower_rules.get(table) or draw.draw(st.sampled_from(rules_of(found.layout)))
    if lower == upper:
        return None
    if boundary and draw.draw(st.booleans()):
        return HomeBlock(table, rows, lower, upper, draw.draw(st.integers(0, boundary - 1)), boundary, lowers=True)
    return HomeBlock(table, rows, upper, lower, boundary, draw.draw(st.integers(boundary + 1, rows)))


@settings(deadline=None, max_examples=60)
@given(homes(), st.data())
def test_after_every_block_rows_are_where_their_rules_say_and_no_other_has_moved(
    first: Homes, data: st.DataObject
) -> None:
    found, digest, changed = first, 0, NO_CHANGES
    keys = np.arange(found.keyspace.total_rows)
    of_table, first_keys = found.keyspace.table_of(keys), found.keyspace.first_key
    expected = [np.full(spec.rows, str(found.rules[t]), dtype=object) for t, spec in enumerate(found.keyspace.tables)]
    for _ in range(8):
        block = drawn_block(data, found)
        if block is None:
            continue
        before = found.addresses(keys)
        found = after_block(found, block)
        digest = (digest + block.digest_change()) % 2**64
        expected[block.table][block.first_row : block.end_row] = str(block.new)
        addresses = found.addresses(keys)
        assert len(np.unique(addresses)) == len(keys)
        np.testing.assert_array_equal(found.keys(addresses), keys)
        moved = keys[before != addresses] - int(first_keys[block.table])
        assert set(moved) <= set(range(block.first_row, block.end_row))
        for table, rules in enumerate(expected):
            mine = keys[of_table == table]
            for rule in set(rules):
                ranks = HomeRule.parse(rule).ranks(found.layout)
                at = mine[rules == rule]
                np.testing.assert_array_equal(found.home_rank(at), ranks.start + at % len(ranks))
        check_slots(found)
        changed = changed.after(block)
        assert changed == changed_rules(found) == ChangedRules.of_texts(changed.to_texts())
        assert digest == changed.digest()
    for back in changed.blocks_to(NO_CHANGES):
        found = after_block(found, HomeBlock.of_text(back.to_text()))
        digest = (digest + back.digest_change()) % 2**64
    assert digest == 0
    assert found.rules == first.rules


def check_slots(found: Homes) -> None:
    """Check that ``runs`` are the rows of each rank, in slots that it has, and that other slots have no key."""
    world = found.layout.world_size
    for number, group in enumerate(found.groups):
        used = 0
        for rank in range(world):
            first = group.first_key + (rank - group.first_key) % world
            slots = np.arange(found.home_rows(number)[rank])
            keys = found.keys(slots * world + first)
            for table in group.tables:
                for run in found.runs(table, rank):
                    assert run.slots.stop <= len(slots)
                    rows = keys[run.slots] - int(found.keyspace.first_key[table])
                    np.testing.assert_array_equal(rows, np.array(run.rows))
            used += int((keys != NO_KEY).sum())
        assert used == found.keyspace.groups[number].rows


def test_slots_of_a_rule_that_no_row_has_are_used_again() -> None:
    found = Homes(KeySpace([TableSpec("item", 60, 4)]), RankLayout(2, 2), spare=[60])
    for rank in [0, 1, 2, 3] * 3:
        one = HomeRule("rank", rank)
        found = after_block(found, HomeBlock(0, 60, HomeRule(), one, 0, 40))
        found = after_block(found, HomeBlock(0, 60, HomeRule(), one, 40, 60))
        found = after_block(found, HomeBlock(0, 60, one, HomeRule(), 0, 60))
    assert found.lower_rules == {}


def test_a_divided_block_does_the_same_up_and_down() -> None:
    begun = Homes(KeySpace([TableSpec("item", 60, 4)]), RankLayout(1, 2), spare=[60])
    block = HomeBlock(0, 60, HomeRule(), HomeRule("rank", 1), 0, 50)
    whole, found = after_block(begun, block), begun
    for part in block.divided(7):
        assert len(part) <= 7
        found = after_block(found, part)
    assert found.home_parts == whole.home_parts
    for part in HomeBlock(0, 60, block.new, block.old, 0, 50, lowers=True).divided(7):
        found = after_block(found, part)
    assert found.home_parts == begun.home_parts


@pytest.mark.parametrize("seed", range(20))
def test_blocks_lead_from_any_rules_to_any_others(seed: int) -> None:
    """Through changes that have begun, in both directions, of several tables."""
    rng = np.random.default_rng(seed)
    rules = [HomeRule(), HomeRule("rank", 0), HomeRule("rank", 1), HomeRule("node", 0)]

    def drawn() -> ChangedRules:
        found = []
        for table in range(3):
            upper, lower = (rules[at] for at in rng.choice(4, 2, replace=False))
            boundary = int(rng.integers(0, 3)) * 20
            one = ChangedRule(table, 60, rules[0], upper, lower if boundary else None, boundary)
            if one.lower is not None or one.upper != one.first:
                found.append(one)
        return ChangedRules(tuple(found))

    now, target = drawn(), drawn()
    for block in now.blocks_to(target):
        now = now.after(block)
    assert now == target


@pytest.mark.parametrize("text", ["", "[]", '[0,60,"all","rank:x",0,9,0]', '[0,60,"all",1,0,9,0]', '{"a":1}'])
def test_texts_that_are_no_block_are_refused(text: str) -> None:
    with pytest.raises(PlacementError):
        HomeBlock.of_text(text)
    with pytest.raises(PlacementError):
        ChangedRules.of_texts([text])


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (HomeBlock(1, 60, HomeRule(), HomeRule("rank", 1), 0, 9), "of table 1, there are 1 tables"),
        (HomeBlock(0, 60, HomeRule(), HomeRule("rank", 1), 0, 61), "rows 0 to 61 of table 0 cannot go"),
        (HomeBlock(0, 60, HomeRule(), HomeRule("rank", 1), 5, 5), "rows 5 to 5 of table 0 cannot go"),
        (
            HomeBlock(0, 60, HomeRule(), HomeRule("rank", 1), 3, 9),
            "rows 3 to 9 of table 0 cannot go from rule all to rank:1",
        ),
        (HomeBlock(0, 60, HomeRule("rank", 0), HomeRule("rank", 1), 0, 9), "cannot go from rule rank:0 to rank:1"),
        (HomeBlock(0, 60, HomeRule(), HomeRule("every rank"), 0, 9), "the rule every rank cannot change"),
        (HomeBlock(0, 60, HomeRule(), HomeRule("rank", 1), 0, 9), "needs 60 home slots"),
    ],
)
def test_what_cannot_be_done_is_refused(block: HomeBlock, text: str) -> None:
    found = Homes(KeySpace([TableSpec("item", 60, 4)]), RankLayout(1, 2), spare=[40])
    with pytest.raises(PlacementError, match=text):
        after_block(found, block)
