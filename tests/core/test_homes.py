"""Sharding types and addresses: every row has one place, on the ranks of its rule, and can be found from there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import ConfigError, TopologyError
from flexd.core.homes import NO_KEY, Homes
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.core.sharding_types import ShardingType


@st.composite
def homes(draw: st.DrawFn) -> Homes:
    layout = RankLayout(draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    rules = [
        "row_wise",
        *(f"table_row_wise:{n}" for n in range(layout.nodes)),
        *(f"table_wise:{r}" for r in range(layout.world_size)),
    ]
    tables = [
        TableSpec(
            f"t{i}", draw(st.integers(1, 40)), draw(st.sampled_from([4, 8])), sharding=draw(st.sampled_from(rules))
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    return Homes(KeySpace(tables), layout)


@settings(deadline=None)
@given(homes())
def test_every_row_has_an_address_of_its_own_on_the_ranks_of_its_rule(found: Homes) -> None:
    keys = np.arange(found.keyspace.total_rows)
    addresses = found.addresses(keys)
    assert len(np.unique(addresses)) == len(keys)
    np.testing.assert_array_equal(found.keys(addresses), keys)
    of_table = found.keyspace.table_of(keys)
    for table, rule in enumerate(found.rules):
        ranks = rule.ranks(found.layout)
        mine = keys[of_table == table]
        np.testing.assert_array_equal(found.home_rank(mine), ranks.start + mine % len(ranks))
        if rule.kind != "table_wise":  # a node rule keeps the rail, so that rows move to a node over it
            np.testing.assert_array_equal(found.rail(mine), mine % found.layout.local_ranks)


@settings(deadline=None)
@given(homes())
def test_addresses_of_a_dim_group_are_in_its_range_and_those_without_a_row_have_no_key(found: Homes) -> None:
    world = found.layout.world_size
    known = np.sort(found.addresses(np.arange(found.keyspace.total_rows)))
    for number, (group, keys) in enumerate(zip(found.groups, found.keyspace.groups, strict=True)):
        addresses = found.addresses(np.arange(keys.first_key, keys.end_key))
        assert group.first_key <= addresses.min()
        assert addresses.max() < group.end_key
        every = np.arange(group.first_key, group.end_key)
        np.testing.assert_array_equal(found.keys(every) != NO_KEY, np.isin(every, known))
        first = group.first_key + (np.arange(world) - group.first_key) % world
        slots = (addresses - first[addresses % world]) // world
        assert (slots < found.home_rows(number)[addresses % world]).all()
    for a, b in zip(found.groups, found.groups[1:], strict=False):
        assert a.end_key <= b.first_key


@settings(deadline=None)
@given(homes(), st.integers(0, 39), st.integers(0, 39))
def test_runs_are_the_rows_of_a_rank_in_consecutive_slots(found: Homes, a: int, b: int) -> None:
    world = found.layout.world_size
    for number, group in enumerate(found.groups):
        for table in group.tables:
            first_key, total = int(found.keyspace.first_key[table]), found.keyspace.tables[table].rows
            wanted = range(min(a, b, total), min(max(a, b), total))
            seen = []
            for rank in range(world):
                first_address = group.first_key + (rank - group.first_key) % world
                run = found.run(table, rank, wanted)
                addresses = found.addresses(np.array(run.rows, dtype=np.int64) + first_key)
                assert (addresses % world == rank).all()
                slots = (addresses - first_address) // world
                np.testing.assert_array_equal(slots, np.arange(run.slots.start, run.slots.stop))
                assert run.slots.stop <= found.home_rows(number)[rank]
                seen += list(run.rows)
            assert sorted(seen) == list(wanted)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node",
        "table_row_wise:",
        "table_row_wise:x",
        "table_row_wise:-1",
        "table_wise:1.5",
        "row:1",
        "all:1",
        "table_wise:²",
    ],
)
def test_an_unknown_rule_names_the_table(text: str) -> None:
    with pytest.raises(ConfigError, match="'item'"):
        TableSpec("item", 4, 4, sharding=text)


def test_a_rule_of_a_node_or_rank_that_there_is_not_is_refused() -> None:
    for rule in ("table_row_wise:2", "table_wise:4"):
        with pytest.raises(TopologyError, match=rule):
            Homes(KeySpace([TableSpec("item", 4, 4, sharding=rule)]), RankLayout(2, 2))
    assert ShardingType.parse("table_wise:3").ranks(RankLayout(2, 2)) == range(3, 4)
    assert [str(ShardingType.parse(text)) for text in ("row_wise", "table_row_wise:1", "table_wise:3")] == [
        "row_wise",
        "table_row_wise:1",
        "table_wise:3",
    ]


def test_more_rows_than_addresses_are_refused() -> None:
    with pytest.raises(ConfigError, match="44 bits"):
        Homes(KeySpace([TableSpec("item", 2**40, 4, sharding="table_wise:0")]), RankLayout(4, 8))
