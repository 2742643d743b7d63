"""The loops of the count-min counters: 32-bit cells; two neighbours become one of 62 bits when one is full.

A pair is *joined* once either cell would reach 2^31 (SALSA: Basat et al., *Self-Adjusting Lean Streaming Analytics*,
ICDE 2021): the top bit of both words is set, and their 31-bit halves hold one value, the low half in the even word.
So heavy cells need no memory beyond their pair and no look-up elsewhere, and nothing wraps. As a plain 32-bit number a
joined cell is larger than any other, so the minimum of four words is right as long as one of them is not joined.

Positions are those of Apache DataSketches: ``MurmurHash3_x64_128`` (Appleby, public domain) of the 8 bytes of an id.
Its count-min hashes row i of the cells with ``seed + s_i``, where s_i are the first outputs of C++'s
``uniform_int_distribution<uint64>`` over ``default_random_engine(seed)``; the constants below are those of its default
seed 9001. Its HyperLogLog hashes with the seed itself: the low bits of the first half are the slot, and the leading
zeros of the second half are counted.
"""

from typing import Any

import numba
import numpy as np

from flexd.sketch.kernel_parts import prefetch

# Ids hashed at once, while the cells of the block before are counted; their cache lines (64 KiB) fit the second-level
# cache.
BLOCK_IDS = 256
DEPTH = 4
# Accesses past the admission threshold within which a row is still reported as a candidate.
ADMISSION_BAND = 2
_HALF = np.uint64(2**31 - 1)
_FULL = np.uint64(2**31)
_MOST = np.uint64(2**62 - 1)
_TOP32 = np.uint32(31)
_FLAG = np.uint32(2**31)
_ONE = np.uint64(1)
# DEFAULT_SEED of DataSketches.
SEED = 9001
_SPREAD = (4480857443237077987, 6631161516192690341, 11350819014790085518, 4160660749069242171)
_MASK = 2**64 - 1
# Both halves of the state start as the seed; the length of the key, 8, is mixed into each.
_FIRST = tuple(np.uint64(((spread + SEED) & _MASK) ^ 8) for spread in _SPREAD)
_S0, _S1, _S2, _S3 = _FIRST
_DISTINCT = np.uint64(SEED ^ 8)
_33 = np.uint64(33)
_31 = np.uint64(31)


@numba.njit(cache=True, nogil=True, inline="always")
def _finalise(k: Any) -> Any:
    k = (k ^ (k >> _33)) * np.uint64(0xFF51AFD7ED558CCD)
    k = (k ^ (k >> _33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return k ^ (k >> _33)


@numba.njit(cache=True, nogil=True, inline="always")
def _premix(key: Any) -> Any:
    k = key * np.uint64(0x87C37B91114253D5)
    k = (k << _31) | (k >> _33)
    return k * np.uint64(0x4CF5AD432745937F)


@numba.njit(cache=True, nogil=True, inline="always")
def _first_half(k: Any, s: Any) -> Any:
    h1 = (s ^ k) + s
    return _finalise(h1) + _finalise(s + h1)


@numba.njit(cache=True, nogil=True)
def cell_positions(rows: Any, count: int, log2_width: int, positions: Any) -> None:
    """Write the positions of ``rows[:count]`` (int64, not negative) in the 4 x 2^k cells to uint32[4, >= count]."""
    width = np.uint64(1) << np.uint64(log2_width)
    mask = width - np.uint64(1)
    for i in range(count):
        k = _premix(np.uint64(rows[i]))
        positions[0, i] = np.uint32(_first_half(k, _S0) & mask)
        positions[1, i] = np.uint32((_first_half(k, _S1) & mask) + width)
        positions[2, i] = np.uint32((_first_half(k, _S2) & mask) + width + width)
        positions[3, i] = np.uint32((_first_half(k, _S3) & mask) + width + width + width)


@numba.njit(cache=True, nogil=True)
def distinct_halves(rows: Any, count: int, slots: Any, bits: Any) -> None:
    """Write both halves of the HyperLogLog hash of ``rows[:count]``: the low 16 bits of the first to uint16[>= count],
    the second to uint64[>= count]."""
    for i in range(count):
        k = _premix(np.uint64(rows[i]))
        h1 = (_DISTINCT ^ k) + _DISTINCT
        h2 = _DISTINCT + h1
        h1 = _finalise(h1)
        h2 = _finalise(h2)
        h1 = h1 + h2
        slots[i] = np.uint16(h1)
        bits[i] = h2 + h1


@numba.njit(cache=True, nogil=True, inline="always")
def _value(cells: Any, at: Any) -> Any:
    word = cells[at]
    if word >> _TOP32:
        low = at & ~_ONE
        return ((np.uint64(cells[low | _ONE]) & _HALF) << np.uint64(31)) | (np.uint64(cells[low]) & _HALF)
    return np.uint64(word)


@numba.njit(cache=True, nogil=True, inline="always")
def _join(cells: Any, at: Any, value: Any) -> None:
    low = at & ~_ONE
    value = min(value, _MOST)
    cells[low] = np.uint32(value & _HALF) | _FLAG
    cells[low | _ONE] = np.uint32(value >> np.uint64(31)) | _FLAG


@numba.njit(cache=True, nogil=True)
def _set(cells: Any, at: Any, value: Any) -> int:
    # Raise one cell to ``value``. Return 1 if this joined its pair.
    if cells[at] >> _TOP32:
        _join(cells, at, value)
        return 0
    if value < _FULL:
        cells[at] = np.uint32(value)
        return 0
    neighbour = np.uint64(cells[at ^ _ONE])
    _join(cells, at, max(value, neighbour))
    return 1


@numba.njit(cache=True, nogil=True)
def _copy_valid(rows: Any, start: int, count: int, limit: Any, kept: Any) -> tuple[int, int]:
    bad = 0
    for i in range(count):
        row: Any = np.int64(rows[start + i])
        kept[i] = row
        bad += np.uint64(row) >= limit
    if bad == 0:
        return count, 0
    inside = 0
    negative = 0
    for i in range(count):
        row = np.int64(rows[start + i])
        kept[inside] = row
        inside += np.uint64(row) < limit
        negative += row < 0
    return inside, negative


@numba.njit(cache=True, nogil=True)
def _update_registers(kept: Any, count: int, registers: Any, least: Any, slots: Any, bits: Any, rare: Any) -> None:
    """Update HyperLogLog registers, each of which holds 1 + the most leading zeros so far.

    A register grows only if as many bits as it holds are all zero, so an id with fewer zeros than ``least`` (at most
    the smallest register) changes none and is skipped.
    """
    distinct_halves(kept, count, slots, bits)
    mask = np.uint64(registers.size - 1)
    rares: Any = 0
    # Two shifts, because a shift by 64 is undefined and the smallest register is 0 at first.
    rest = np.uint64(63) - np.uint64(min(least, 63))
    for i in range(count):
        rare[rares] = i
        rares += np.int64((bits[i] >> rest) >> _ONE == 0)
    for j in range(rares):
        i = rare[j]
        slot = np.uint64(slots[i]) & mask
        rank = registers[slot]
        if rank == 0 or (rank < 63 and bits[i] >> (np.uint64(64) - np.uint64(rank)) == 0):
            zeros = np.uint64(0)
            while zeros < np.uint64(62) and (bits[i] >> (np.uint64(63) - zeros)) & _ONE == 0:
                zeros += _ONE
            registers[slot] = np.uint8(zeros + _ONE)


@numba.njit(cache=True, nogil=True)
def add(
    rows: Any,
    start: Any,
    limit: Any,
    cells: Any,
    log2_width: int,
    units: Any,
    registers: Any,
    threshold: Any,
    candidates: Any,
    candidate_count: int,
) -> tuple[int, int, int, int, int]:
    """Count ids as ``CountMinTable`` describes; also return the number of pairs joined."""
    band = threshold + np.uint64(ADMISSION_BAND) * units
    units32 = np.uint32(units)
    fits = np.uint32(units < _FULL)
    position = np.zeros((DEPTH, BLOCK_IDS), np.uint32)
    next_position = np.zeros((DEPTH, BLOCK_IDS), np.uint32)
    kept = np.empty(BLOCK_IDS, np.int64)
    next_kept = np.empty(BLOCK_IDS, np.int64)
    heavy = np.empty(BLOCK_IDS, np.int64)
    slots = np.empty(BLOCK_IDS, np.uint16)
    bits = np.empty(BLOCK_IDS, np.uint64)
    rare = np.empty(BLOCK_IDS, np.int64)
    negative: Any = 0
    outside: Any = 0
    joined: Any = 0
    n = rows.size
    size: Any = min(BLOCK_IDS, n - start)
    count, below = _copy_valid(rows, start, size, limit, kept)
    least = registers.min()
    _update_registers(kept, count, registers, least, slots, bits, rare)
    cell_positions(kept, count, log2_width, position)
    while start < n and candidate_count + BLOCK_IDS <= candidates.size:
        next_start = start + size
        next_size = min(BLOCK_IDS, n - next_start)
        next_count, next_below = _copy_valid(rows, next_start, next_size, limit, next_kept)
        _update_registers(next_kept, next_count, registers, least, slots, bits, rare)
        cell_positions(next_kept, next_count, log2_width, next_position)
        heavies: Any = np.uint64(0)
        p0, p1, p2, p3 = position[0], position[1], position[2], position[3]
        n0, n1, n2, n3 = next_position[0], next_position[1], next_position[2], next_position[3]
        # Unsigned indices, as everywhere in this loop: numba checks signed ones for being negative.
        for i in range(np.uint64(count)):
            # A stale position of an earlier block costs a needless prefetch, which is cheaper than a branch.
            prefetch(cells, np.uint64(n0[i]))
            prefetch(cells, np.uint64(n1[i]))
            prefetch(cells, np.uint64(n2[i]))
            prefetch(cells, np.uint64(n3[i]))
            a = np.uint64(p0[i])
            b = np.uint64(p1[i])
            c = np.uint64(p2[i])
            d = np.uint64(p3[i])
            va = cells[a]
            vb = cells[b]
            vc = cells[c]
            vd = cells[d]
            before = min(min(va, vb), min(vc, vd))
            after = np.uint32(before + units32)
            # Heavy rows are deferred: a branch to them would be mispredicted for every other access.
            full = before | after
            light = np.uint32((full >> _TOP32) ^ np.uint32(1)) & fits
            heavy[heavies] = i
            heavies += np.uint64(np.uint32(1) - light)
            raised = np.uint32(after * light)
            cells[a] = max(va, raised)
            cells[b] = max(vb, raised)
            cells[c] = max(vc, raised)
            cells[d] = max(vd, raised)
            if light and np.uint64(before) < band and np.uint64(after) >= threshold:
                candidates[candidate_count] = kept[i]
                candidate_count += 1
        for j in range(heavies):
            i = heavy[j]
            a, b, c, d = np.uint64(p0[i]), np.uint64(p1[i]), np.uint64(p2[i]), np.uint64(p3[i])
            xa, xb, xc, xd = _value(cells, a), _value(cells, b), _value(cells, c), _value(cells, d)
            lowest = min(min(xa, xb), min(xc, xd))
            goal = lowest + units
            for at, value in ((a, xa), (b, xb), (c, xc), (d, xd)):
                if value < goal:
                    joined += _set(cells, at, goal)
            if lowest < band and goal >= threshold:
                candidates[candidate_count] = kept[i]
                candidate_count += 1
        negative += below
        outside += size - count - below
        start, size, count, below = next_start, next_size, next_count, next_below
        position, next_position = next_position, position
        kept, next_kept = next_kept, kept
    return start, negative, outside, candidate_count, joined


@numba.njit(cache=True, nogil=True)
def query(rows: Any, cells: Any, log2_width: int, out: Any) -> None:
    """Write the estimates of int64[n] rows to uint64[n]."""
    position = np.empty((DEPTH, BLOCK_IDS), np.uint32)
    for start in range(0, rows.size, BLOCK_IDS):
        count = min(BLOCK_IDS, rows.size - start)
        cell_positions(rows[start:], count, log2_width, position)
        for i in range(count):
            least = _MOST
            for d in range(DEPTH):
                least = min(least, _value(cells, np.uint64(position[d, i])))
            out[start + i] = least


@numba.njit(cache=True, nogil=True)
def rescale(cells: Any, bits: Any) -> int:
    """Divide by ``2^bits`` (1 to 62), rounding up, and split pairs that fit one word again. Return the pairs joined."""
    joined = 0
    up = (_ONE << bits) - _ONE
    for pair in range(cells.size // 2):
        low = np.uint64(2 * pair)
        if cells[low] >> _TOP32:
            value = (_value(cells, low) + up) >> bits
            if value < _FULL:
                cells[low] = np.uint32(value)
                cells[low | _ONE] = np.uint32(value)
            else:
                _join(cells, low, value)
                joined += 1
        else:
            cells[low] = np.uint32((np.uint64(cells[low]) + up) >> bits)
            cells[low | _ONE] = np.uint32((np.uint64(cells[low | _ONE]) + up) >> bits)
    return joined


@numba.njit(cache=True, nogil=True)
def joined_pairs(cells: Any) -> int:
    """Return the number of joined pairs."""
    joined = 0
    for pair in range(cells.size // 2):
        joined += cells[2 * pair] >> _TOP32
    return joined
