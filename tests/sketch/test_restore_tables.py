"""Saved sketches in other tables and settings: a table whose counters changed starts empty, and the others stay."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError, StateVersionError
from flexd.core.keyspace import TableSpec
from flexd.sketch.restore import restore_tables
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings

T0 = 1.7e9
ACCESSES = 1_000
MESSAGES = 4


def counted(tables: list[TableSpec], of: SketchSettings, seed: int = 0) -> SketchSet:
    sketches = SketchSet(tables, of)
    random = np.random.default_rng(seed)
    for number in range(MESSAGES):
        for table in tables:
            rows = (random.zipf(1.3, ACCESSES) * 13) % table.rows
            sketches.ingest(table.name, rows, number % 4, T0 + 10.0 * number)
    return sketches


def restored(sketches: SketchSet, tables: list[TableSpec], of: SketchSettings):
    meta, arrays = sketches.state()
    meta = json.loads(json.dumps(meta))
    fresh, outcomes = restore_tables(meta, {name: array.copy() for name, array in arrays.items()}, tables, of)
    return fresh, {outcome.table: outcome for outcome in outcomes}


def all_rows(table: TableSpec) -> np.ndarray:
    return np.arange(min(table.rows, 100_000), dtype=np.int64)


DENSE, LOG, WIDE, NARROW = (
    SketchSettings(memory_bytes=4 * 2**20, half_life_seconds=100.0, max_hot_rows=200),
    SketchSettings(memory_bytes=120_000, half_life_seconds=100.0, max_hot_rows=200),
    SketchSettings(memory_bytes=400_000, half_life_seconds=100.0, max_hot_rows=200, logarithmic=False),
    SketchSettings(memory_bytes=200_000, half_life_seconds=100.0, max_hot_rows=200, logarithmic=False),
)
ITEMS = TableSpec("items", 100_000, 8)


@pytest.mark.parametrize(
    ("before", "after", "table", "words"),
    [
        (DENSE, LOG, ITEMS, r"dense to logarithmic \(\d bits\)"),
        (LOG, DENSE, ITEMS, r"logarithmic \(\d bits\) to dense"),
        (WIDE, NARROW, ITEMS, r"count-min \(2\^\d+, 200 hot rows\) to count-min"),
        (WIDE, dataclasses.replace(WIDE, max_hot_rows=100), ITEMS, "200 hot rows.*100 hot rows"),
        (DENSE, DENSE, dataclasses.replace(ITEMS, rows=100_001), "100000 rows to 100001"),
        (DENSE, dataclasses.replace(DENSE, half_life_seconds=50.0), ITEMS, "half-life"),
        (DENSE, dataclasses.replace(DENSE, half_life_seconds=None), ITEMS, "half-life"),
        (DENSE, dataclasses.replace(DENSE, share=0.5), ITEMS, "1 of the stream was counted, now 0.5"),
    ],
)
def test_counters_that_changed_start_empty_and_say_so(before, after, table, words):
    fresh, outcomes = restored(counted([ITEMS], before), [table], after)
    outcome = outcomes["items"]
    assert (outcome.outcome, outcome.lost) == ("emptied", MESSAGES * ACCESSES)
    assert re.search(words, outcome.detail)
    assert fresh.samples == 0
    assert fresh.query("items", all_rows(table)).sum() == 0
    assert fresh.newest_event_seconds == T0 + 10.0 * (MESSAGES - 1), "the clock goes on"


def test_a_newer_format_and_malformed_states_are_refused():
    meta, arrays = counted([ITEMS], LOG).state()
    with pytest.raises(StateVersionError, match="format 7 is of a newer flexd"):
        restore_tables({**meta, "format": 7}, arrays, [ITEMS], LOG)
    for wrong in (
        {**meta, "format": None},
        {**meta, "format": 5}, {**meta, "format": "6"}, {**meta, "table_list": None}, {**meta, "sketches": []},
        {**meta, "settings": 5}, {**meta, "decay": {}},
        {**meta, "sketches": [{**meta["sketches"][0], "choice": {"kind": "pickle"}}]},
        {**meta, "table_list": [{**meta["table_list"][0], "optimizer": "of a later flexd"}]},
    ):  # fmt: skip
        with pytest.raises(SketchError):
            restore_tables(wrong, arrays, [ITEMS], LOG)


NAMES = ("a", "b", "c", "d", "e")
ROWS = (50, 700, 30_000, 1_000_000)
table_lists = st.lists(
    st.builds(
        lambda name, rows, dim: TableSpec(name, rows, dim),
        st.sampled_from(NAMES), st.sampled_from(ROWS), st.sampled_from((4, 8)),
    ),
    min_size=1, max_size=4, unique_by=lambda table: table.name,
)  # fmt: skip
sketch_settings = st.builds(
    SketchSettings,
    memory_bytes=st.sampled_from((400_000, 900_000, 6_000_000)),
    half_life_seconds=st.sampled_from((None, 40.0)),
    max_hot_rows=st.sampled_from((50, 1_000)),
    logarithmic=st.booleans(),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(table_lists, sketch_settings, table_lists, sketch_settings, st.integers(0, 1000))
def test_any_change_keeps_exactly_the_counts_that_fit(old_tables, old, new_tables, new, seed):
    sketches = counted(old_tables, old, seed)
    after, outcomes = restored(sketches, new_tables, new)
    saved = {table.name: (table, choice) for table, choice in zip(old_tables, sketches.choices(), strict=True)}
    samples = dict(zip((table.name for table in old_tables), sketches.samples_by_table(), strict=True))
    assert set(outcomes) == {table.name for table in (*old_tables, *new_tables)}
    got_samples = after.samples_by_table()
    for index, (table, choice) in enumerate(zip(new_tables, after.choices(), strict=True)):
        rows = all_rows(table)
        now, outcome = after.query(table.name, rows), outcomes[table.name]
        if table.name not in saved:
            assert (outcome.outcome, now.sum(), got_samples[index]) == ("new", 0.0, 0)
            continue
        before, was = saved[table.name]
        same = (before.rows, was.kind, was.counter_bits, was.log2_width) == (
            table.rows, choice.kind, choice.counter_bits, choice.log2_width,
        )  # fmt: skip
        same &= choice.kind != "count_min" or was.hot_rows == choice.hot_rows
        if same and old.half_life_seconds == new.half_life_seconds:
            assert outcome.outcome == "kept"
            assert np.array_equal(now, sketches.query(table.name, rows))
            assert got_samples[index] == samples[table.name]
        else:
            assert (outcome.outcome, now.sum(), got_samples[index]) == ("emptied", 0.0, 0)
            assert outcome.lost == samples[table.name]
    for name in set(saved) - {table.name for table in new_tables}:
        assert (outcomes[name].outcome, outcomes[name].lost) == ("removed", samples[name])
    # The restored counters count on, and are a state like any other.
    for table in new_tables:
        after.ingest(table.name, np.arange(20), 0, T0 + 100.0)
    again, outcomes = restored(after, new_tables, new)
    assert {outcome.outcome for outcome in outcomes.values()} == {"kept"}
    for table in new_tables:
        assert np.array_equal(again.query(table.name, all_rows(table)), after.query(table.name, all_rows(table)))
