"""Sketches in the serialised forms of Apache DataSketches, which other tools read, and back.

Positions and registers are DataSketches' own (``flexd.sketch.counters.hashing``), so nothing is estimated again:
cells and registers are copied, and an exported count-min answers every query with the number that flexd answers.
"""

from __future__ import annotations

import math
import struct
from typing import Literal

import datasketches
import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.sketch.counters.countmin import DEPTH, MAX_LOG2_WIDTH, MIN_LOG2_WIDTH, CountMin
from flexd.sketch.counters.hashing import SEED
from flexd.sketch.distinct import LOG2_REGISTERS, DistinctRows
from flexd.sketch.table_set import SketchSet
from flexd.sketch.tables import CountMinTable, DenseTable

Kind = Literal["count-min", "distinct", "lengths"]
_COUNT_MIN = struct.Struct("<BBBBIIBHB")
"""Preamble longs, serial version, family, flags, unused, buckets, hashes, hash of the seed, unused."""
_COUNT_MIN_MARKS = (2, 1, 18)
_EMPTY_FLAG = 1
_SEED_HASH = 0x93CC
"""Of seed 9001."""
_HLL = struct.Struct("<BBBBBBBBdddII")
"""Preamble ints, serial version, family, log2 registers, unused, flags, lowest register, mode and type, HIP estimate,
sums of 2^-register below and from 32, empty registers, exceptions."""
_HLL_MARKS = (10, 1, 7)
_HLL_OUT_OF_ORDER = 16
_HLL_MODE = 2
_HLL_8_REGISTERS = _HLL_MODE | 2 << 2
_COUPONS_AT = (8, 12)
"""Where a list and a set of a small sketch's coupons begin."""
_VALUE_BITS = 26
_FRACTION_BITS = 16
"""Of an access, kept when imported cells are no whole numbers."""
_EXACT_BITS = 53


def export_table(sketches: SketchSet, table: str, kind: Kind) -> bytes:
    """The DataSketches image of one sketch of a table.

    ``count-min`` (``count_min_sketch``) estimates decayed accesses as of the newest event, as ``SketchSet.query``
    does; ``distinct`` is an ``hll_sketch`` of the row ids, never decayed; ``lengths`` a ``kll_floats_sketch`` of
    sequence lengths.

    Raises:
        SketchError: unknown table, or it has no such sketch.
    """
    index = sketches._known(table)
    if kind == "lengths":
        lengths = sketches._lengths.get(index)
        if lengths is None:
            raise SketchError(f"no sequence lengths of table {table!r}", remedy="publish sequence lengths")
        return lengths.serialized().tobytes()
    sketch = sketches._tables[index]
    if not isinstance(sketch, CountMinTable):
        how = "exactly" if isinstance(sketch, DenseTable) else "by logarithmic counters"
        raise SketchError(
            f"table {table!r} is counted {how} and has no {kind} sketch",
            remedy="export lengths, or turn sketch.logarithmic off and lower sketch.memory_bytes until it is sketched",
        )
    if kind == "distinct":
        return distinct_image(sketch._distinct)
    return count_min_image(sketch._counter, sketch._unit_weight(sketches._decay))


def count_min_image(counter: CountMin, unit_weight: float = 1.0) -> bytes:
    """What ``datasketches.count_min_sketch.deserialize`` reads, cells in accesses.

    Args:
        unit_weight: accesses that one unit stands for.
    """
    empty = counter.total_units == 0
    head = _COUNT_MIN.pack(
        *_COUNT_MIN_MARKS, _EMPTY_FLAG if empty else 0, 0, 1 << counter.log2_width, DEPTH, _SEED_HASH, 0
    )
    if empty:
        return head
    cells = counter.values().astype("<f8") * unit_weight
    return head + struct.pack("<d", counter.total_units * unit_weight) + cells.astype("<f8").tobytes()


def read_count_min(image: bytes, rows: int, *, conservative: bool = True) -> tuple[CountMin, float]:
    """(counters, accesses that one of their units stands for) of a ``count_min_sketch`` image.

    Whole numbers below 2^53 come back exactly, other weights rounded up to 2^-16 access (coarser if they are large).

    Args:
        rows: of the table that the counters are for.

    Raises:
        SketchError: no such image, damaged, or of another depth, seed, or width than a power of two from 2^8.
    """
    if len(image) < _COUNT_MIN.size:
        raise _unreadable("count-min", f"{len(image)} bytes")
    *marks, flags, _, buckets, hashes, seed_hash, _ = _COUNT_MIN.unpack_from(image)
    if tuple(marks) != _COUNT_MIN_MARKS:
        raise _unreadable("count-min", "another kind of sketch")
    log2_width = buckets.bit_length() - 1
    fits = buckets == 1 << max(log2_width, 0) and MIN_LOG2_WIDTH <= log2_width <= MAX_LOG2_WIDTH
    if hashes != DEPTH or seed_hash != _SEED_HASH or not fits:
        raise _unreadable(
            "count-min", f"{hashes} x {buckets}, seed hash {seed_hash}; needed: {DEPTH} x 2^k, seed {SEED}"
        )
    if flags & _EMPTY_FLAG:
        return CountMin(rows, log2_width, conservative=conservative), 1.0
    if len(image) != _COUNT_MIN.size + 8 + 8 * DEPTH * buckets:
        raise _unreadable("count-min", f"{len(image)} bytes for {hashes} x {buckets} cells")
    numbers = np.frombuffer(image, dtype="<f8", offset=_COUNT_MIN.size).astype(np.float64)
    if not bool(np.isfinite(numbers).all()) or float(numbers.min()) < 0 or float(numbers.max()) >= 2.0**60:
        raise _unreadable("count-min", "weights that are negative or no numbers")
    bits = 0
    if bool((numbers != np.floor(numbers)).any()):
        bits = min(_FRACTION_BITS, _EXACT_BITS - math.frexp(float(numbers.max()))[1])
    units = np.ceil(numbers * 2.0**bits).astype(np.uint64)
    counter = CountMin(rows, log2_width, conservative=conservative)
    counter.load_values(units[1:].reshape(DEPTH, -1), int(units[0]))
    return counter, 2.0**-bits


def distinct_image(distinct: DistinctRows) -> bytes:
    """What ``datasketches.hll_sketch.deserialize`` reads: HLL_8, 2^12 registers, no HIP estimate (order is lost)."""
    registers = distinct.registers
    if not registers.any():
        empty: bytes = datasketches.hll_sketch(LOG2_REGISTERS, datasketches.tgt_hll_type.HLL_8).serialize_updatable()
        return empty
    powers = np.ldexp(1.0, -registers.astype(np.int64))
    low = registers < 32
    head = _HLL.pack(
        *_HLL_MARKS, LOG2_REGISTERS, 0, _HLL_OUT_OF_ORDER, 0, _HLL_8_REGISTERS,
        0.0, float(powers[low].sum()), float(powers[~low].sum()), int((registers == 0).sum()), 0,
    )  # fmt: skip
    return head + registers.tobytes()


def read_distinct(image: bytes) -> DistinctRows:
    """The registers of any ``hll_sketch`` image (of 2^12 registers or more; more are folded).

    Raises:
        SketchError: no such image, damaged, or of fewer registers.
    """
    try:
        union = datasketches.hll_union(LOG2_REGISTERS)
        union.update(datasketches.hll_sketch.deserialize(image))
        found = union.get_result(datasketches.tgt_hll_type.HLL_8)
    except (RuntimeError, ValueError, TypeError, IndexError, MemoryError) as error:
        raise _unreadable("HyperLogLog", str(error)) from error
    if found.lg_config_k != LOG2_REGISTERS:
        raise _unreadable("HyperLogLog", f"2^{found.lg_config_k} registers; needed: 2^{LOG2_REGISTERS}")
    distinct = DistinctRows()
    plain = found.serialize_updatable()
    mode = plain[7] & 3
    if mode == _HLL_MODE:
        registers = np.frombuffer(plain, dtype=np.uint8, offset=_HLL.size)[: 1 << LOG2_REGISTERS]
        distinct.load(registers)
        return distinct
    if found.is_empty():
        return distinct
    body = plain[_COUPONS_AT[mode] :]
    coupons: npt.NDArray[np.uint32] = np.frombuffer(body[: len(body) // 4 * 4], dtype="<u4").astype(np.uint32)
    slots = coupons & np.uint32((1 << LOG2_REGISTERS) - 1)
    np.maximum.at(distinct.registers, slots, (coupons >> np.uint32(_VALUE_BITS)).astype(np.uint8))
    return distinct


def _unreadable(what: str, why: str) -> SketchError:
    return SketchError(f"{what} image: {why}", remedy="give the serialised form of the Apache DataSketches sketch")
