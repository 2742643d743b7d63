"""Restoring the newest usable snapshot; another configuration or version keeps every count that still fits."""

import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError, StateVersionError, UnusableStateError
from flexd.core.keyspace import TableSpec
from flexd.sketch import snapshot
from flexd.sketch.restore import GENERATION_RESERVE, restore_tables
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_sketch import SketchSettings
from tests.support.ingest_fakes import (
    LOG,
    TABLES,
    FakeSource,
    Killed,
    assert_same_state,
    kill_at,
    make_ingestor,
    run_to_the_end,
    state_of,
    uninterrupted_state,
)


def test_profile_numbers_continue_after_a_restart(tmp_path):
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2))
    assert [ingestor.profile().generation for _ in range(3)] == [1, 2, 3]
    run_to_the_end(ingestor, source)
    assert (source.closed, source.committed) == (True, [{"p0": 12, "p1": 12}])
    again = make_ingestor(FakeSource(LOG), SnapshotStore(tmp_path, 2))
    assert again.profile().generation == 3 + GENERATION_RESERVE + 1
    assert again.profile().samples == ingestor.profile().samples > 0


def test_damaged_newest_snapshot_is_reported_and_the_previous_continued(tmp_path, monkeypatch):
    expected = uninterrupted_state()
    kill_at(monkeypatch, "thread.ingest", 5)
    source = FakeSource(LOG)
    store = SnapshotStore(tmp_path / "state", 3)
    with pytest.raises(Killed):
        run_to_the_end(make_ingestor(source, store, snapshot_interval_seconds=0.0), source)
    newest = store.paths()[0]
    newest.write_bytes(newest.read_bytes()[:-5])
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path / "state", 3))
    run_to_the_end(ingestor, source)
    assert str(newest) in ingestor.restored.problems[0]
    assert newest.with_name(f"{newest.name}.unusable").exists()
    assert_same_state(state_of(ingestor), expected)


ROWS = np.arange(200, dtype=np.int64)


@pytest.fixture
def counted(tmp_path):
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2))
    run_to_the_end(ingestor, source)
    return ingestor


@pytest.mark.parametrize(
    ("kind", "match"),
    [("damaged", "flexd state reset"), ("newer", "newer flexd"), ("of other tables", "none of its tables")],
)
def test_unusable_state_is_refused_unchanged_or_renamed_where_the_daemon_may_start_without_it(
    tmp_path, counted, kind, match
):
    store, tables = SnapshotStore(tmp_path, 3), TABLES
    (newest,) = store.paths()
    if kind == "damaged":
        newest.write_bytes(b"junk")
    elif kind == "newer":
        meta, arrays = snapshot.read(newest)
        meta["sketches"]["format"] += 1
        newest = store.save(meta, arrays)
    else:
        tables = [TableSpec("other", 200, 4)]
    before = [path.name for path in store.paths()]
    with pytest.raises(UnusableStateError, match=match):
        make_ingestor(FakeSource(LOG), store, tables)
    assert [path.name for path in store.paths()] == before
    source = FakeSource(LOG)
    after = make_ingestor(source, store, tables, start_empty=True)
    assert [path.name for path in store.paths()] == before[1:], "the one before it is continued"
    assert newest.with_name(f"{newest.name}.unusable").exists()
    assert after.restored.problems
    assert after.sketches.samples == (counted.sketches.samples if kind == "newer" else 0)
    run_to_the_end(after, source)
    assert source.restored == ({"p0": 12, "p1": 12} if kind == "newer" else None)
    assert after.sketches.samples == (0 if kind == "of other tables" else counted.sketches.samples)


def test_a_table_whose_counters_changed_starts_empty_alone_and_says_so(tmp_path, counted, caplog):
    tables = [dataclasses.replace(table, rows=table.rows + (table.name == "small")) for table in TABLES]
    after = make_ingestor(FakeSource(LOG), SnapshotStore(tmp_path, 2), tables)
    assert np.array_equal(after.sketches.query("large", ROWS), counted.sketches.query("large", ROWS))
    assert after.sketches.samples_by_table() == (0, counted.sketches.samples_by_table()[1])
    assert {outcome.table: outcome.outcome for outcome in after.restored.outcomes} == {
        "small": "emptied",
        "large": "kept",
    }
    assert "table small starts empty: its counters changed" in caplog.text
    run_to_the_end(after, after.source)
    assert after.source.restored == {"p0": 12, "p1": 12}, "the positions stay: nothing is counted twice"


def test_weights_are_those_of_the_whole_stream_and_samples_those_read(counted):
    profile = counted.profile()
    counted.source.read_share = 0.25
    scaled = counted.profile()
    for before, after in zip(profile.tables, scaled.tables, strict=True):
        assert after.weight == pytest.approx(4 * before.weight)
        assert np.array_equal(after.hot_share, before.hot_share)
        assert counted.table_profile(after.table).weight == after.weight
    assert scaled.samples == profile.samples == sum(counted.sketches.samples_by_table())


T0 = 1.7e9
ACCESSES = 1_000
MESSAGES = 4


def sketches_of(tables: list[TableSpec], of: SketchSettings, seed: int = 0) -> SketchSet:
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


DENSE, LOGARITHMIC, WIDE, NARROW = (
    SketchSettings(memory_bytes=4 * 2**20, half_life_seconds=100.0, max_hot_rows=200),
    SketchSettings(memory_bytes=120_000, half_life_seconds=100.0, max_hot_rows=200),
    SketchSettings(memory_bytes=400_000, half_life_seconds=100.0, max_hot_rows=200, logarithmic=False),
    SketchSettings(memory_bytes=200_000, half_life_seconds=100.0, max_hot_rows=200, logarithmic=False),
)
ITEMS = TableSpec("items", 100_000, 8)


@pytest.mark.parametrize(
    ("before", "after", "table", "words"),
    [
        (DENSE, LOGARITHMIC, ITEMS, r"dense to logarithmic \(\d bits\)"),
        (LOGARITHMIC, DENSE, ITEMS, r"logarithmic \(\d bits\) to dense"),
        (WIDE, NARROW, ITEMS, r"count-min \(2\^\d+, 200 hot rows\) to count-min"),
        (WIDE, dataclasses.replace(WIDE, max_hot_rows=100), ITEMS, "200 hot rows.*100 hot rows"),
        (DENSE, DENSE, dataclasses.replace(ITEMS, rows=100_001), "100000 rows to 100001"),
        (DENSE, dataclasses.replace(DENSE, half_life_seconds=50.0), ITEMS, "half-life"),
        (DENSE, dataclasses.replace(DENSE, half_life_seconds=None), ITEMS, "half-life"),
        (DENSE, dataclasses.replace(DENSE, share=0.5), ITEMS, "1 of the stream was counted, now 0.5"),
    ],
)
def test_counters_that_changed_start_empty_and_say_so(before, after, table, words):
    fresh, outcomes = restored(sketches_of([ITEMS], before), [table], after)
    outcome = outcomes["items"]
    assert (outcome.outcome, outcome.lost) == ("emptied", MESSAGES * ACCESSES)
    assert re.search(words, outcome.detail)
    assert (fresh.samples, fresh.query("items", all_rows(table)).sum()) == (0, 0)
    assert fresh.newest_event_seconds == T0 + 10.0 * (MESSAGES - 1), "the clock goes on"


def test_a_newer_format_and_malformed_states_are_refused():
    meta, arrays = sketches_of([ITEMS], LOGARITHMIC).state()
    with pytest.raises(StateVersionError, match="format 7 is of a newer flexd"):
        restore_tables({**meta, "format": 7}, arrays, [ITEMS], LOGARITHMIC)
    for wrong in (
        {**meta, "format": None},
        {**meta, "format": 5}, {**meta, "format": "6"}, {**meta, "table_list": None}, {**meta, "sketches": []},
        {**meta, "settings": 5}, {**meta, "decay": {}},
        {**meta, "sketches": [{**meta["sketches"][0], "choice": {"kind": "pickle"}}]},
        {**meta, "table_list": [{**meta["table_list"][0], "optimizer": "of a later flexd"}]},
    ):  # fmt: skip
        with pytest.raises(SketchError):
            restore_tables(wrong, arrays, [ITEMS], LOGARITHMIC)


table_lists = st.lists(
    st.builds(
        lambda name, rows, dim: TableSpec(name, rows, dim),
        st.sampled_from("abcde"), st.sampled_from((50, 700, 30_000, 1_000_000)), st.sampled_from((4, 8)),
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
    sketches = sketches_of(old_tables, old, seed)
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
