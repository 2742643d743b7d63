"""The loop that reads a datum by a program (Apache Avro 1.12, "Binary Encoding").

A program is int32, four words for each type: its kind, where the list of its parts is, the number of parts, and the
column that takes its values, or -1. The size of a ``fixed`` and the number of an enumeration's symbols stand for the
number of parts.
"""

from typing import Any

import numba
import numpy as np

# Positions in ``schema.KINDS``.
_NULL, _BOOLEAN, _LONG, _FLOAT, _DOUBLE, _BYTES, _STRING, _FIXED, _ENUM, _RECORD, _ARRAY, _MAP, _UNION = range(13)

# Why a datum was not read.
SHORT, LONG_NUMBER, LENGTH, BRANCH, SYMBOL = -1, -2, -3, -4, -5
# Lists and records that are open at once: each level of a schema is one at most.
_MAX_OPEN = 64


@numba.njit(cache=True, nogil=True, inline="always")
def _number(data: Any, at: Any, end: Any) -> Any:
    """Return a zig-zag number and the place behind it, or a reason."""
    value, shift = np.uint64(0), np.uint64(0)
    while at < end:
        byte = np.uint64(data[at])
        at += 1
        value |= (byte & np.uint64(127)) << shift
        if byte < np.uint64(128):
            return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1)), at
        shift += np.uint64(7)
        if shift > np.uint64(63):
            return np.int64(0), np.int64(LONG_NUMBER)
    return np.int64(0), np.int64(SHORT)


@numba.njit(cache=True, nogil=True)
def read(data: Any, at: Any, program: Any, count: int, scratch: Any, result: Any) -> Any:
    """Read one datum.

    Args:
        data: the message, n bytes.
        at: where the datum begins.
        program: int32, see the module; its first type is that of the datum.
        count: of the columns.
        scratch: int64 [4 n + 2]: each value takes a byte at least, and at most two places in columns, each of two
            words; and one for a record that the message ends before.
        result: int64 [count + 2 n + 2]. First the place behind the datum, then where in ``result`` each column begins,
            and where the last one ends, then their values. Of text, bytes and ``fixed`` two columns hold where values
            begin and end; of floating-point numbers their bits; of unions the branches; of lists and maps the lengths,
            of maps the keys in two columns more; of records that nothing is asked of, zeros.

    Returns:
        The length of the result; or a reason, and in ``result[:2]`` the type's position in the program and the place in
        the message where it began.
    """
    end, used = len(data), 0
    open_, next_ = np.empty(_MAX_OPEN, np.int64), np.empty(_MAX_OPEN, np.int64)
    left, total = np.empty(_MAX_OPEN, np.int64), np.empty(_MAX_OPEN, np.int64)
    depth: Any = 0
    node: Any = 0
    while True:
        # Read the value of ``node``; a list or a record is opened.
        began: Any = at
        reason: Any = 0
        kind, part, parts, column = program[node], program[node + 1], program[node + 2], program[node + 3]
        value: Any = 0
        writes = False
        if kind == _LONG:
            value, at = _number(data, at, end)
            writes = True
            reason = min(at, 0)
        elif kind == _RECORD:
            writes = True
            open_[depth], next_[depth] = node, 0
            depth += 1
        elif kind in (_ARRAY, _MAP):
            open_[depth], left[depth], total[depth] = node, 0, 0
            depth += 1
        elif kind in (_UNION, _ENUM):
            value, at = _number(data, at, end)
            writes = True
            reason = min(at, 0)
            if reason == 0 and not 0 <= value < parts:
                reason = BRANCH if kind == _UNION else SYMBOL
        elif kind in (_BYTES, _STRING, _FIXED):
            size = parts
            if kind != _FIXED:
                size, at = _number(data, at, end)
            reason = min(at, 0)
            if reason == 0 and not 0 <= size <= end - at:
                reason = SHORT if size > 0 else LENGTH
            if reason == 0:
                if column >= 0:
                    scratch[used], scratch[used + 1] = column, at
                    scratch[used + 2], scratch[used + 3] = column + 1, at + size
                    used += 4
                at += size
        elif kind != _NULL:
            size = 1 if kind == _BOOLEAN else 4 if kind == _FLOAT else 8
            if size > end - at:
                reason = SHORT
            else:
                bits = np.uint64(0)
                for i in range(size):
                    bits |= np.uint64(data[at + i]) << np.uint64(8 * i)
                value = np.int64(bits)
                writes = True
                at += size
        if reason == 0 and writes and column >= 0:
            scratch[used], scratch[used + 1] = column, value
            used += 2
        if kind == _UNION and reason == 0:
            node = program[part + value]
            continue
        # Find the next value: in the innermost list or record that has one more.
        while reason == 0:
            if depth == 0:
                result[0] = at
                return _sort(scratch, used, count, result)
            node, began = open_[depth - 1], at
            kind, part, parts, column = program[node], program[node + 1], program[node + 2], program[node + 3]
            if kind == _RECORD:
                if next_[depth - 1] < parts:
                    node = program[part + next_[depth - 1]]
                    next_[depth - 1] += 1
                    break
                depth -= 1
                continue
            if left[depth - 1] == 0:
                value, at = _number(data, at, end)
                if value < 0:
                    # Then the block's size in bytes follows, for those who skip it.
                    value = -value
                    if at >= 0:
                        _, at = _number(data, at, end)
                reason = min(at, 0)
                # The least int64 stays negative. Of too many items one is behind the end: each takes a byte.
                if reason == 0 and value < 0:
                    reason = LENGTH
                if reason == 0 and value == 0:
                    if column >= 0:
                        scratch[used], scratch[used + 1] = column, total[depth - 1]
                        used += 2
                    depth -= 1
                    continue
                left[depth - 1] = value
                total[depth - 1] += value
            if reason == 0 and kind == _MAP:
                size, at = _number(data, at, end)
                reason = min(at, 0)
                if reason == 0 and not 0 <= size <= end - at:
                    reason = SHORT if size > 0 else LENGTH
                if reason == 0 and column >= 0:
                    scratch[used], scratch[used + 1] = column + 1, at
                    scratch[used + 2], scratch[used + 3] = column + 2, at + size
                    used += 4
                at += size
            if reason == 0:
                left[depth - 1] -= 1
                node = program[part]
                break
        if reason != 0:
            result[0], result[1] = node, began
            return reason


@numba.njit(cache=True, nogil=True, inline="always")
def _sort(scratch: Any, used: Any, count: Any, result: Any) -> Any:
    """Bring values into the order of their columns."""
    for i in range(count + 1):
        result[1 + i] = 0
    for i in range(0, used, 2):
        result[2 + scratch[i]] += 1
    places = np.empty(count, np.int64)
    result[1] = count + 2
    for i in range(count):
        places[i] = result[1 + i]
        result[2 + i] += result[1 + i]
    for i in range(0, used, 2):
        column = scratch[i]
        result[places[column]] = scratch[i + 1]
        places[column] += 1
    return result[1 + count]
