"""Every kind of counters counts, decays by the formula, gives profiles and is saved alike; accesses counted by row; the
weighted sample of accesses; the clock's rules."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.core.placement import RankLayout
from flexd.core.tap_counts import TableCounts, TapCounts
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.profile import read_sources
from flexd.sketch.sketch_set import KINDS, SketchSet, choose
from flexd.sketch.table_sketch import AccessSample, SketchSettings, TableSketch
from tests.support.saved_sketches import array_bytes

ROWS = 50_000
ALL = np.arange(ROWS, dtype=np.int64)
BUDGETS = {"dense": 2**20, "8 bits": 60_000, "4 bits": 48_000, "3 bits": 24_900, "count-min": 150_000}
"""Memory that gives each kind of counters. The count-min is of a larger table, and logarithmic ones are left out."""


def make(name: str) -> TableSketch:
    spec = TableSpec("t", 10**6 if name == "count-min" else ROWS, 4)
    (choice,) = choose([spec], BUDGETS[name], 100, logarithmic=name != "count-min")
    assert name.split()[0] in (str(choice.counter_bits), choice.kind.replace("_", "-"))
    return KINDS[choice.kind](spec, choice, 7)


def fed(table: TableSketch, decay: ForwardDecay, messages: range, seed: int = 0) -> np.ndarray:
    """Count messages, every third of them by row. Return the exact decayed accesses of the first rows."""
    exact = np.zeros(ROWS)
    for number in messages:
        random = np.random.default_rng([seed, number])
        rows = random.zipf(1.3, 2_000) % ROWS
        time = decay.admit(1.7e9 + 10.0 * number)[0]
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


@pytest.mark.parametrize("half_lives", [30, 60, 3000])
@pytest.mark.parametrize("name", BUDGETS)
def test_what_was_counted_before_a_long_pause_weighs_nothing_beside_what_comes_after(name: str, half_lives: int):
    table, decay = make(name), ForwardDecay(25.0, 1e9)
    fed(table, decay, range(6))
    table.add(np.arange(100), 0, decay.admit(decay.newest_seconds + 25.0 * half_lives)[0], decay)
    np.testing.assert_allclose(table.query(ALL, decay), ALL < 100, atol=2.0**-6)
    profile = table.profile(decay, 100)
    assert (profile.weight, set(profile.hot_rows.tolist())) == (pytest.approx(100, rel=0.01), set(range(100)))
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
            made.ingest_tap(TapCounts(rank, 1.7e9 + seed, (TableCounts("t", there, counts[there]),)))
        sample = made._tables["t"].sketch._sample
        sources = read_sources(sample.rows(), sample.source_ranks(), np.arange(1), RankLayout(2, 1))
        affinity.append(sources.affinity)
    standard_error = np.std(affinity) / np.sqrt(len(affinity))
    assert standard_error < 0.1
    assert abs(np.mean(affinity)) < 4 * standard_error


def test_sample_share_is_the_decayed_share_in_any_order():
    streams = [(0.0, 1), (np.log(8.0), 2)]

    def sampled(order: list[int], seed: int) -> AccessSample:
        sample = AccessSample(4000, seed)
        for part in order:
            log_weight, row = streams[part]
            for _ in range(100):
                sample.add(np.full(2000, row, dtype=np.int32), 0, log_weight, 10)
        return sample

    for sample in (sampled([0, 1], 1), sampled([1, 0], 2)):
        assert len(sample.rows()) <= 8000
        assert abs((sample.rows() == 2).mean() - 8 / 9) < 5 * np.sqrt(8 / 81 / 4000)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**30), st.sampled_from([1, 7, 40, 1_000]), st.floats(-2.0, 2.0))
def test_sampled_keys_have_the_distribution_of_the_lowest(seed: int, capacity: int, log_weight: float) -> None:
    """Of n equal accesses the k-th lowest of n exponentials / weight is near k / n / weight, with and without jumps."""
    sample = AccessSample(capacity, seed)
    n = 40_000
    for start in range(0, n, 500):
        sample.add(np.arange(start, start + 500), 1, log_weight, n)
    rows = sample.rows()
    assert len(np.unique(rows)) == len(rows) <= 2 * capacity
    keys = np.sort(sample._keys[: len(rows)])
    assert (keys <= sample._limit).all()
    expected = len(rows) / n * np.exp(-log_weight)
    assert abs(np.exp(keys[-1]) / expected - 1) < 6 / np.sqrt(len(rows)) + 0.1 or len(rows) < 4
    if capacity == 1_000:
        # Every part of the stream is sampled equally.
        assert abs((rows < n / 4).mean() - 0.25) < 6 * np.sqrt(0.1875 / len(rows))
        assert abs((np.exp(keys) / np.exp(sample._limit)).mean() - 0.5) < 6 / np.sqrt(12 * len(rows)) + 0.02


T0 = 1.7e9


def _set(half_life: float | None = 10.0, max_future: float = 1e9, **more) -> SketchSet:
    return SketchSet([TableSpec("t", 8, 4)], SketchSettings(2**20, half_life, max_future, **more))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.floats(0, 400)), min_size=1, max_size=40),
    st.sampled_from([7.3, 60.0, 3600.0]),
)
def test_counters_follow_the_formula_whatever_the_order(events, half_life):
    sketches = _set(half_life, late_after_seconds=5.0)
    newest = T0 + max(time for _, time in events)
    sketches.ingest("t", np.array([0], dtype=np.int32), 0, newest)
    sketches.ingest("t", np.array([0], dtype=np.int32), 0, newest + 1e-6)
    exact = np.zeros(8)
    exact[0] = 2
    for row, time in events:
        counts = sketches.ingest("t", np.array([row], dtype=np.int64), 0, T0 + time)
        assert (counts.late, counts.accepted) == (T0 + time < newest + 1e-6 - 5, 1)
        exact[row] += 2.0 ** ((T0 + time - newest) / half_life)
    got = sketches.query("t", np.arange(8))
    # Rounding: half a unit per access (2^-17 of one), and a unit for rescaling.
    assert np.allclose(got, exact, rtol=1e-5, atol=(len(events) + 2) * 2.0**-16)


HALF_LIFE, ALLOWANCE = 600.0, 300.0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 400),
            st.one_of(
                st.tuples(st.just("honest"), st.floats(0, 30)),
                st.tuples(st.just("wrong"), st.floats(0, 1e11)),
                st.tuples(st.just("near"), st.floats(-1000, 1000)),
                st.tuples(st.just("limit"), st.just(0.0)),
            ),
        ),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([8, 3_000_000]),
)
def test_no_messages_reduce_honest_counts_by_more_than_the_decay_over_the_allowance(events, rows):
    """Honest accesses are dated up to 30 s before their arrival. Other messages are dated anyhow, and of other rows."""
    sketches = SketchSet([TableSpec("t", rows, 4)], SketchSettings(2**20, HALF_LIFE, ALLOWANCE))
    now, honest = T0, []
    for passed, (kind, value) in events:
        now += passed
        if kind == "limit":
            sketches.limit_clock(now)
            continue
        dated = {"honest": now - value, "wrong": value, "near": now + value}[kind]
        honest += [dated] if kind == "honest" else []
        sketches.ingest("t", np.full(64, kind == "honest", np.int32), 0, dated, None, now)
    assert not sketches.newest_event_seconds > now + ALLOWANCE
    least = 64 * sum(2.0 ** ((dated - now) / HALF_LIFE) for dated in honest) * 2.0 ** (-ALLOWANCE / HALF_LIFE)
    assert sketches.query("t", np.array([1]))[0] >= least * (1 - 1e-4) - (len(events) + 2) * 64 * 2.0**-14


def test_a_time_that_is_not_finite_is_refused_and_nothing_counted():
    sketches = _set()
    for time in (math.nan, math.inf, -math.inf):
        with pytest.raises(SketchError):
            sketches.ingest("t", np.array([1], dtype=np.int32), 0, time)
    assert sketches.samples == 0
    assert math.isnan(sketches.newest_event_seconds)


def test_counts_of_a_clock_that_was_years_ahead_stay_finite() -> None:
    """The machine's clock was set back, and nothing has arrived since."""
    sketches = _set(10.0)
    sketches.ingest("t", np.array([1, 1, 2]), 0, T0)
    sketches.limit_clock(1000.0 - 1e9)
    (table,) = sketches.profile(100.0).tables
    assert np.isfinite([table.weight, table.accesses_per_step]).all()
    assert table.hot_share.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert np.isfinite(sketches.query("t", np.arange(8))).all()
