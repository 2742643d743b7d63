"""Counted accesses: what a rank's ``Tap`` ships instead of every id, as values and as bytes.

Wire form: ``MAGIC``, a little-endian uint32 length, a JSON header of that length, then one zlib stream. The stream
holds every array of the header's tables one after another as LEB128 varints, ascending row ids as differences: a delta
of a skewed table takes one to two bytes a touched row, where the ids took four or eight an access.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from flexd.core.errors import CodecError, StreamError
from flexd.core.varints import VARINT_BYTES, from_varints, to_varints

Int64Array = npt.NDArray[np.int64]

MAGIC = b"FXC1"
MAX_VALUES = 2**24
"""Numbers in one message: bounds what its reader allocates (8 bytes each)."""
MAX_PAYLOAD_BYTES = 128 * 2**20
MAX_TABLES = 65_536
MAX_TABLE_NAME_CHARS = 256
MAX_COUNT = 2**40
"""Of one row or cell in one message: in units of a decayed sketch (2^18 an access) it still fits 62 bits."""
MAX_ROW = 2**44
MAX_EVENT_TIME_SECONDS = 1e11
"""As in the other codecs: larger values are milliseconds or worse by mistake."""
MAX_SEQUENCE_LENGTH = 2**20
DEPTH = 4
MIN_LOG2_WIDTH, MAX_LOG2_WIDTH = 8, 21
LOG2_REGISTERS = 12
MAX_REGISTER = 64

REASONS = ("counted_corrupt", "counted_header", "counted_too_large", "counted_values", "bad_event_time")
"""Every value that ``CodecError.reason`` takes here."""

_HEAD = struct.Struct("<4sI")
_MAX_HEADER_BYTES = 32 * 2**20


@dataclass(frozen=True, eq=False)
class LengthCounts:
    """Exact histogram of sequence lengths.

    Attributes:
        lengths: int64[m], ascending. counts: int64[m], positive.
    """

    lengths: Int64Array
    counts: Int64Array

    @staticmethod
    def none() -> LengthCounts:
        return LengthCounts(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Exact accesses of one table.

    Attributes:
        rows: int64[n], ascending without repeats. counts: int64[n], positive.
        lengths: of the sequences that the accesses came in.
    """

    table: str
    rows: Int64Array
    counts: Int64Array
    lengths: LengthCounts

    @property
    def accesses(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True, eq=False)
class CellCounts:
    """Accesses of one table as a plain count-min of the daemon's hash functions, with what its cells cannot tell.

    Attributes:
        log2_width: k. cells: int64[4 * 2^k], row by row; each row of cells sums to ``accesses``.
        registers: uint8[4096] HyperLogLog registers of the rows (``flexd.sketch.distinct``).
        sampled: int64[s] rows of a uniform sample of the accesses, in no order.
    """

    table: str
    log2_width: int
    cells: Int64Array
    registers: npt.NDArray[np.uint8]
    sampled: Int64Array
    accesses: int
    lengths: LengthCounts


TableCounts = RowCounts | CellCounts


@dataclass(frozen=True, eq=False)
class CountedBatch:
    """What one rank looked up in one interval.

    Attributes:
        event_time_seconds: the middle of the interval, Unix seconds: all accesses count as of it. At half-life H an
            access dated up to d away from its own time weighs ``2^(d/H)`` times what it should; over an interval of
            length I the sum is off by less than ``(I ln 2 / H)^2 / 24``.
        tables: at most one entry a table.
    """

    source_rank: int
    event_time_seconds: float
    tables: tuple[TableCounts, ...]

    @property
    def accesses(self) -> int:
        return sum(table.accesses for table in self.tables)


def encode(batch: CountedBatch) -> bytes:
    """One message.

    Raises:
        StreamError: more than ``MAX_VALUES`` numbers, or tables that ``decode`` would refuse by name or width.
    """
    arrays: list[Int64Array] = []
    tables: list[dict[str, Any]] = []
    for table in batch.tables:
        entry: dict[str, Any] = {"table": table.table, "lengths": len(table.lengths.lengths)}
        if isinstance(table, RowCounts):
            entry["rows"] = len(table.rows)
            arrays += [_differences(table.rows), table.counts]
        else:
            entry |= {"log2_width": table.log2_width, "sampled": len(table.sampled), "accesses": table.accesses}
            sampled = np.sort(table.sampled)
            arrays += [table.cells, table.registers.astype(np.int64), _differences(sampled)]
        arrays += [_differences(table.lengths.lengths), table.lengths.counts]
        tables.append(entry)
    values = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
    if len(values) > MAX_VALUES or len(tables) > MAX_TABLES:
        raise StreamError(f"{len(values)} numbers of {len(tables)} tables in a message", remedy="send several")
    body = to_varints(values)
    header = {
        "source_rank": batch.source_rank, "event_time": batch.event_time_seconds, "body_bytes": len(body),
        "tables": tables,
    }  # fmt: skip
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    return b"".join((_HEAD.pack(MAGIC, len(text)), text, zlib.compress(body, 1)))


def is_counted(payload: bytes | memoryview) -> bool:
    """Does it begin as a message of counted accesses?"""
    return bytes(payload[: len(MAGIC)]) == MAGIC


def decode(payload: bytes | memoryview) -> CountedBatch:
    """The message's accesses, whole or not at all. Memory is bounded by ``MAX_VALUES`` whatever the bytes are.

    Raises:
        CodecError: ``reason`` is one of ``REASONS``.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        _fail("counted_too_large", f"{len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    header, body_at = _header(payload)
    tables = header["tables"]
    sizes = [size for entry in tables for size in _sizes(entry)]
    total = sum(sizes)
    if total > MAX_VALUES:
        _fail("counted_too_large", f"{total} numbers, at most {MAX_VALUES} are read")
    body_bytes = header["body_bytes"]
    if not total <= body_bytes <= total * VARINT_BYTES:
        _fail("counted_header", f"{body_bytes} bytes for {total} numbers")
    values = _numbers(_inflated(payload[body_at:], body_bytes), total)
    parts = iter(np.split(values, np.cumsum(sizes)[:-1]) if sizes else [])
    found = tuple(_table(entry, parts) for entry in tables)
    names = {table.table for table in found}
    if len(names) != len(found):
        _fail("counted_header", "a table is named twice")
    return CountedBatch(header["source_rank"], float(header["event_time"]), found)


def fold(older: TableCounts, newer: TableCounts, max_sampled: int, random: np.random.Generator) -> TableCounts:
    """One entry for both: counts add up. Of the samples a uniform one of both is kept (``max_sampled`` at most).

    Raises:
        StreamError: of different tables, kinds or widths.
    """
    lengths = _fold_lengths(older.lengths, newer.lengths)
    if isinstance(older, RowCounts) and isinstance(newer, RowCounts) and older.table == newer.table:
        rows, counts = _added(older.rows, older.counts, newer.rows, newer.counts)
        return RowCounts(older.table, rows, counts, lengths)
    if not (isinstance(older, CellCounts) and isinstance(newer, CellCounts)) or older.table != newer.table:
        raise StreamError(
            f"counts of {older.table!r} and {newer.table!r} do not add up", remedy="fold one tap's counts"
        )
    if older.log2_width != newer.log2_width:
        raise StreamError(f"cells of {older.table!r} of two widths do not add up", remedy="fold one tap's counts")
    accesses = older.accesses + newer.accesses
    return CellCounts(
        older.table,
        older.log2_width,
        older.cells + newer.cells,
        np.maximum(older.registers, newer.registers),
        _fold_samples(older, newer, max_sampled, random),
        accesses,
        lengths,
    )


def _fold_samples(a: CellCounts, b: CellCounts, at_most: int, random: np.random.Generator) -> Int64Array:
    """A uniform sample of both: how many come from each is drawn as from an urn with all accesses."""
    size = min(at_most, len(a.sampled) + len(b.sampled))
    from_a = (
        int(random.hypergeometric(a.accesses, b.accesses, size))
        if a.accesses + b.accesses < 10**9
        else int(random.binomial(size, a.accesses / (a.accesses + b.accesses)))
    )
    from_a = min(max(from_a, size - len(b.sampled)), len(a.sampled))
    return np.concatenate([
        random.choice(a.sampled, from_a, replace=False), random.choice(b.sampled, size - from_a, replace=False)
    ])  # fmt: skip


def _fold_lengths(a: LengthCounts, b: LengthCounts) -> LengthCounts:
    return LengthCounts(*_added(a.lengths, a.counts, b.lengths, b.counts))


def _added(
    rows_a: Int64Array, counts_a: Int64Array, rows_b: Int64Array, counts_b: Int64Array
) -> tuple[Int64Array, ...]:
    rows, where = np.unique(np.concatenate([rows_a, rows_b]), return_inverse=True)
    counts = np.zeros(len(rows), np.int64)
    counts[where[: len(rows_a)]] = counts_a
    counts[where[len(rows_a) :]] += counts_b
    return rows, counts


def _fail(reason: str, message: str) -> NoReturn:
    raise CodecError(f"counted accesses cannot be decoded ({reason}): {message}", reason=reason)


def _header(payload: bytes | memoryview) -> tuple[Mapping[str, Any], int]:
    if len(payload) < _HEAD.size or not is_counted(payload):
        _fail("counted_header", "does not begin as one")
    _, length = _HEAD.unpack(bytes(payload[: _HEAD.size]))
    end = _HEAD.size + length
    if length > _MAX_HEADER_BYTES or end > len(payload):
        _fail("counted_header", f"a header of {length} bytes in {len(payload)}")
    try:
        header = json.loads(bytes(payload[_HEAD.size : end]))
    except (ValueError, RecursionError) as error:
        _fail("counted_header", str(error)[:200])
    if not isinstance(header, dict) or header.keys() != {"source_rank", "event_time", "body_bytes", "tables"}:
        _fail("counted_header", "its fields")
    tables = header["tables"]
    if not isinstance(tables, list) or len(tables) > MAX_TABLES or not all(isinstance(entry, dict) for entry in tables):
        _fail("counted_header", "its list of tables")
    _whole(header["source_rank"], 0, 2**31 - 1, "source_rank")
    _whole(header["body_bytes"], 0, MAX_VALUES * VARINT_BYTES, "body_bytes")
    seconds = header["event_time"]
    # Written so that NaN fails too.
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_EVENT_TIME_SECONDS:
        _fail("bad_event_time", f"event_time {str(seconds)[:40]}, Unix seconds are expected")
    return header, end


def _sizes(entry: Mapping[str, Any]) -> tuple[int, ...]:
    """How many numbers each array of a table has."""
    exact = entry.keys() == {"table", "lengths", "rows"}
    if not exact and entry.keys() != {"table", "lengths", "log2_width", "sampled", "accesses"}:
        _fail("counted_header", f"fields {str(sorted(entry))[:200]} of a table")
    name = entry["table"]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TABLE_NAME_CHARS:
        _fail("counted_header", f"table name {str(name)[:40]!r}")
    lengths = _whole(entry["lengths"], 0, MAX_VALUES, "lengths")
    if exact:
        rows = _whole(entry["rows"], 0, MAX_VALUES, "rows")
        return rows, rows, lengths, lengths
    width = _whole(entry["log2_width"], MIN_LOG2_WIDTH, MAX_LOG2_WIDTH, "log2_width")
    _whole(entry["accesses"], 0, MAX_COUNT, "accesses")
    return DEPTH << width, 1 << LOG2_REGISTERS, _whole(entry["sampled"], 0, MAX_VALUES, "sampled"), lengths, lengths


def _whole(value: object, lowest: int, highest: int, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        _fail("counted_header", f"{name} {str(value)[:40]}, {lowest} to {highest} are read")
    return value


def _table(entry: Mapping[str, Any], parts: Any) -> TableCounts:
    name: str = entry["table"]
    if "rows" in entry:
        rows, counts = _sums(next(parts), MAX_ROW, name, distinct=True), _counts(next(parts), name, lowest=1)
        _at_most(counts, name)
        return RowCounts(name, rows, counts, _lengths(parts, name))
    cells = _counts(next(parts), name, lowest=0)
    registers = next(parts)
    if len(registers) and int(registers.max()) > MAX_REGISTER:
        _fail("counted_values", f"table {name!r}: a register of {int(registers.max())}")
    sampled = _sums(next(parts), MAX_ROW, name, distinct=False)
    accesses: int = entry["accesses"]
    sums = cells.reshape(DEPTH, -1).sum(axis=1)
    if not bool((sums == accesses).all()):
        _fail("counted_values", f"table {name!r}: the rows of cells sum to {sums.tolist()}, not to {accesses}")
    return CellCounts(
        name, entry["log2_width"], cells, registers.astype(np.uint8), sampled, accesses, _lengths(parts, name)
    )


def _lengths(parts: Any, name: str) -> LengthCounts:
    lengths = _sums(next(parts), MAX_SEQUENCE_LENGTH, name, distinct=True)
    return LengthCounts(lengths, _counts(next(parts), name, lowest=1))


def _counts(values: Int64Array, name: str, lowest: int) -> Int64Array:
    if len(values) and not (lowest <= int(values.min()) and int(values.max()) <= MAX_COUNT):
        _fail("counted_values", f"table {name!r}: counts of {int(values.min())} to {int(values.max())}")
    return values


def _at_most(counts: Int64Array, name: str) -> None:
    # 2^24 counts of at most 2^40 each can pass 2^63 by themselves.
    if len(counts) and float(counts.sum(dtype=np.float64)) > MAX_COUNT:
        _fail("counted_values", f"table {name!r}: more than {MAX_COUNT} accesses")


def _differences(ascending: Int64Array) -> Int64Array:
    return np.diff(ascending, prepend=0)


def _sums(differences: Int64Array, highest: int, name: str, *, distinct: bool) -> Int64Array:
    """Back from ``_differences``, checked: ascending, in 0..highest, without repeats if ``distinct``."""
    if not len(differences):
        return differences
    if float(differences.sum(dtype=np.float64)) > highest:
        _fail("counted_values", f"table {name!r}: a row or length beyond {highest}")
    if distinct and len(differences) > 1 and int(differences[1:].min()) < 1:
        _fail("counted_values", f"table {name!r}: rows or lengths are not in ascending order")
    return np.cumsum(differences)


def _numbers(body: bytes, count: int) -> Int64Array:
    try:
        return from_varints(body, count)
    except ValueError as error:
        _fail("counted_corrupt", str(error))


def _inflated(data: bytes | memoryview, size: int) -> bytes:
    machine = zlib.decompressobj()
    try:
        # One byte more than announced would be seen; a bomb is never unpacked.
        body = machine.decompress(data, size + 1)
    except zlib.error as error:
        _fail("counted_corrupt", str(error))
    if len(body) != size or not machine.eof or machine.unused_data:
        _fail("counted_corrupt", f"{len(body)} bytes unpacked, {size} announced")
    return body


def values_of(tables: Sequence[TableCounts]) -> int:
    """Numbers that a message of these tables holds; see ``MAX_VALUES``."""
    total = 0
    for table in tables:
        total += 2 * len(table.lengths.lengths)
        if isinstance(table, RowCounts):
            total += 2 * len(table.rows)
        else:
            total += len(table.cells) + len(table.registers) + len(table.sampled)
    return total
