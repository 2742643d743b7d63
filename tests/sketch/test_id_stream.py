"""Shares of unbounded ids that a stream predicts, against the policy run in plain Python."""

import math
from collections import Counter

import numpy as np
import pytest

from flexd.core.keyspace import TableSpec
from flexd.sketch import id_stream
from flexd.sketch.id_stream import SLOTS, IdStream
from flexd.sketch.sketch_set import SketchSet


def mixed(number: int) -> int:
    mask = 2**64 - 1
    x = (number + 0x9E3779B97F4A7C15) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def plain(ids: list[int], rows: int, begin: int) -> tuple[float, float]:
    """Return the share of look-ups from ``begin`` on of ids with a row, and evictions per 1,000."""
    slots = max(1, rows - 1)
    sets = -(-slots // SLOTS)
    # By set: id -> (slot, last use, uses).
    held: list[dict[int, tuple[int, int, int]]] = [{} for _ in range(sets)]
    own = evicted = 0
    for now, one in enumerate(ids, 1):
        number = (mixed(one % 2**64) >> 1) % sets
        known, room = held[number], (slots - number + sets - 1) // sets
        if one in known:
            slot, _, uses = known[one]
            known[one] = slot, now, uses + 1
            own += now > begin
            continue
        slot = len(known)
        if slot == room:
            lost = min(known, key=lambda i: (known[i][1] + 2 * slots * int(math.log2(known[i][2])), known[i][0]))
            slot = known.pop(lost)[0]
            evicted += now > begin
        known[one] = slot, now, 1
    return own / (len(ids) - begin), 1000 * evicted / (len(ids) - begin)


def drawn(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    # Popular ones, those that come once, and a drift; negative ones too.
    popular = random.zipf(1.3, count) % 5_000 + np.arange(count) // 50
    once = random.integers(-(2**62), 2**62, count)
    return np.where(random.random(count) < 0.3, once, popular)


@pytest.mark.parametrize("rows", [2, 65, 640, 4_000])
def test_a_table_whose_sets_are_all_simulated_is_predicted_exactly(rows: int) -> None:
    ids = drawn(20_000, rows)
    stream = IdStream(rows)
    for first in range(0, len(ids), 7_000):
        stream.add(ids[first : first + 7_000], 1e9)
    seen = stream.seen()
    for size, found in (
        (0.5, seen.own_share_of_half_the_rows), (1, seen.own_share), (2, seen.own_share_of_twice_the_rows)
    ):  # fmt: skip
        assert found == pytest.approx(plain(ids.tolist(), round(size * rows), 0)[0], abs=1e-12)
    assert seen.evictions_per_1000 == pytest.approx(plain(ids.tolist(), rows, 0)[1])
    counts = Counter(ids.tolist())
    assert (seen.look_ups, seen.distinct) == (len(ids), len(counts))
    assert seen.once_share == pytest.approx(list(counts.values()).count(1) / len(counts))


def test_a_large_table_is_predicted_from_a_sample_and_from_the_newest_half() -> None:
    ids = drawn(300_000, 1)
    stream = IdStream(40_000)
    for first in range(0, len(ids), 10_000):
        # One batch a minute.
        stream.add(ids[first : first + 10_000].astype(np.int64), 60.0 * first / 10_000)
    # Doubled from 65,536 look-ups on; the last but one is where the shares begin.
    seen, begin = stream.seen(), 140_000
    own, evictions = plain(ids.tolist(), 40_000, begin)
    assert seen.own_share == pytest.approx(own, abs=0.015)
    assert seen.evictions_per_1000 == pytest.approx(evictions, abs=15)
    assert seen.distinct == pytest.approx(len(np.unique(ids)), rel=0.03)
    _, firsts = np.unique(ids, return_index=True)
    # Of the 29 minutes the newest 26.1.
    assert seen.new_per_hour == pytest.approx(int((firsts // 10_000 > 2.9).sum()) * 60 / 26.1, rel=0.03)


def test_a_flood_of_new_ids_keeps_the_sample_within_its_bound() -> None:
    stream = IdStream(1_000)
    for first in range(0, 400_000, 50_000):
        stream.add(np.arange(first, first + 50_000), 5.0)
        assert int((stream._hashes != 0).sum()) < id_stream._PLACES // 2
    assert stream.seen().distinct == pytest.approx(400_000, rel=0.03)
    assert stream.seen().once_share == 1.0


def test_any_ids_are_accepted_and_counted_for_rows_by_hash() -> None:
    sketches = SketchSet([TableSpec("users", 100, 4), TableSpec("items", 100, 4)])
    sketches.id_streams = {"users": IdStream(100)}
    ids = np.array([-5, 2**62, 7, 7], dtype=np.int64)
    counts = sketches.ingest("users", ids, 0, 10.0)
    assert (counts.accepted, counts.negative_row, counts.row_out_of_range) == (4, 0, 0)
    users, items = sketches.profile().tables
    assert (users.weight, items.weight) == (pytest.approx(4.0, rel=1e-3), 0.0)
    assert users.hot_rows.max() < 100
    assert sketches.id_streams["users"].seen().own_share == 0.25
    assert sketches.ingest("items", ids, 0, 10.0).row_out_of_range == 1
