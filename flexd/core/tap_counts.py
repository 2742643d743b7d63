"""The counts that a rank's ``Tap`` ships to the daemon instead of every id: values and wire format.

Wire format: ``MAGIC``, a little-endian uint32 length, a JSON header of that length, then one zlib stream. The stream
holds every array of the header's tables one after another, ascending row ids as differences: first the lowest byte of
every number, then the next one of each, and so on, as many bytes as the largest needs. Upper bytes are nearly all zero:
counts of a skewed table take one to two bytes for each distinct row, where the ids took four or eight for each access.

Unknown fields of the header are ignored. Any other change is a new format, which is read one version before it is
written (``docs/upgrading.md``).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from flexd.core.arrays import Int64Array, UInt64Array
from flexd.core.errors import CodecError, StreamError

GAMMA = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def mixed(values: npt.NDArray[np.integer[Any]]) -> UInt64Array:
    """Return uint64 [n]: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of each value."""
    with np.errstate(over="ignore"):
        z = values.astype(np.uint64) + np.uint64(GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
        result: UInt64Array = z ^ (z >> np.uint64(31))
    return result


def mixed_one(value: int) -> int:
    """Return ``mixed`` of one number, which may be negative."""
    z = (value + GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * FIRST) & _MASK
    z = ((z ^ (z >> 27)) * SECOND) & _MASK
    return z ^ (z >> 31)


def step_base(source_rank: int, step: int) -> int:
    """Return the hash of a rank's forward pass. The i-th sample of the pass has the key ``mixed(base + i)``."""
    return mixed_one(mixed_one(step) ^ source_rank)


def entry_base(table: int, source_rank: int, event_time_bits: int) -> int:
    """Return the hash of an entry without a step number, whose samples have rows of its table alone."""
    return mixed_one(mixed_one(mixed_one(event_time_bits) ^ source_rank) ^ (table + 1))


def is_sampled(number: int, every: int) -> bool:
    """Return whether the step is in the sample of one in ``every``.

    Samples are nested: what a larger ``every`` takes, a smaller one takes too. Numbers are multiplied by the golden
    ratio, so that no period of the training, such as its micro-batches, meets the sampled numbers.
    """
    return (number * 0x9E3779B97F4A7C15) % 2**64 < 2**64 // every


FORMAT = 2
"""The format that ``encode`` writes."""
OLDEST_FORMAT, NEWEST_FORMAT = 2, 2
"""The formats that ``decode`` reads."""
MAGIC = b"FXC%d" % FORMAT
MAX_VALUES = 2**24
"""Numbers in one message: bounds what its reader allocates (8 bytes each)."""
MAX_PAYLOAD_BYTES = 128 * 2**20
MAX_TABLES = 65_536
MAX_TABLE_NAME_CHARS = 256
MAX_COUNT = 2**40
"""Limit of the count of one row in one message: in units of a decayed sketch (2^18 an access) it fits 62 bits."""
MAX_ROW = 2**44
MAX_PASS = 2**62
MAX_EVENT_TIME_SECONDS = 1e11
"""Equal to the limit of the other codecs: larger values are milliseconds or worse by mistake."""

REASONS = ("counted_corrupt", "counted_header", "counted_too_large", "counted_values", "bad_event_time")
"""Every value that ``CodecError.reason`` takes here."""

_NUMBER_BYTES = 8
_HEAD = struct.Struct("<4sI")
_MAX_HEADER_BYTES = 32 * 2**20


@dataclass(frozen=True, eq=False)
class TableCounts:
    """Exact accesses of one table.

    Attributes:
        rows: int64[n], ascending without repeats.
        counts: int64[n], positive.
    """

    table: str
    rows: Int64Array
    counts: Int64Array

    @property
    def accesses(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True, eq=False)
class PassRows:
    """Distinct rows that a rank looked up in one forward pass.

    Attributes:
        number: of the pass, equal on all ranks.
        rows: by table of ``TapPasses.tables``, int64[n] ascending without repeats.
        accesses: look-ups of each table.
    """

    number: int
    rows: tuple[Int64Array, ...]
    accesses: tuple[int, ...]

    @property
    def values(self) -> int:
        """Numbers that the pass takes in a message."""
        return sum(map(len, self.rows)) + 2 * len(self.rows) + 1


@dataclass(frozen=True, eq=False)
class TapPasses:
    """The sampled passes of an interval, for the touches of rows; each has all tables, ascending numbers."""

    tables: tuple[str, ...] = ()
    passes: tuple[PassRows, ...] = ()


@dataclass(frozen=True, eq=False)
class TapCounts:
    """The look-ups of one rank in one interval.

    Attributes:
        event_time_seconds: the middle of the interval, Unix seconds: all accesses count as of it. At half-life H an
            access dated up to d away from its own time weighs ``2^(d/H)`` times what it should; over an interval of
            length I the sum is off by less than ``(I ln 2 / H)^2 / 24``.
        tables: at most one entry per table.
        sampled: passes whose accesses are part of these or earlier counts.
    """

    source_rank: int
    event_time_seconds: float
    tables: tuple[TableCounts, ...]
    sampled: TapPasses = TapPasses()

    @property
    def accesses(self) -> int:
        return sum(table.accesses for table in self.tables)


def encode(counts: TapCounts) -> bytes:
    """Return one message.

    Raises:
        StreamError: more than ``MAX_VALUES`` numbers or ``MAX_TABLES`` tables.
    """
    arrays: list[Int64Array] = []
    tables: list[dict[str, Any]] = []
    for table in counts.tables:
        tables.append({"table": table.table, "rows": len(table.rows)})
        arrays += [_differences(table.rows), table.counts]
    sampled, names = counts.sampled.passes, counts.sampled.tables
    parts = [rows for each in sampled for rows in each.rows]
    if sampled:
        arrays.append(_differences(np.array([each.number for each in sampled], np.int64)))
        arrays.append(np.array([len(rows) for rows in parts], np.int64))
        arrays.append(np.array([number for each in sampled for number in each.accesses], np.int64))
        arrays += [_differences(rows) for rows in parts]
    values = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
    if len(values) > MAX_VALUES or len(tables) > MAX_TABLES:
        raise StreamError(f"{len(values)} numbers of {len(tables)} tables in a message", remedy="send several")
    body = to_body(values)
    header: dict[str, Any] = {
        "source_rank": counts.source_rank, "event_time": counts.event_time_seconds, "body_bytes": len(body),
        "tables": tables,
    }  # fmt: skip
    if sampled:
        header["sampled"] = {"tables": names, "passes": len(sampled), "rows": sum(map(len, parts))}
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    return b"".join((_HEAD.pack(MAGIC, len(text)), text, zlib.compress(body, 1)))


def is_tap_counts(payload: bytes | memoryview) -> bool:
    """Return whether the payload starts like a message of ``TapCounts``."""
    return bytes(payload[: len(MAGIC)]) == MAGIC


def decode(payload: bytes | memoryview) -> TapCounts:
    """Return the message's counts, or refuse it whole. Memory is bounded by ``MAX_VALUES`` for any bytes.

    Raises:
        CodecError: ``reason`` is one of ``REASONS``.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        _fail("counted_too_large", f"{len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    header, body_at = _header(payload)
    entries = header["tables"]
    sizes = [size for entry in entries for size in _array_sizes(entry)]
    names, *sampled_sizes = _sampled_sizes(header.get("sampled"))
    sizes += sampled_sizes
    total = sum(sizes)
    if total > MAX_VALUES:
        _fail("counted_too_large", f"{total} numbers, at most {MAX_VALUES} are read")
    body_bytes = header["body_bytes"]
    width = body_bytes // max(1, total)
    if body_bytes != width * total or (total and not 1 <= width <= _NUMBER_BYTES):
        _fail("counted_header", f"{body_bytes} bytes for {total} numbers")
    values = _numbers(_inflate(payload[body_at:], body_bytes), total)
    arrays = iter(np.split(values, np.cumsum(sizes)[:-1]) if sizes else [])
    tables = tuple(_table(entry["table"], arrays) for entry in entries)
    if len({table.table for table in tables}) != len(tables):
        _fail("counted_header", "a table is named twice")
    return TapCounts(header["source_rank"], float(header["event_time"]), tables, _sampled(names, arrays))


def merge(older: TableCounts, newer: TableCounts) -> TableCounts:
    """Return the sum of two counts of one table.

    Raises:
        StreamError: the counts are of different tables.
    """
    if older.table != newer.table:
        raise StreamError(
            f"counts of {older.table!r} and {newer.table!r} do not add up", remedy="merge counts of one table"
        )
    rows, where = np.unique(np.concatenate([older.rows, newer.rows]), return_inverse=True)
    counts = np.zeros(len(rows), np.int64)
    counts[where[: len(older.rows)]] = older.counts
    counts[where[len(older.rows) :]] += newer.counts
    return TableCounts(older.table, rows, counts)


def value_count(tables: Sequence[TableCounts]) -> int:
    """Return how many numbers a message of these tables holds (at most ``MAX_VALUES``)."""
    return sum(2 * len(table.rows) for table in tables)


def _fail(reason: str, message: str) -> NoReturn:
    raise CodecError(f"counts of a tap cannot be decoded ({reason}): {message}", reason=reason)


def _header(payload: bytes | memoryview) -> tuple[Mapping[str, Any], int]:
    """Return the checked header and the offset of the body."""
    if len(payload) < _HEAD.size or not is_tap_counts(payload):
        _fail("counted_header", "the first bytes are of another format")
    _, length = _HEAD.unpack(bytes(payload[: _HEAD.size]))
    end = _HEAD.size + length
    if length > _MAX_HEADER_BYTES or end > len(payload):
        _fail("counted_header", f"a header of {length} bytes in {len(payload)}")
    try:
        header = json.loads(bytes(payload[_HEAD.size : end]))
    except (ValueError, RecursionError) as error:
        _fail("counted_header", str(error)[:200])
    if not isinstance(header, dict) or not header.keys() >= {"source_rank", "event_time", "body_bytes", "tables"}:
        _fail("counted_header", "missing fields")
    tables = header["tables"]
    if not isinstance(tables, list) or len(tables) > MAX_TABLES or not all(isinstance(entry, dict) for entry in tables):
        _fail("counted_header", f"tables is not a list of at most {MAX_TABLES} objects")
    _whole(header["source_rank"], 0, 2**31 - 1, "source_rank")
    _whole(header["body_bytes"], 0, MAX_VALUES * _NUMBER_BYTES, "body_bytes")
    seconds = header["event_time"]
    # Written so that NaN fails too.
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_EVENT_TIME_SECONDS:
        _fail("bad_event_time", f"event_time {str(seconds)[:40]}, Unix seconds are expected")
    return header, end


def _array_sizes(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Return the lengths of a table's arrays: rows, counts."""
    if not entry.keys() >= {"table", "rows"}:
        _fail("counted_header", f"fields {str(sorted(entry))[:200]} of a table")
    name = entry["table"]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TABLE_NAME_CHARS:
        _fail("counted_header", f"table name {str(name)[:40]!r}")
    rows = _whole(entry["rows"], 0, MAX_VALUES, "rows")
    return rows, rows


def _sampled_sizes(entry: object) -> tuple[tuple[str, ...], int, int, int, int]:
    """Return the tables of the sampled passes and the lengths of the arrays: numbers, sizes, accesses, rows."""
    if entry is None:
        return (), 0, 0, 0, 0
    if not isinstance(entry, dict) or not entry.keys() >= {"tables", "passes", "rows"}:
        _fail("counted_header", "sampled passes without their fields")
    names = entry["tables"]
    if not isinstance(names, list) or not 0 < len(names) <= MAX_TABLES:
        _fail("counted_header", f"tables of the sampled passes: not a list of 1 to {MAX_TABLES} names")
    if not all(isinstance(name, str) and 0 < len(name) <= MAX_TABLE_NAME_CHARS for name in names):
        _fail("counted_header", "table names of the sampled passes")
    if len(set(names)) != len(names):
        _fail("counted_header", "a table of the sampled passes is named twice")
    passes = _whole(entry["passes"], 1, MAX_VALUES, "passes")
    rows = _whole(entry["rows"], 0, MAX_VALUES, "rows of the sampled passes")
    return tuple(names), passes, passes * len(names), passes * len(names), rows


def _sampled(names: tuple[str, ...], arrays: Iterator[Int64Array]) -> TapPasses:
    if not names:
        return TapPasses()
    numbers = _from_differences(next(arrays), MAX_PASS, "numbers of passes")
    sizes, accesses, rows = next(arrays), next(arrays), next(arrays)
    low, high = int(sizes.min()), int(sizes.max())
    if low < 0 or high > len(rows) or int(sizes.sum()) != len(rows):
        _fail("counted_values", f"parts of {low} to {high} rows in {len(rows)} rows of sampled passes")
    if bool((accesses < sizes).any()) or int(accesses.max()) > MAX_COUNT:
        _fail("counted_values", "sampled passes have fewer accesses than distinct rows, or too many")
    ends = np.cumsum(sizes)[:-1]
    parts = [_from_differences(part, MAX_ROW, "sampled rows") for part in np.split(rows, ends)]
    width = len(names)
    return TapPasses(names, tuple(
        PassRows(number, tuple(parts[at * width : (at + 1) * width]),
                 tuple(accesses[at * width : (at + 1) * width].tolist()))
        for at, number in enumerate(numbers.tolist())
    ))  # fmt: skip


def _whole(value: object, lowest: int, highest: int, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        _fail("counted_header", f"{name} {str(value)[:40]}, {lowest} to {highest} are read")
    return value


def _table(name: str, arrays: Iterator[Int64Array]) -> TableCounts:
    rows, counts = _from_differences(next(arrays), MAX_ROW, name), _counts(next(arrays), name)
    # 2^24 counts of at most 2^40 each can pass 2^63 by themselves.
    if len(counts) and float(counts.sum(dtype=np.float64)) > MAX_COUNT:
        _fail("counted_values", f"table {name!r}: more than {MAX_COUNT} accesses")
    return TableCounts(name, rows, counts)


def _counts(values: Int64Array, name: str) -> Int64Array:
    if len(values) and not (int(values.min()) >= 1 and int(values.max()) <= MAX_COUNT):
        _fail("counted_values", f"table {name!r}: counts of {int(values.min())} to {int(values.max())}")
    return values


def _differences(ascending: Int64Array) -> Int64Array:
    return np.diff(ascending, prepend=0)


def _from_differences(differences: Int64Array, highest: int, name: str) -> Int64Array:
    """Invert ``_differences``; the result must be ascending without repeats and within 0..highest."""
    if not len(differences):
        return differences
    if float(differences.sum(dtype=np.float64)) > highest:
        _fail("counted_values", f"table {name!r}: a row beyond {highest}")
    if len(differences) > 1 and int(differences[1:].min()) < 1:
        _fail("counted_values", f"table {name!r}: rows are not in ascending order")
    return np.cumsum(differences)


def _numbers(body: bytes, count: int) -> Int64Array:
    """Invert ``to_body``."""
    columns = np.zeros((count, _NUMBER_BYTES), np.uint8)
    parts = np.frombuffer(body, np.uint8).reshape(-1, max(1, count))
    columns[:, : len(parts)] = parts.T[:count]
    values = columns.view("<i8").reshape(-1).astype(np.int64, copy=False)
    if count and int(values.min()) < 0:
        _fail("counted_corrupt", "a number of more than 63 bits")
    return values


def _inflate(data: bytes | memoryview, size: int) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        # The limit of one byte more than announced reveals a longer stream without unpacking it.
        body = decompressor.decompress(data, size + 1)
    except zlib.error as error:
        _fail("counted_corrupt", str(error))
    if len(body) != size or not decompressor.eof or decompressor.unused_data:
        _fail("counted_corrupt", f"{len(body)} bytes unpacked, {size} announced")
    return body


def to_body(values: Int64Array) -> bytes:
    """Return int64[n] numbers byte by byte: the lowest of all, then the next. Raises StreamError: one is negative."""
    if not len(values):
        return b""
    if int(values.min()) < 0:
        raise StreamError("negative numbers in the counts of a tap", remedy="count from zero up")
    width = max(1, (int(values.max()).bit_length() + 7) // 8)
    columns = values.astype("<i8").view(np.uint8).reshape(-1, _NUMBER_BYTES)
    return columns[:, :width].T.tobytes()
