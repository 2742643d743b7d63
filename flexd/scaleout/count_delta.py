"""Count deltas: the counts of some offset ranges of the stream, as one checksummed frame.

Unknown fields are ignored, and the state of the follower (lag, partitions, leaving) is optional. Any other change is a
new format, which a leader reads one version before a follower writes it (``docs/upgrading.md``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ScaleOutError, SnapshotError, StreamError
from flexd.ingest.message_counts import MessageCounts
from flexd.sketch import frame
from flexd.sketch.frame import Arrays

FORMAT = 1
"""The format that ``encode`` writes."""
OLDEST_FORMAT, NEWEST_FORMAT = 1, 1
"""The formats that ``decode`` reads."""
NO_TABLES = "none"
"""Digest in the delta of a follower that has no tables. No leader has it, so each refuses it; with its own tables."""
MAX_PARTITIONS = 65_536
MAX_OFFSET = 2**62
_MAX_PARTITION_CHARS = 512
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
_SPARSE_FROM_BYTES = 4096
_GAPS, _VALUES, _SHAPE = "@gaps", "@values", "@shape"
_UNSIGNED = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))
_REMEDY = "run versions of flexd that work together (docs/upgrading.md)"


@dataclass(frozen=True)
class OffsetRange:
    """Messages of one partition between two positions.

    Attributes:
        start: position before the first message; None: the earliest message that exists.
        end: position after the last message. Below ``start`` if the log lost its data and started again.
    """

    start: int | None
    end: int


@dataclass(frozen=True, eq=False)
class CountDelta:
    """The counts of one follower since its previous delta.

    Attributes:
        follower: name of the follower, unique in the job.
        session: identifier of its process.
        sequence: number of the delta; a repeated delta keeps its number.
        job: name of the job; must equal the leader's.
        tables: digest of the key space; must equal the leader's. ``NO_TABLES`` requests the leader's tables.
        ranges: counted messages by partition. Empty: only the follower's state is reported.
        messages: counts of the messages in ``ranges``.
        lag_messages: messages that the follower has not read yet.
        partitions: partitions that the follower reads now.
        leaving: the follower stops; its silence is not reported.
        sketch_meta, arrays: ``SketchSet.state`` of the counts; both empty if ``ranges`` is.
    """

    follower: str
    session: str
    sequence: int
    job: str
    tables: str
    ranges: Mapping[str, OffsetRange]
    messages: MessageCounts
    lag_messages: int
    partitions: tuple[str, ...]
    leaving: bool
    sketch_meta: Mapping[str, Any]
    arrays: Arrays


def encode(delta: CountDelta) -> bytes:
    """Return one frame; arrays that are mostly zero take 2 to 8 bytes for each non-zero number.

    Raises:
        ScaleOutError: a frame cannot hold a value (``malformed``).
    """
    arrays: Arrays = {}
    for name, array in delta.arrays.items():
        arrays.update(_packed(name, array))
    meta = {
        "delta": FORMAT,
        "follower": delta.follower,
        "session": delta.session,
        "sequence": delta.sequence,
        "job": delta.job,
        "tables": delta.tables,
        "ranges": {name: [offsets.start, offsets.end] for name, offsets in delta.ranges.items()},
        "messages": delta.messages.document(),
        "lag_messages": delta.lag_messages,
        "partitions": list(delta.partitions),
        "leaving": delta.leaving,
        "sketches": dict(delta.sketch_meta),
    }
    try:
        return b"".join(frame.encode(meta, arrays))
    except SnapshotError as error:
        raise ScaleOutError(f"delta cannot be encoded: {error}", reason="malformed") from error


def decode(data: bytes, max_bytes: int) -> CountDelta:
    """Return the delta that ``encode`` wrote.

    Args:
        max_bytes: limit of its unpacked arrays; bounds the allocation.

    Raises:
        ScaleOutError: ``malformed``: not the output of ``encode``. ``format``: of another version. ``too_large``:
            beyond ``max_bytes``.
    """
    try:
        meta, arrays = frame.decode(data, "delta", _REMEDY)
        written = _whole(meta["delta"])
        if not OLDEST_FORMAT <= written <= NEWEST_FORMAT:
            raise ScaleOutError(
                f"delta of format {written}, this leader reads {OLDEST_FORMAT} to {NEWEST_FORMAT}", reason="format",
                remedy=f"upgrade the {'leader' if written > NEWEST_FORMAT else 'follower'}",
            )  # fmt: skip
        delta = CountDelta(
            follower=_name(meta["follower"]),
            session=_name(meta["session"]),
            sequence=_whole(meta["sequence"]),
            job=_name(meta["job"]),
            tables=_name(meta["tables"]),
            ranges=_ranges(meta["ranges"]),
            messages=MessageCounts.from_document(meta["messages"]),
            lag_messages=_whole(meta.get("lag_messages", 0)),
            partitions=_partitions(meta.get("partitions", [])),
            leaving=meta.get("leaving") is True,
            sketch_meta=dict(meta["sketches"]),
            arrays=_unpacked(arrays, max_bytes),
        )
        if bool(delta.sketch_meta) != bool(delta.ranges):
            raise ValueError("counts without offset ranges, or offset ranges without counts")
    except (SnapshotError, StreamError) as error:
        raise ScaleOutError(str(error), reason="malformed") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ScaleOutError(f"malformed delta: {error!r}"[:500], reason="malformed", remedy=_REMEDY) from error
    return delta


def _packed(name: str, array: npt.NDArray[Any]) -> Arrays:
    """Return the array as it is, or as (gaps between non-zero numbers, these numbers, shape) if that is smaller."""
    if array.nbytes < _SPARSE_FROM_BYTES or array.dtype.kind not in "iu":
        return {name: array}
    flat = array.reshape(-1)
    # Most deltas touch few rows: counting decides, and is several times cheaper than listing.
    touched = int(np.count_nonzero(flat))
    if touched * 2 >= array.nbytes:
        return {name: array}
    at = np.flatnonzero(flat)
    gaps = _narrow(np.diff(at, prepend=-1) - 1)
    values = _narrow(flat[at])
    if gaps.dtype not in _UNSIGNED or gaps.nbytes + values.nbytes >= array.nbytes:
        return {name: array}
    shape = np.array([*array.shape, _dtype_code(array.dtype)], dtype=np.int64)
    return {name + _GAPS: gaps, name + _VALUES: values, name + _SHAPE: shape}


def _unpacked(arrays: Arrays, max_bytes: int) -> Arrays:
    out: Arrays = {}
    left = max_bytes
    for name, array in arrays.items():
        if name.endswith((_GAPS, _VALUES)):
            continue
        if not name.endswith(_SHAPE):
            left -= array.nbytes
            out[name] = array
        else:
            base = name.removesuffix(_SHAPE)
            numbers = [int(number) for number in array]
            shape, dtype = numbers[:-1], _CODES[numbers[-1]]
            if any(number < 0 for number in shape):
                raise ValueError(f"array {base[:80]!r} of a negative shape")
            size = 1
            for number in shape:
                size *= number
            left -= size * dtype.itemsize
            if left >= 0:
                out[base] = _expanded(arrays[base + _GAPS], arrays[base + _VALUES], size, dtype).reshape(shape)
        if left < 0:
            raise ScaleOutError(
                f"delta unpacks to more than {max_bytes} bytes", reason="too_large",
                remedy="give all daemons of a job the same sketch settings",
            )  # fmt: skip
    return out


def _expanded(gaps: npt.NDArray[Any], values: npt.NDArray[Any], size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if gaps.shape != values.shape or gaps.ndim != 1 or gaps.dtype.kind != "u" or values.dtype.kind not in "iu":
        raise ValueError("a sparse array whose parts do not fit each other")
    at = np.cumsum(gaps.astype(np.int64) + 1) - 1
    # Each gap is below 2^32, so the sum of as many as fit a request cannot pass 2^63.
    if len(at) and not (gaps.dtype in _UNSIGNED and int(at[-1]) < size):
        raise ValueError("a sparse array with numbers outside its shape")
    info = np.iinfo(dtype)
    if len(values) and not (info.min <= int(values.min()) and int(values.max()) <= info.max):
        raise ValueError("a sparse array with numbers beyond its type")
    out = np.zeros(size, dtype=dtype)
    out[at] = values
    return out


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """In the smallest unsigned type that holds all; as they are if none does."""
    if not len(values) or int(values.min()) >= 0:
        highest = int(values.max(initial=0))
        for dtype in _UNSIGNED:
            if highest <= np.iinfo(dtype).max:
                return values.astype(dtype)
    return values


_CODES = tuple(np.dtype(name) for name in ("|u1", "<u2", "<u4", "<u8", "<i4", "<i8"))


def _dtype_code(dtype: np.dtype[Any]) -> int:
    return _CODES.index(dtype.newbyteorder("<"))


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_OFFSET:
        raise ValueError(f"number {str(value)[:40]}")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.match(value):
        raise ValueError(f"name {str(value)[:40]!r}")
    return value


def _partition(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_PARTITION_CHARS:
        raise ValueError(f"partition {str(value)[:40]!r}")
    return value


def _partitions(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_PARTITIONS:
        raise ValueError("list of partitions")
    return tuple(_partition(name) for name in value)


def _ranges(value: Mapping[str, Any]) -> dict[str, OffsetRange]:
    if len(value) > MAX_PARTITIONS:
        raise ValueError("too many partitions")
    return {
        _partition(name): OffsetRange(None if start is None else _whole(start), _whole(end))
        for name, (start, end) in value.items()
    }
