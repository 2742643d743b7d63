"""Saved sketches in other tables and settings: what fits stays, what can be converted keeps its promise."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError, StateVersionError
from flexd.core.keyspace import TableSpec
from flexd.core.layout import RankLayout
from flexd.sketch.counters.countmin import CountMin
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_migration import outcomes_of, restore
from flexd.sketch.types import SketchSettings

T0 = 1.7e9
ACCESSES = 4_000
MESSAGES = 8
MEBI = 2**20


def counted(tables: list[TableSpec], of: SketchSettings, seed: int = 0) -> SketchSet:
    sketches = SketchSet.of(tables, of)
    random = np.random.default_rng(seed)
    for number in range(MESSAGES):
        for table in tables:
            rows = (random.zipf(1.3, ACCESSES) * 13) % table.rows
            sketches.ingest(table.name, rows, number % 4, T0 + 10.0 * number)
    return sketches


def migrated(sketches: SketchSet, tables: list[TableSpec], of: SketchSettings):
    meta, arrays = sketches.state()
    meta = json.loads(json.dumps(meta))
    planned = outcomes_of(meta, tables, of)
    fresh, outcomes = restore(meta, {name: array.copy() for name, array in arrays.items()}, tables, of)
    assert outcomes == planned
    return fresh, {outcome.table: outcome for outcome in outcomes}


def all_rows(table: TableSpec) -> np.ndarray:
    return np.arange(min(table.rows, 100_000), dtype=np.int64)


DENSE, LOG, WIDE, NARROW = (
    SketchSettings(memory_bytes=4 * MEBI, half_life_seconds=100.0, max_hot_rows=200),
    SketchSettings(memory_bytes=120_000, half_life_seconds=100.0, max_hot_rows=200),
    SketchSettings(memory_bytes=400_000, half_life_seconds=100.0, max_hot_rows=200, logarithmic=False),
    SketchSettings(memory_bytes=200_000, half_life_seconds=100.0, max_hot_rows=200, logarithmic=False),
)
ITEMS = TableSpec("items", 100_000, 8)


def kind(sketches: SketchSet) -> str:
    return sketches.choices()[0].kind


def test_exact_counters_become_logarithmic_right_on_average():
    before = counted([ITEMS], DENSE)
    after, outcomes = migrated(before, [ITEMS], LOG)
    assert (kind(before), kind(after), outcomes["items"].outcome) == ("dense", "logarithmic", "converted")
    was, now = before.query("items", all_rows(ITEMS)), after.query("items", all_rows(ITEMS))
    assert now.sum() == pytest.approx(was.sum(), rel=0.05)
    hottest = np.argsort(was)[-50:]
    assert np.median(np.abs(now[hottest] - was[hottest]) / was[hottest]) < 0.5
    assert after.profile().tables[0].weight == pytest.approx(before.profile().tables[0].weight, rel=1e-6)
    assert (now[was == 0] == 0).all()


def test_logarithmic_counters_become_exact_right_on_average():
    before = counted([ITEMS], LOG)
    after, outcomes = migrated(before, [ITEMS], DENSE)
    assert (kind(after), outcomes["items"].outcome) == ("dense", "converted")
    was, now = before.query("items", all_rows(ITEMS)), after.query("items", all_rows(ITEMS))
    assert np.allclose(was, now, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("conservative", [True, False])
def test_exact_counters_become_a_count_min_that_is_never_too_low(conservative):
    of = dataclasses.replace(NARROW, conservative=conservative)
    before = counted([ITEMS], DENSE)
    after, _ = migrated(before, [ITEMS], of)
    was, now = before.query("items", all_rows(ITEMS)), after.query("items", all_rows(ITEMS))
    assert (now >= was * (1 - 1e-9)).all()
    hottest = np.argsort(was)[-20:]
    assert set(hottest.tolist()) <= set(after.profile().tables[0].hot_rows.tolist())


def test_a_plain_count_min_folds_to_what_the_narrower_one_counts():
    plain = {"half_life_seconds": None, "conservative": False}
    before = counted([ITEMS], dataclasses.replace(WIDE, **plain))
    after, outcomes = migrated(before, [ITEMS], dataclasses.replace(NARROW, **plain))
    assert outcomes["items"].outcome == "converted"
    direct = counted([ITEMS], dataclasses.replace(NARROW, **plain))
    rows = all_rows(ITEMS)
    assert np.array_equal(after.query("items", rows), direct.query("items", rows))


@pytest.mark.parametrize("conservative", [True, False])
@pytest.mark.parametrize(("wide", "narrow", "units"), [(12, 9, 3), (12, 9, 2**29), (9, 12, 3), (9, 12, 2**29)])
def test_a_count_min_of_another_width_is_never_too_low(conservative, wide, narrow, units):
    """Also where two neighbours share a value, because one of them is full."""
    saved = CountMin(50_000, wide, conservative=conservative)
    random = np.random.default_rng(1)
    rows = (random.zipf(1.3, 20_000) % 50_000).astype(np.int64)
    buffer = np.empty(1_024, dtype=np.int64)
    registers = np.zeros(4096, dtype=np.uint8)
    start = 0
    while start < len(rows):
        start, _, _, _ = saved.add(rows, start, units, registers, 2**62, buffer, 0)
    exact = np.bincount(rows, minlength=50_000) * units
    for factor in (1.0, 0.37, 5.3):
        new = CountMin(50_000, narrow, conservative=conservative)
        new.fill_from(saved, factor)
        estimates = new.query(np.arange(50_000, dtype=np.int64))
        assert (estimates >= np.floor(exact * factor)).all()
        assert new.error_log2_width == min(wide, narrow)
        again = CountMin(50_000, narrow, conservative=conservative)
        again.load(new.cells(), new.total_units, new.error_log2_width)
        assert np.array_equal(again.query(np.arange(50_000, dtype=np.int64)), estimates)


def test_counters_that_would_break_their_promise_start_empty():
    for before, after in ((NARROW, DENSE), (NARROW, LOG), (LOG, NARROW)):
        fresh, outcomes = migrated(counted([ITEMS], before), [ITEMS], after)
        outcome = outcomes["items"]
        assert (outcome.outcome, outcome.lost) == ("emptied", MESSAGES * ACCESSES)
        assert "cannot become" in outcome.detail
        assert fresh.samples == 0


@pytest.mark.parametrize("before", [DENSE, LOG, WIDE], ids=["dense", "logarithmic", "count_min"])
@pytest.mark.parametrize("half_life", [3.0, 50.0, 1e4, None])
def test_another_half_life_keeps_the_present_weights(before, half_life):
    sketches = counted([ITEMS], before)
    after, outcomes = migrated(sketches, [ITEMS], dataclasses.replace(before, half_life_seconds=half_life))
    assert outcomes["items"].detail == "half-life"
    was, now = sketches.query("items", all_rows(ITEMS)), after.query("items", all_rows(ITEMS))
    tolerance = 1.01 if half_life is None else 2e-3
    assert np.allclose(now, was, rtol=2e-3, atol=tolerance)
    assert now.sum() == pytest.approx(was.sum(), rel=0.02 if before is not WIDE else 1.0)
    # And the next accesses weigh as much as they would have.
    after.ingest("items", np.full(64, 5), 0, T0 + 10.0 * (MESSAGES - 1))
    assert after.query("items", np.array([5]))[0] - now[5] >= 64 * 0.5
    layout = RankLayout(4, 2)
    sources = after.profile(layout=layout).tables[0].sources
    assert sources is not None
    assert sources.sampled_accesses > 0


def test_a_half_life_from_none_begins_to_decay():
    forever = dataclasses.replace(DENSE, half_life_seconds=None)
    sketches = counted([ITEMS], forever)
    after, _ = migrated(sketches, [ITEMS], dataclasses.replace(DENSE, half_life_seconds=10.0))
    was = sketches.query("items", all_rows(ITEMS))
    newest = T0 + 10.0 * (MESSAGES - 1)
    assert np.allclose(after.query("items", all_rows(ITEMS)), was)
    assert np.allclose(after.as_of(newest + 10.0).query("items", all_rows(ITEMS)), was / 2)


@pytest.mark.parametrize("of", [DENSE, LOG], ids=["dense", "logarithmic"])
@pytest.mark.parametrize("rows", [60_000, 140_000])
def test_a_table_of_other_rows_keeps_those_that_exist(of, rows):
    sketches = counted([ITEMS], of)
    other = TableSpec("items", rows, 8)
    after, outcomes = migrated(sketches, [other], of)
    both = np.arange(min(rows, ITEMS.rows), dtype=np.int64)
    if kind(after) == kind(sketches) == "dense":
        assert np.array_equal(after.query("items", both), sketches.query("items", both))
    assert outcomes["items"].outcome == "converted"
    kept = sketches.query("items", both).sum()
    assert after.query("items", np.arange(rows, dtype=np.int64)).sum() == pytest.approx(kept, rel=0.1)
    assert after.profile().tables[0].weight == pytest.approx(kept, rel=0.1)


def test_a_count_min_grows_and_does_not_shrink():
    sketches = counted([ITEMS], WIDE)
    grown, outcomes = migrated(sketches, [TableSpec("items", 150_000, 8)], WIDE)
    assert outcomes["items"].outcome == "converted"
    rows = all_rows(ITEMS)
    assert (grown.query("items", rows) >= sketches.query("items", rows) * 0.999).all()
    _, outcomes = migrated(sketches, [TableSpec("items", 50_000, 8)], WIDE)
    assert outcomes["items"].outcome == "emptied"


def test_a_newer_format_and_malformed_states_are_refused():
    meta, arrays = counted([ITEMS], LOG).state()
    with pytest.raises(StateVersionError, match="format 6 is of a newer flexd"):
        restore({**meta, "format": 6}, arrays, [ITEMS], LOG)
    for wrong in (
        {**meta, "format": 3}, {**meta, "format": "5"}, {**meta, "table_list": None}, {**meta, "sketches": []},
        {**meta, "settings": 5}, {**meta, "decay": {}},
        {**meta, "sketches": [{**meta["sketches"][0], "choice": {"kind": "pickle"}}]},
    ):  # fmt: skip
        with pytest.raises(SketchError):
            restore(wrong, arrays, [ITEMS], LOG)


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
    half_life_seconds=st.sampled_from((None, 40.0, 400.0)),
    max_hot_rows=st.sampled_from((50, 1_000)),
    conservative=st.booleans(),
    logarithmic=st.booleans(),
)
POSSIBLE = {
    ("dense", "dense"), ("dense", "logarithmic"), ("dense", "count_min"), ("logarithmic", "dense"),
    ("logarithmic", "logarithmic"), ("count_min", "count_min"),
}  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(table_lists, sketch_settings, table_lists, sketch_settings, st.integers(0, 1000))
def test_any_change_keeps_exactly_the_counts_that_fit(old_tables, old, new_tables, new, seed):
    sketches = counted(old_tables, old, seed)
    after, outcomes = migrated(sketches, new_tables, new)
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
        before, old_choice = saved[table.name]
        fits = (old_choice.kind, choice.kind) in POSSIBLE and not (
            old_choice.kind == "count_min" and table.rows < before.rows
        )
        if not fits:
            assert (outcome.outcome, now.sum(), got_samples[index]) == ("emptied", 0.0, 0)
            assert outcome.lost == samples[table.name]
            continue
        both = rows[rows < before.rows]
        was = sketches.query(table.name, both)
        if outcome.outcome == "kept":
            assert np.array_equal(now, was)
            assert got_samples[index] == samples[table.name]
            continue
        assert outcome.outcome == "converted"
        assert (now[len(both) :] == 0).all() or choice.kind == "count_min"
        # Without decay a part of an access is rounded to 0 or 1 at random.
        fraction = 1.0 if new.half_life_seconds is None else 1e-3
        if choice.kind == "count_min":
            assert (now[: len(both)] >= was * (1 - 1e-6) - (0.0 if old_choice.kind == "count_min" else fraction)).all()
        elif choice.kind == old_choice.kind == "dense":
            assert np.allclose(now[: len(both)], was, rtol=1e-3, atol=fraction)
        else:
            assert now[: len(both)].sum() == pytest.approx(was.sum(), rel=0.25, abs=60)
    for name in set(saved) - {table.name for table in new_tables}:
        assert (outcomes[name].outcome, outcomes[name].lost) == ("removed", samples[name])
    # The restored counters are a state like any other.
    meta, arrays = after.state()
    again = SketchSet.from_state(new_tables, new, json.loads(json.dumps(meta)), arrays)
    for table in new_tables:
        assert np.array_equal(again.query(table.name, all_rows(table)), after.query(table.name, all_rows(table)))
