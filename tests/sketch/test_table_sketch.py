"""Every kind of counters counts, decays, gives profiles and is saved alike; accesses counted by row."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.core.placement import RankLayout
from flexd.core.tap_counts import TableCounts, TapCounts
from flexd.sketch.budget import choose
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.profile import read_sources
from flexd.sketch.sketch_set import KINDS, SketchSet
from flexd.sketch.table_sketch import SketchSettings, TableSketch
from tests.support.sketch_memory import array_bytes

ROWS = 50_000
ALL = np.arange(ROWS, dtype=np.int64)
SPEC = TableSpec("t", ROWS, 4)
BUDGETS = {"dense": 2**20, "8 bits": 60_000, "4 bits": 48_000, "3 bits": 24_900, "count-min": 150_000}
"""Memory that gives each kind of counters. The count-min is of a larger table, and logarithmic ones are left out."""


def make(name: str) -> TableSketch:
    spec = TableSpec("t", 10**6, 4) if name == "count-min" else SPEC
    (choice,) = choose([spec], BUDGETS[name], 100, logarithmic=name != "count-min")
    assert name.split()[0] in (str(choice.counter_bits), choice.kind.replace("_", "-"))
    return KINDS[choice.kind](spec, choice, 7)


def fed(table: TableSketch, decay: ForwardDecay, messages: range, seed: int = 0) -> np.ndarray:
    """Count messages, every third of them by row. Return the exact decayed accesses of the first rows."""
    exact = np.zeros(ROWS)
    for number in messages:
        random = np.random.default_rng([seed, number])
        rows = random.zipf(1.3, 2_000) % ROWS
        time = decay.admit(1.7e9 + 10.0 * number).event_time_seconds
        if number % 3:
            outside = np.array([-1, table.spec.rows, table.spec.rows + 5])
            counted = np.concatenate([rows, outside]).astype([np.int32, np.int64][number % 2])
            assert table.add(counted, number % 4, time, decay) == (1, 2)
        else:
            ids, times = np.unique(rows, return_counts=True)
            ids, times = np.append(ids, table.spec.rows), np.append(times, 9)
            assert table.add_counted(ids, times, number % 4, time, decay, random) == 9
        exact += np.bincount(rows, minlength=ROWS) * np.exp(decay.log_weight(time) - decay.log_weight(1.7e9))
    assert table.samples == 2_000 * messages.stop
    return exact * np.exp(decay.log_weight(1.7e9) - decay.log_weight(decay.newest_seconds))


def same_state(a: TableSketch, b: TableSketch) -> bool:
    (meta, arrays), (other_meta, other) = a.state(), b.state()
    return meta == other_meta and all(
        arrays[name].dtype == other[name].dtype and np.array_equal(arrays[name], other[name])
        for name in {*arrays, *other}
    )


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([*BUDGETS]), st.sampled_from([None, 25.0, 3600.0]), st.integers(1, 25), st.integers(0, 2**30))
@example("3 bits", 25.0, 21, 0).via("the step doubled with the last message")
@example("4 bits", 25.0, 22, 0).via("the step doubled with the last message")
def test_every_kind_counts_decays_and_continues_bit_by_bit(name: str, half_life: float | None, number: int, seed: int):
    decay, table = ForwardDecay(half_life, 1e9), make(name)
    assert table.profile(decay, 10).weight == 0
    exact = fed(table, decay, range(number), seed)
    got, profile = table.query(ALL, decay), table.profile(decay, 50, RankLayout(2, 2))
    assert profile.weight == pytest.approx(exact.sum(), rel=2e-3)
    assert 0 < array_bytes(table) <= BUDGETS[name] + 2**11
    allowed = 3e-3 * exact + 2.0**-14 * number
    if name == "dense":
        assert (np.abs(got - exact) <= allowed).all()
    elif name == "count-min":
        assert (got >= exact - allowed).all()
    elif table.level_rows[-1]:
        # As the step has doubled, what lay beyond the top level is not known by row until a row is there again.
        assert got.sum() == pytest.approx(exact.sum(), rel=0.1)
    # The hottest rows are listed, most frequent first, within their bounds; all shares together are one.
    assert (np.diff(profile.hot_share) <= 1e-12).all()
    assert (profile.hot_lower <= profile.hot_share).all()
    assert (profile.hot_share <= profile.hot_upper).all()
    assert int(np.argmax(exact)) in profile.hot_rows
    if not name.endswith("bits"):
        true_share = exact[profile.hot_rows] / exact.sum()
        assert (profile.hot_upper >= true_share - 1e-3).all()
        assert (profile.hot_lower <= true_share + 1e-3).mean() > 0.9
        assert profile.distinct_rows == pytest.approx((exact > 0).sum(), rel=0 if name == "dense" else 0.1)
    assert profile.hot_share.sum() + profile.bin_share @ profile.bin_rows < 1.1
    assert 0.1 < profile.coverage <= 1
    assert profile.coverage > 0.9 or name.endswith("bits")
    sampled = table.state()[1]["sample_rows"]
    assert profile.sources.node_share.sum() == pytest.approx(1)
    assert profile.sources.hot_accesses.sum() == np.isin(sampled, profile.hot_rows).sum()
    # Read later, without an access in between, all has decayed by the formula.
    later = ForwardDecay(half_life, 1e9)
    later.newest_seconds = decay.newest_seconds + 40.0
    factor = 1.0 if half_life is None else 2.0 ** (-40.0 / half_life)
    np.testing.assert_allclose(table.query(ALL, later), factor * got, rtol=1e-6)
    idle = table.profile(later, 50)
    assert idle.weight == pytest.approx(factor * profile.weight)
    assert np.array_equal(idle.hot_rows, profile.hot_rows)
    # A saved state is the state, and counts on alike.
    again = make(name)
    meta, arrays = table.state()
    again.load(json.loads(json.dumps(meta, allow_nan=False)), arrays)
    assert same_state(table, again)
    for each in (table, again):
        each.samples = 0
        fed(each, ForwardDecay(half_life, 1e9), range(4), seed + 1)
    assert same_state(table, again)


@pytest.mark.parametrize("name", BUDGETS)
def test_state_that_does_not_fit_is_refused(name: str):
    table, decay = make(name), ForwardDecay(None, 0.0)
    fed(table, decay, range(4))
    meta, arrays = table.state()

    def refused(meta: dict, arrays: dict) -> None:
        with pytest.raises((SketchError, KeyError)):
            make(name).load(meta, arrays)

    for key, array in arrays.items():
        refused(meta, {other: value for other, value in arrays.items() if other != key})
        refused(meta, {**arrays, key: array.astype(np.int16)})
        if "sample" not in key and "hot" not in key and "high" not in key:
            refused(meta, {**arrays, key: array[:-1]})
        if "rows" in key:
            refused(meta, {**arrays, key: np.append(array, table.spec.rows)})
            refused(meta, {**arrays, key: np.insert(array, 0, -1)})
    for key in meta:
        refused({other: value for other, value in meta.items() if other != key}, arrays)


@pytest.mark.parametrize("half_lives", [30, 60, 3000])
@pytest.mark.parametrize("name", BUDGETS)
def test_what_was_counted_before_a_long_pause_weighs_nothing_beside_what_comes_after(name: str, half_lives: int):
    table, decay = make(name), ForwardDecay(25.0, 1e9)
    fed(table, decay, range(6))
    time = decay.admit(decay.newest_seconds + 25.0 * half_lives).event_time_seconds
    table.add(np.arange(100), 0, time, decay)
    np.testing.assert_allclose(table.query(ALL, decay), ALL < 100, atol=2.0**-6)
    profile = table.profile(decay, 100)
    assert profile.weight == pytest.approx(100, rel=0.01)
    assert set(profile.hot_rows.tolist()) == set(range(100))
    again = make(name)
    again.load(*table.state())
    assert same_state(table, again)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=60), min_size=1, max_size=5))
def test_exact_counters_are_equal_bit_by_bit_however_accesses_come(parts):
    decay, random = ForwardDecay(None, 0.0), np.random.default_rng(0)
    one_by_one, counted = make("dense"), make("dense")
    for part in parts:
        one_by_one.add(np.array(part), 0, 0.0, decay)
        counted.add_counted(*np.unique(part, return_counts=True), 0, 0.0, decay, random)
    for name, array in one_by_one._state()[1].items():
        assert np.array_equal(array, counted._state()[1][name])
    assert one_by_one.samples == counted.samples


def test_accesses_of_a_tap_that_cannot_be_counted_are_counted_by_reason():
    made = SketchSet([TableSpec("small", 500, 8)], SketchSettings(memory_bytes=2**20))
    rows, counts = np.array([1, 600, 601]), np.array([2, 1, 2])
    tables = tuple(TableCounts(name, rows, counts) for name in ("small", "nobody"))
    found = made.ingest_tap(TapCounts(0, 1.0, tables))
    assert (found.accepted, found.row_out_of_range, found.unknown_table) == (2, 3, 5)
    assert made.samples == 2


@pytest.mark.parametrize(("rows", "exponent"), [(2_000, 0.0), (2_000, 1.05), (20_000, 1.05)])
def test_counts_of_nodes_with_the_same_accesses_have_no_affinity(rows, exponent):
    """The counts of two ranks in two nodes, as many accesses in each, drawn alike: the estimate is 0 in the mean."""
    popularity = np.arange(1, rows + 1.0) ** -exponent
    affinity = []
    for seed in range(40):
        random = np.random.default_rng(seed)
        made = SketchSet([TableSpec("t", rows, 8)], SketchSettings(memory_bytes=2 * 2**20, half_life_seconds=3600.0))
        for rank in range(2):
            counts = random.multinomial(200_000, popularity / popularity.sum())
            there = np.flatnonzero(counts)
            table = TableCounts("t", there, counts[there])
            made.ingest_tap(TapCounts(rank, 1.7e9 + seed, (table,)))
        sample = made._tables["t"].sketch._sample
        sources = read_sources(sample.rows(), sample.source_ranks(), np.arange(1), RankLayout(2, 1))
        affinity.append(sources.affinity)
    standard_error = np.std(affinity) / np.sqrt(len(affinity))
    assert standard_error < 0.1
    assert abs(np.mean(affinity)) < 4 * standard_error
