"""The wire form of counted accesses: round trips, and bytes that nobody meant."""

from __future__ import annotations

import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexd.core import counted_accesses as counted
from flexd.core.counted_accesses import CellCounts, CountedBatch, LengthCounts, RowCounts
from flexd.core.errors import CodecError, StreamError
from flexd.core.varints import to_varints
from flexd.stream.codecs.any_message import decode as decode_any

CELLS = counted.DEPTH << counted.MIN_LOG2_WIDTH


def pairs(highest: int, lowest: int = 0) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    return st.dictionaries(
        st.integers(lowest, highest), st.integers(1, 2**30), max_size=40
    ).map(lambda d: (np.array(sorted(d), np.int64), np.array([d[k] for k in sorted(d)], np.int64)))  # fmt: skip


def cells_of(rows: list[int]) -> np.ndarray:
    """Any cells whose rows sum alike."""
    cells = np.zeros(CELLS, np.int64)
    for row in rows:
        cells[np.arange(4) * (CELLS // 4) + (row * np.arange(1, 5)) % (CELLS // 4)] += 1
    return cells


@st.composite
def tables(draw: st.DrawFn, name: str) -> RowCounts | CellCounts:
    lengths = LengthCounts(*draw(pairs(4096)))
    if draw(st.booleans()):
        return RowCounts(name, *draw(pairs(counted.MAX_ROW)), lengths)
    rows = draw(st.lists(st.integers(0, 10**6), max_size=30))
    registers = np.zeros(4096, np.uint8)
    registers[: len(rows)] = np.array(rows, np.int64) % 52
    return CellCounts(
        name, counted.MIN_LOG2_WIDTH, cells_of(rows), registers, np.array(sorted(rows), np.int64), len(rows), lengths
    )


def batch_of(*found: RowCounts | CellCounts) -> CountedBatch:
    return CountedBatch(3, 1.7e9, found)


def decoded(payload: bytes) -> CountedBatch | str:
    """What it holds, or why it was refused."""
    try:
        return counted.decode(payload)
    except CodecError as error:
        return error.reason


def equal(a: RowCounts | CellCounts, b: RowCounts | CellCounts) -> bool:
    arrays = ("rows", "counts") if isinstance(a, RowCounts) else ("cells", "registers", "sampled")
    return (
        type(a) is type(b)
        and a.table == b.table
        and a.accesses == b.accesses
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
        and np.array_equal(a.lengths.lengths, b.lengths.lengths)
        and np.array_equal(a.lengths.counts, b.lengths.counts)
    )


@settings(max_examples=60, deadline=None)
@given(st.tuples(tables("item"), tables("shop")), st.integers(0, 2**31 - 1), st.floats(0, 1e11))
def test_what_is_encoded_comes_back(found, rank, seconds):
    back = counted.decode(memoryview(counted.encode(CountedBatch(rank, seconds, found))))
    assert (back.source_rank, back.event_time_seconds) == (rank, seconds)
    assert [equal(a, b) for a, b in zip(back.tables, found, strict=True)] == [True, True]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_messages_are_refused_by_reason_or_are_still_in_order(data):
    whole = bytearray(counted.encode(batch_of(RowCounts("t", np.arange(9), np.arange(1, 10), LengthCounts.none()))))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    batch = decoded(cut)
    if isinstance(batch, CountedBatch):
        assert all(t.accesses >= 0 and (np.diff(t.rows) > 0).all() for t in batch.tables)
    else:
        assert batch in counted.REASONS


@given(st.binary(max_size=200))
def test_random_bytes_never_do_worse_than_being_refused(noise):
    for payload in (noise, counted.MAGIC + noise):
        batch = decoded(payload)
        assert isinstance(batch, CountedBatch) or batch in counted.REASONS


def message(header: dict, values: list[int], body: bytes | None = None) -> bytes:
    raw = to_varints(np.array(values, np.int64)) if body is None else body
    text = json.dumps({"source_rank": 0, "event_time": 1.0, "body_bytes": len(raw), **header}).encode()
    return struct.pack("<4sI", counted.MAGIC, len(text)) + text + zlib.compress(raw)


ONE = {"table": "t", "rows": 2, "lengths": 0}


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (message({"tables": [ONE]}, [5, 0, 1, 1]), "counted_values"),  # a row twice
        (message({"tables": [ONE]}, [5, 1, 0, 1]), "counted_values"),  # no access
        (message({"tables": [ONE]}, [5, 2**62, 1, 1]), "counted_values"),
        (message({"tables": [ONE]}, [5, 1, 2**41, 1]), "counted_values"),
        (message({"tables": [ONE]}, [5, 1, 2**40, 2**40]), "counted_values"),
        (message({"tables": [ONE, ONE]}, [5, 1, 1, 1] * 2), "counted_header"),  # twice the same table
        (message({"tables": [ONE]}, [5, 1, 1]), "counted_header"),
        (message({"tables": [ONE]}, [], b"\x81\x81\x01\x01"), "counted_corrupt"),
        (message({"tables": [ONE]}, [], b"\x05\x01\x01\x81"), "counted_corrupt"),
        (message({"tables": [ONE], "body_bytes": 5}, [5, 1, 1, 1]), "counted_corrupt"),
        (message({"tables": [{**ONE, "rows": counted.MAX_VALUES}]}, [1]), "counted_too_large"),
        (message({"tables": [{**ONE, "rows": -1}]}, [1]), "counted_header"),
        (message({"tables": [{**ONE, "more": 1}]}, [1]), "counted_header"),
        (message({"tables": [{**ONE, "table": ""}]}, [5, 1, 1, 1]), "counted_header"),
        (message({"tables": [], "event_time": float("nan")}, []), "bad_event_time"),
        (message({"tables": [], "event_time": 1e13}, []), "bad_event_time"),
        (message({"tables": [], "source_rank": -1}, []), "counted_header"),
    ],
)
def test_every_fault_has_its_reason(payload, reason):
    with pytest.raises(CodecError) as caught:
        counted.decode(payload)
    assert caught.value.reason == reason


def test_cells_that_do_not_sum_to_the_accesses_are_refused():
    cells = cells_of([1, 2, 3])
    fine = CellCounts(
        "t", counted.MIN_LOG2_WIDTH, cells, np.zeros(4096, np.uint8), np.arange(3), 3, LengthCounts.none()
    )
    assert counted.decode(counted.encode(batch_of(fine))).accesses == 3
    cells[0] += 1
    with pytest.raises(CodecError) as caught:
        counted.decode(counted.encode(batch_of(fine)))
    assert caught.value.reason == "counted_values"


def test_a_bomb_is_not_unpacked():
    text = json.dumps({"source_rank": 0, "event_time": 1.0, "body_bytes": 4, "tables": [ONE]}).encode()
    bomb = struct.pack("<4sI", counted.MAGIC, len(text)) + text + zlib.compress(bytes(200 * 2**20), 1)
    with pytest.raises(CodecError) as caught:
        counted.decode(bomb)
    assert caught.value.reason == "counted_corrupt"


def test_the_stream_tells_the_two_kinds_of_message_apart():
    (batch,) = decode_any(
        counted.encode(batch_of(RowCounts("t", np.arange(3), np.ones(3, np.int64), LengthCounts.none()))), 16
    )
    assert isinstance(batch, CountedBatch)
    with pytest.raises(CodecError) as caught:
        decode_any(b"nothing", 100)
    assert caught.value.reason == "not_arrow_or_json"


@settings(max_examples=50, deadline=None)
@given(pairs(1000), pairs(1000), pairs(50), pairs(50))
def test_folding_adds_up(a, b, lengths_a, lengths_b):
    both = counted.fold(
        RowCounts("t", *a, LengthCounts(*lengths_a)), RowCounts("t", *b, LengthCounts(*lengths_b)), 8,
        np.random.default_rng(0),
    )  # fmt: skip
    expected: dict[int, int] = {}
    for rows, counts in (a, b):
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            expected[row] = expected.get(row, 0) + count
    assert dict(zip(both.rows.tolist(), both.counts.tolist(), strict=True)) == expected
    assert (np.diff(both.rows) > 0).all()
    assert both.lengths.counts.sum() == lengths_a[1].sum() + lengths_b[1].sum()


def test_folded_samples_hold_both_streams_by_their_share():
    def part(row: int, accesses: int) -> CellCounts:
        cells = np.zeros(CELLS, np.int64)
        cells[:: CELLS // 4] = accesses
        sampled = np.full(1000, row)
        return CellCounts(
            "t", counted.MIN_LOG2_WIDTH, cells, np.zeros(4096, np.uint8), sampled, accesses, LengthCounts.none()
        )

    both = counted.fold(part(1, 9_000_000), part(2, 1_000_000), 1000, np.random.default_rng(1))
    assert both.accesses == 10_000_000
    assert len(both.sampled) == 1000
    assert 60 < (both.sampled == 2).sum() < 140  # 100 expected, 9.5 standard deviation


def test_counts_of_different_things_do_not_add_up():
    one = RowCounts("t", np.arange(2), np.ones(2, np.int64), LengthCounts.none())
    other = RowCounts("u", np.arange(2), np.ones(2, np.int64), LengthCounts.none())
    with pytest.raises(StreamError):
        counted.fold(one, other, 8, np.random.default_rng(0))
