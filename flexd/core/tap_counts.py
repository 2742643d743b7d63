"""The counts that a rank's ``Tap`` ships to the daemon instead of every id: values and wire format.

Wire format: ``MAGIC``, a little-endian uint32 length, a JSON header of that length, then one zlib stream. The stream
holds every array of the header's tables one after another, ascending row ids as differences: first the lowest byte of
every number, then the next one of each, and so on, as many bytes as the largest needs. Upper bytes are nearly all zero:
counts of a skewed table take one to two bytes for each distinct row, where the ids took four or eight for each access.

Unknown fields of the header are ignored. Any other change is a new format, which is read one version before it is
written (``docs/upgrading.md``).
"""

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from flexd.core.arrays import Int64Array
from flexd.core.errors import CodecError, StreamError

GAMMA = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def mixed_one(value: int) -> int:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of a number, which may be negative."""
    z = (value + GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * FIRST) & _MASK
    z = ((z ^ (z >> 27)) * SECOND) & _MASK
    return z ^ (z >> 31)


def step_base(source_rank: int, step: int) -> int:
    """Return the hash of a rank's forward pass. The i-th sample of the pass has the key ``mixed_one(base + i)``."""
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
# Those that ``decode`` reads; ``encode`` writes ``FORMAT``.
OLDEST_FORMAT, NEWEST_FORMAT = 2, 2
MAGIC = b"FXC%d" % FORMAT
# Numbers in one message: bounds what its reader allocates (8 bytes each).
MAX_VALUES = 2**24
MAX_PAYLOAD_BYTES = 128 * 2**20
MAX_TABLES = 65_536
MAX_TABLE_NAME_CHARS = 256
# Limit of the count of one row in one message: in units of a decayed sketch (2^18 an access) it fits 62 bits.
MAX_COUNT = 2**40
MAX_ROW = 2**44
MAX_PASS = 2**62
# As in other messages: larger values are milliseconds or worse by mistake.
MAX_EVENT_TIME_SECONDS = 1e11

# Every value that ``CodecError.reason`` takes here.
REASONS = ("counted_corrupt", "counted_header", "counted_too_large", "counted_values", "bad_event_time")

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


def decode(payload: bytes | memoryview) -> TapCounts:
    """Return the message's counts, or refuse it whole. Memory is bounded by ``MAX_VALUES`` for any bytes.

    Raises:
        CodecError: ``reason`` is one of ``REASONS``.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        _fail("counted_too_large", f"{len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    try:
        mark, length = _HEAD.unpack_from(payload)
        end = _HEAD.size + length
        if mark != MAGIC or length > _MAX_HEADER_BYTES or end > len(payload):
            raise ValueError(f"{bytes(mark)!r} and a header of {length} bytes in {len(payload)}")
        header = json.loads(bytes(payload[_HEAD.size : end]))
        rows = [_whole(entry["rows"], 0, MAX_VALUES) for entry in header["tables"]]
        names = _distinct_names([entry["table"] for entry in header["tables"]])
        source_rank = _whole(header["source_rank"], 0, 2**31 - 1)
        body_bytes = _whole(header["body_bytes"], 0, MAX_VALUES * _NUMBER_BYTES)
        seconds = header["event_time"]
        sizes = [size for each in rows for size in (each, each)]
        sampled = header.get("sampled")
        if sampled is not None:
            sampled_names, passes = _distinct_names(sampled["tables"]), _whole(sampled["passes"], 1, MAX_VALUES)
            parts = _whole(passes * len(sampled_names), 1, MAX_VALUES)
            sizes += [passes, parts, parts, _whole(sampled["rows"], 0, MAX_VALUES)]
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _fail("counted_header", repr(error)[:200])
    # Written so that NaN fails too.
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_EVENT_TIME_SECONDS:
        _fail("bad_event_time", f"event_time {str(seconds)[:40]}, Unix seconds are expected")
    total = sum(sizes)
    if total > MAX_VALUES:
        _fail("counted_too_large", f"{total} numbers, at most {MAX_VALUES} are read")
    width = body_bytes // max(1, total)
    if body_bytes != width * total or (total and not 1 <= width <= _NUMBER_BYTES):
        _fail("counted_header", f"{body_bytes} bytes for {total} numbers")
    values = _numbers(_inflate(payload[end:], body_bytes), total)
    arrays = iter(np.split(values, np.cumsum(sizes)[:-1]) if sizes else [])
    tables = tuple(_table(name, arrays) for name in names)
    found = TapPasses() if sampled is None else _sampled(sampled_names, arrays)
    return TapCounts(source_rank, float(seconds), tables, found)


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


def _sampled(names: tuple[str, ...], arrays: Iterator[Int64Array]) -> TapPasses:
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


def _whole(value: object, lowest: int, highest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise ValueError(f"{str(value)[:40]} where {lowest} to {highest} are read")
    return value


def _distinct_names(names: list[object]) -> tuple[str, ...]:
    valid = tuple(name for name in names if isinstance(name, str) and 0 < len(name) <= MAX_TABLE_NAME_CHARS)
    if not len(names) == len(set(valid)) <= MAX_TABLES:
        raise ValueError(f"{len(names)} names of tables, of which {len(set(valid))} are valid and distinct")
    return valid


def _table(name: str, arrays: Iterator[Int64Array]) -> TableCounts:
    rows, counts = _from_differences(next(arrays), MAX_ROW, name), next(arrays)
    # 2^24 counts of at most 2^40 each can pass 2^63 by themselves.
    if len(counts) and not (int(counts.min()) >= 1 and float(counts.sum(dtype=np.float64)) <= MAX_COUNT):
        _fail("counted_values", f"table {name!r}: a count below 1, or more than {MAX_COUNT} accesses")
    return TableCounts(name, rows, counts)


def _differences(ascending: Int64Array) -> Int64Array:
    return np.diff(ascending, prepend=0)


def _from_differences(differences: Int64Array, highest: int, name: str) -> Int64Array:
    if not len(differences):
        return differences
    if float(differences.sum(dtype=np.float64)) > highest:
        _fail("counted_values", f"table {name!r}: a row beyond {highest}")
    if len(differences) > 1 and int(differences[1:].min()) < 1:
        _fail("counted_values", f"table {name!r}: rows are not in ascending order")
    return np.cumsum(differences)


def _numbers(body: bytes, count: int) -> Int64Array:
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
