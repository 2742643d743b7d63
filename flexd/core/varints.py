"""Encode and decode arrays of integers as LEB128, without a loop over numbers.

Seven bits a byte, the lowest first; the top bit is set on all bytes of a number but the last.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexd.core.errors import StreamError

Int64Array = npt.NDArray[np.int64]

VARINT_BYTES = 9
"""Bytes of the longest number, of 63 bits."""
_TOP = np.uint8(0x80)


def to_varints(values: Int64Array) -> bytes:
    """Encode int64[n] numbers. Raises StreamError if one is negative."""
    if not len(values):
        return b""
    if int(values.min()) < 0:
        raise StreamError("negative numbers in the counts of a tap", remedy="count from zero up")
    highest = int(values.max())
    if highest < 128:
        return values.astype(np.uint8).tobytes()
    length = np.ones(len(values), np.int64)
    for byte in range(1, VARINT_BYTES):
        if highest >> (7 * byte):
            length += values >= 1 << (7 * byte)
    start = np.cumsum(length) - length
    out = np.empty(int(length.sum()), np.uint8)
    for byte in range(int(length.max())):
        here = np.flatnonzero(length > byte)
        digit = (values[here] >> (7 * byte) & 0x7F).astype(np.uint8)
        out[start[here] + byte] = np.where(length[here] > byte + 1, digit | _TOP, digit)
    return out.tobytes()


def from_varints(body: bytes, count: int) -> Int64Array:
    """Decode int64[count] numbers. Raises ValueError if the bytes are not ``count`` numbers of at most 63 bits."""
    data = np.frombuffer(body, np.uint8)
    ends = np.flatnonzero(data < _TOP)
    if len(ends) != count or (len(data) and data[-1] >= _TOP):
        raise ValueError(f"{len(ends)} numbers, {count} were announced")
    if count == len(data):
        return data.astype(np.int64)
    start = np.empty_like(ends)
    start[0], start[1:] = 0, ends[:-1] + 1
    length = ends - start + 1
    if int(length.max()) > VARINT_BYTES:
        raise ValueError("a number of more than 63 bits")
    values = (data[start] & np.uint8(0x7F)).astype(np.int64)
    for byte in range(1, int(length.max())):
        here = np.flatnonzero(length > byte)
        values[here] |= (data[start[here] + byte] & np.uint8(0x7F)).astype(np.int64) << (7 * byte)
    return values
