"""The flat key space: tables grouped by dim, dtype and optimizer, and back from keys to rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import ConfigError, TopologyError
from flexd.core.keyspace import NO_KEY, Homes, KeySpace, TableSpec, state_columns
from flexd.core.placement import RankLayout
from flexd.core.sharding_types import ShardingType

SPECS = st.lists(
    st.tuples(st.integers(1, 50), st.sampled_from([2, 8]), st.sampled_from(["float32", "bfloat16"])),
    min_size=1,
    max_size=8,
).map(lambda shapes: [TableSpec(f"t{i}", rows, dim, dtype) for i, (rows, dim, dtype) in enumerate(shapes)])


@given(SPECS)
def test_every_key_names_one_row_of_one_table(specs: list[TableSpec]) -> None:
    keyspace = KeySpace(specs)
    keys = np.concatenate([keyspace.keys(table, np.arange(spec.rows)) for table, spec in enumerate(specs)])
    assert np.array_equal(np.sort(keys), np.arange(keyspace.total_rows))
    tables, rows = keyspace.table_rows(keys)
    assert tables.tolist() == [table for table, spec in enumerate(specs) for _ in range(spec.rows)]
    assert rows.tolist() == [row for spec in specs for row in range(spec.rows)]


@given(SPECS)
def test_groups_are_contiguous_and_in_the_order_of_their_first_tables(specs: list[TableSpec]) -> None:
    keyspace = KeySpace(specs)
    assert [group.first_key for group in keyspace.groups] == [
        0, *(group.end_key for group in keyspace.groups[:-1])
    ]  # fmt: skip
    assert [group.tables[0] for group in keyspace.groups] == sorted(group.tables[0] for group in keyspace.groups)
    for number, group in enumerate(keyspace.groups):
        assert {(specs[t].dim, specs[t].dtype) for t in group.tables} == {(group.dim, group.dtype)}
        assert (keyspace.group_of(np.arange(group.first_key, group.end_key)) == number).all()


def test_the_digest_names_the_list_of_tables() -> None:
    one = [TableSpec("a", 5, 4), TableSpec("b", 6, 4)]
    others = [one[::-1], [TableSpec("a", 6, 4), one[1]], [TableSpec("a", 5, 4, optimizer="adam"), one[1]]]
    digests = {KeySpace(specs).digest for specs in (one, *others)}
    assert len(digests) == 4
    assert KeySpace(list(one)).digest in digests


def test_bytes_of_a_row_and_its_state() -> None:
    assert TableSpec("a", 5, 16, "bfloat16", "adam").row_bytes == 32
    assert TableSpec("a", 5, 16, "bfloat16", "adam").state_bytes == 2 * 16 * 4
    assert TableSpec("a", 5, 16, "float64", "rowwise_adam").state_bytes == 17 * 8
    assert state_columns("rowwise_adam", 16) == {"exp_avg": 16, "exp_avg_sq": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1, 1), "no name"),
        (("a", 0, 1), "rows=0"),
        (("a", 1, 1, "int4"), "dtype 'int4'"),
        (("a", 1, 1, "float32", "lion"), "optimizer 'lion'"),
    ],
)
def test_invalid_tables_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TableSpec(*arguments)  # type: ignore[arg-type]


def test_lists_without_tables_and_with_equal_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tables"):
        KeySpace([])
    with pytest.raises(ConfigError, match="tables named twice: a"):
        KeySpace([TableSpec("a", 1, 1), TableSpec("a", 2, 1)])


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
