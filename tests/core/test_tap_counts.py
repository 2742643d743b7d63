"""Counts of a tap: their wire format (round trips, damaged and malicious bytes), sums, and hashes of their samples."""

import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexd.core import tap_counts
from flexd.core.errors import CodecError
from flexd.core.tap_counts import GAMMA, PassRows, TableCounts, TapCounts, TapPasses, mixed_one, to_body
from flexd.sketch.kernel_parts import finalise


def pairs(highest: int, lowest: int = 0) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    return st.dictionaries(
        st.integers(lowest, highest), st.integers(1, 2**30), max_size=40
    ).map(lambda d: (np.array(sorted(d), np.int64), np.array([d[k] for k in sorted(d)], np.int64)))  # fmt: skip


@st.composite
def tables(draw: st.DrawFn, name: str) -> TableCounts:
    return TableCounts(name, *draw(pairs(tap_counts.MAX_ROW)))


def decoded(payload: bytes) -> TapCounts | str:
    """Return the decoded counts, or the reason of the refusal."""
    try:
        return tap_counts.decode(payload)
    except CodecError as error:
        return error.reason


def equal(a: TableCounts, b: TableCounts) -> bool:
    return (
        a.table == b.table
        and a.accesses == b.accesses
        and np.array_equal(a.rows, b.rows)
        and np.array_equal(a.counts, b.counts)
    )


@settings(max_examples=60, deadline=None)
@given(st.tuples(tables("item"), tables("shop")), st.integers(0, 2**31 - 1), st.floats(0, 1e11), st.booleans())
def test_decode_inverts_encode(tables_of_rank, rank, seconds, with_passes):
    sampled = sampled_message().sampled if with_passes else TapPasses()
    back = tap_counts.decode(memoryview(tap_counts.encode(TapCounts(rank, seconds, tables_of_rank, sampled))))
    assert (back.source_rank, back.event_time_seconds, back.sampled.tables) == (rank, seconds, sampled.tables)
    for mine, theirs in zip(back.sampled.passes, sampled.passes, strict=True):
        assert (mine.number, mine.accesses) == (theirs.number, theirs.accesses)
        assert [rows.tolist() for rows in mine.rows] == [rows.tolist() for rows in theirs.rows]
    assert [equal(a, b) for a, b in zip(back.tables, tables_of_rank, strict=True)] == [True, True]


def message(header: dict, values: list[int], body: bytes | None = None) -> bytes:
    raw = to_body(np.array(values, np.int64)) if body is None else body
    text = json.dumps({"source_rank": 0, "event_time": 1.0, "body_bytes": len(raw), **header}).encode()
    return struct.pack("<4sI", tap_counts.MAGIC, len(text)) + text + zlib.compress(raw)


ONE = {"table": "t", "rows": 2}


def test_fields_of_a_newer_version_are_ignored():
    payload = message({"tables": [{**ONE, "seen": [1]}], "device": {"kind": "gpu"}}, [5, 1, 2, 3])
    assert equal(
        tap_counts.decode(payload).tables[0],
        TableCounts("t", np.array([5, 6]), np.array([2, 3])),
    )


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
        (message({"tables": [ONE]}, [], b"\x05\x01\x01\x01\x00"), "counted_header"),
        (message({"tables": [ONE]}, [], bytes(31) + b"\x80"), "counted_corrupt"),
        (message({"tables": [ONE], "body_bytes": 8}, [5, 1, 1, 1]), "counted_corrupt"),
        (message({"tables": [{**ONE, "rows": tap_counts.MAX_VALUES}]}, [1]), "counted_too_large"),
        (message({"tables": [{**ONE, "rows": -1}]}, [1]), "counted_header"),
        (message({"tables": [{"table": "t"}]}, [1]), "counted_header"),
        (message({"tables": [{**ONE, "table": ""}]}, [5, 1, 1, 1]), "counted_header"),
        (message({"tables": [], "event_time": float("nan")}, []), "bad_event_time"),
        (message({"tables": [], "event_time": 1e13}, []), "bad_event_time"),
        (message({"tables": [], "source_rank": -1}, []), "counted_header"),
    ],
)
def test_each_malformed_message_is_refused_with_its_reason(payload, reason):
    with pytest.raises(CodecError) as caught:
        tap_counts.decode(payload)
    assert caught.value.reason == reason


def test_a_decompression_bomb_is_not_unpacked():
    text = json.dumps({"source_rank": 0, "event_time": 1.0, "body_bytes": 4, "tables": [ONE]}).encode()
    bomb = struct.pack("<4sI", tap_counts.MAGIC, len(text)) + text + zlib.compress(bytes(200 * 2**20), 1)
    with pytest.raises(CodecError) as caught:
        tap_counts.decode(bomb)
    assert caught.value.reason == "counted_corrupt"


@settings(max_examples=50, deadline=None)
@given(pairs(1000), pairs(1000))
def test_merged_counts_add_up(a, b):
    both = tap_counts.merge(TableCounts("t", *a), TableCounts("t", *b))
    expected: dict[int, int] = {}
    for rows, counts in (a, b):
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            expected[row] = expected.get(row, 0) + count
    assert dict(zip(both.rows.tolist(), both.counts.tolist(), strict=True)) == expected
    assert (np.diff(both.rows) > 0).all()


def sampled_message() -> TapCounts:
    rows = [np.array([1, 5, 9]), np.array([], np.int64), np.array([2]), np.array([0, 2**40])]
    passes = (PassRows(7, (rows[0], rows[1]), (4, 0)), PassRows(2**40, (rows[2], rows[3]), (1, 3)))
    counts = TableCounts("a", np.arange(3), np.ones(3, np.int64))
    return TapCounts(3, 1.7e9, (counts,), TapPasses(("a", "b"), passes))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_sampled_passes_are_refused_by_reason_or_hold_ascending_rows(data):
    """The checksum of zlib hides the values from damage, so the numbers are changed before they are packed."""
    whole = tap_counts.encode(sampled_message())
    (length,) = struct.unpack("<I", whole[4:8])
    header, body = json.loads(whole[8 : 8 + length]), bytearray(zlib.decompress(whole[8 + length :]))
    if data.draw(st.booleans()):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 127))
    field = data.draw(st.sampled_from(["tables", "passes", "rows", "nothing"]))
    header["sampled"][field] = data.draw(
        st.one_of(st.none(), st.integers(-1, 20), st.lists(st.sampled_from(["a", "b", "", 3]), max_size=3))
    )
    text = json.dumps(header).encode()
    found = decoded(b"".join((tap_counts.MAGIC, struct.pack("<I", len(text)), text, zlib.compress(bytes(body)))))
    if isinstance(found, TapCounts):
        for each in found.sampled.passes:
            assert len(each.rows) == len(found.sampled.tables)
            for rows, accesses in zip(each.rows, each.accesses, strict=True):
                assert (np.diff(rows) > 0).all()
                assert accesses >= len(rows)
    else:
        assert found in tap_counts.REASONS


@given(st.integers(-(2**63), 2**63 - 1))
def test_the_mix_of_one_number_is_that_of_the_compiled_loops(value: int) -> None:
    with np.errstate(over="ignore"):
        assert int(finalise.py_func(np.uint64((value + GAMMA) % 2**64))) == mixed_one(value)
