"""The co-access sample: whole samples, chosen alike by every daemon, within its memory."""

import dataclasses
import json
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import TableSpec
from flexd.core.tap_counts import mixed_one, step_base
from flexd.sketch.coaccess import MIN_BYTES, NO_USER, CoAccess, CoAccessSample
from flexd.sketch.restore import restore_tables
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings

T0 = 1.7e9
HALF_LIFE = 50.0
ROWS = (5_000, 300)
RANKS, SAMPLES = 3, 40


@dataclasses.dataclass(frozen=True)
class Entry:
    table: int
    rank: int
    step: int
    time: float
    lengths: np.ndarray
    rows: np.ndarray


def stream(seed: int, steps: int = 12) -> list[Entry]:
    """Return the look-ups of all ranks: two tables of the same samples, at times that differ a little."""
    random = np.random.default_rng(seed)
    made = []
    for step in range(steps):
        for rank in range(RANKS):
            for table, rows in enumerate(ROWS):
                lengths = random.integers(0, 30, SAMPLES).astype(np.int32)
                ids = random.integers(-1, rows + 2, int(lengths.sum()))
                made.append(Entry(table, rank, step, T0 + 4.0 * step + 1e-3 * table, lengths, ids))
    return made


def offered(entries: list[Entry], memory: int = MIN_BYTES, half_life: float | None = HALF_LIFE) -> CoAccessSample:
    sample = CoAccessSample(ROWS, memory, half_life)
    for each in entries:
        sample.add(each.table, each.rows, each.lengths, each.rank, each.time, each.step)
    return sample


def expected(entries: list[Entry], limit: float, half_life: float | None) -> dict[tuple[int, int], list[int]]:
    """Return the rows of each (key, table) with a priority up to the limit, by the definition."""
    found: dict[tuple[int, int], list[int]] = {}
    weight = 0.0 if half_life is None else math.log(2) / half_life
    for each in entries:
        ends = np.cumsum(each.lengths)
        for position, (end, length) in enumerate(zip(ends, each.lengths, strict=True)):
            key = mixed_one(step_base(each.rank, each.step) + position)
            draw = -math.log(((mixed_one(key) >> 11) + 0.5) * 2.0**-53)
            rows = [int(row) for row in each.rows[end - length : end] if 0 <= row < ROWS[each.table]]
            if rows and math.log(draw) - each.time * weight <= limit:
                found[key, each.table] = rows
    return found


def held(read: CoAccess) -> list[list[tuple[int, list[int]]]]:
    """Return the parts of each sample, as (table, rows)."""
    parts: list[list[tuple[int, list[int]]]] = [[] for _ in range(read.samples)]
    for part, sample in enumerate(read.sample):
        rows = read.rows[read.offsets[part] : read.offsets[part + 1]].tolist()
        parts[sample].append((int(read.table[part]), rows))
    return parts


def by_key(parts: dict[tuple[int, int], list[int]]) -> list[list[tuple[int, list[int]]]]:
    samples: dict[int, list[tuple[int, list[int]]]] = {}
    for (key, table), rows in parts.items():
        samples.setdefault(key, []).append((table, rows))
    return [sorted(each) for each in samples.values()]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([None, HALF_LIFE, 2.0]))
def test_what_is_held_is_every_sample_up_to_the_limit_whole(seed: int, half_life: float | None) -> None:
    entries = stream(seed)
    sample = offered(entries, half_life=half_life)
    used = 4 * sample._used
    assert used <= sample._words.nbytes == MIN_BYTES
    assert sample.limit < math.inf, "the stream fills the memory"
    assert used > MIN_BYTES // 2, "and the memory is used"
    read = sample.read(["a", "b"])
    ours = [sorted(each) for each in held(read)]
    assert sorted(ours) == sorted(by_key(expected(entries, sample.limit, half_life)))
    assert (np.diff(read.event_time_seconds) >= 0).all()


def test_ids_join_samples_of_any_rank_and_order_and_users_stay_with_them() -> None:
    sample = CoAccessSample(ROWS, MIN_BYTES, None)
    lengths = np.array([2, 1], dtype=np.int32)
    sample.add(0, np.array([1, 2, 3]), lengths, 0, T0, 7, np.array([70, -80]), np.array([5, NO_USER]))
    sample.add(1, np.array([9, 8, 8]), lengths[::-1].copy(), 2, T0 + 1, None, np.array([-80, 70]))
    read = sample.read(["a", "b"])
    assert sorted(held(read)) == [[(0, [1, 2]), (1, [8, 8])], [(0, [3]), (1, [9])]]
    assert sorted(read.user.tolist()) == [NO_USER, 5]


def test_equal_samples_without_end_stay_within_the_memory() -> None:
    sample = CoAccessSample(ROWS, MIN_BYTES, None)
    for _ in range(40):
        sample.add(0, np.zeros(1000, np.int64), np.full(100, 10, np.int32), 0, T0, 1, np.zeros(100, np.int64))
        assert 4 * sample._used <= MIN_BYTES


TABLES = [TableSpec("items", 5_000, 8), TableSpec("users", 300, 8)]
SETTINGS = SketchSettings(memory_bytes=2**20, half_life_seconds=HALF_LIFE, coaccess_memory_bytes=MIN_BYTES)


def counted(entries: list[Entry], of: SketchSettings = SETTINGS) -> SketchSet:
    sketches = SketchSet(TABLES, of)
    for each in entries:
        rows = np.clip(each.rows, 0, ROWS[each.table] - 1)
        sketches.ingest(TABLES[each.table].name, rows, each.rank, each.time, each.lengths, math.inf, each.step)
    return sketches


def same(first: CoAccess | None, second: CoAccess | None) -> bool:
    fields = dataclasses.fields(CoAccess)
    return all(np.array_equal(getattr(first, each.name), getattr(second, each.name)) for each in fields)


def test_a_sample_of_other_settings_or_tables_starts_empty_and_one_of_more_memory_goes_on() -> None:
    whole = counted(stream(4))
    meta, arrays = whole.state()
    meta, before = json.loads(json.dumps(meta)), whole.coaccess()
    # One of a daemon without a sample.
    old = {name: value for name, value in meta.items() if name != "coaccess"}
    old["settings"] = {k: v for k, v in meta["settings"].items() if k != "coaccess_memory_bytes"}
    fresh, _ = restore_tables(old, {k: v for k, v in arrays.items() if "coaccess" not in k}, TABLES, SETTINGS)
    assert fresh.coaccess().samples == 0
    # One that a daemon without a sample reads.
    fresh, outcomes = restore_tables(meta, arrays, TABLES, dataclasses.replace(SETTINGS, coaccess_memory_bytes=0))
    assert fresh.coaccess() is None
    assert {each.outcome for each in outcomes} == {"kept"}
    fresh, _ = restore_tables(meta, arrays, TABLES, dataclasses.replace(SETTINGS, coaccess_memory_bytes=2 * MIN_BYTES))
    assert same(before, fresh.coaccess())
    # Priorities of another half-life mean nothing.
    other_life = dataclasses.replace(SETTINGS, half_life_seconds=500.0)
    for tables, of in (([TableSpec("new", 10, 8), *TABLES], SETTINGS), (TABLES, other_life)):
        fresh, _ = restore_tables(meta, arrays, tables, of)
        assert fresh.coaccess().samples == 0
