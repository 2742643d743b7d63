"""Dense or count-min for each table, and how wide, within one memory budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flexd.errors import SketchError
from flexd.keyspace import TableSpec
from flexd.sketch import dense
from flexd.sketch.countmin import FAILURE_PROBABILITY, MAX_LOG2_WIDTH, MIN_LOG2_WIDTH, CountMin
from flexd.sketch.distinct import LOG2_REGISTERS
from flexd.sketch.hotset import HotSet
from flexd.sketch.sample import AccessSample


@dataclass(frozen=True)
class TableChoice:
    """How one table is counted.

    Attributes:
        table: name.
        kind: ``dense`` (exact) or ``count_min``.
        bytes: memory it is given.
        error_share: over-estimate as a share of the table's accesses that one row's estimate exceeds with probability
            at most ``failure_probability``; 0 for dense.
        failure_probability: see above.
        log2_width: of the count-min; 0 for dense.
        hot_rows: rows that can be listed one by one.
        sampled_accesses: kept to tell where accesses come from, and to estimate the tail of a count-min.
    """

    table: str
    kind: Literal["dense", "count_min"]
    bytes: int
    error_share: float
    failure_probability: float
    log2_width: int
    hot_rows: int
    sampled_accesses: int


def choose(tables: Sequence[TableSpec], memory_bytes: int, max_hot_rows: int) -> tuple[TableChoice, ...]:
    """Small tables dense as far as memory goes; what is left is shared by the large ones in proportion to their rows.

    Every count-min is at least 2^8 wide and never larger than the dense counter it replaces.

    Raises:
        SketchError: the narrowest choice for every table does not fit.
    """
    floor = [min(_dense_bytes(t), _count_min_bytes(t, MIN_LOG2_WIDTH, max_hot_rows)) for t in tables]
    if sum(floor) > memory_bytes:
        raise SketchError(
            f"{len(tables)} tables cannot be counted in {memory_bytes} bytes",
            remedy=f"give sketch.memory_bytes at least {sum(floor)}",
        )
    reserved = sum(floor)
    exact: set[int] = set()
    for i in sorted(range(len(tables)), key=lambda i: (tables[i].rows, i)):
        reserved += _dense_bytes(tables[i]) - floor[i]
        if reserved > memory_bytes:
            break
        exact.add(i)
    left = memory_bytes - sum(_dense_bytes(tables[i]) for i in exact)
    sketched = sorted((i for i in range(len(tables)) if i not in exact), key=lambda i: (tables[i].rows, i))
    width = dict.fromkeys(sketched, MIN_LOG2_WIDTH)
    spent = sum(_count_min_bytes(tables[i], MIN_LOG2_WIDTH, max_hot_rows) for i in sketched)
    # The table with the most rows per cell is widened next, until nothing more fits.
    growing = set(sketched)
    while growing:
        i = max(growing, key=lambda i: (tables[i].rows >> width[i], i))
        now = _count_min_bytes(tables[i], width[i], max_hot_rows)
        wider = _count_min_bytes(tables[i], width[i] + 1, max_hot_rows)
        if width[i] == MAX_LOG2_WIDTH or spent + wider - now > left or wider > _dense_bytes(tables[i]):
            growing.remove(i)
            continue
        width[i] += 1
        spent += wider - now
    return tuple(
        _dense_choice(t, max_hot_rows) if i in exact else _count_min_choice(t, width[i], max_hot_rows)
        for i, t in enumerate(tables)
    )


def _dense_bytes(table: TableSpec) -> int:
    return dense.bytes_of(table.rows) + AccessSample.bytes_of(_dense_sample_capacity(table))


def _hot_capacity(table: TableSpec, log2_width: int, max_hot_rows: int) -> int:
    return max(1, min(max_hot_rows, (1 << log2_width) // 4, table.rows))


def _dense_sample_capacity(table: TableSpec) -> int:
    return min(16_384, max(256, table.rows // 128))


def _sample_capacity(log2_width: int) -> int:
    return min(65_536, max(1024, (1 << log2_width) // 16))


def _count_min_bytes(table: TableSpec, log2_width: int, max_hot_rows: int) -> int:
    total: int = (
        CountMin.bytes_of(log2_width)
        + HotSet.bytes_of(_hot_capacity(table, log2_width, max_hot_rows))
        + AccessSample.bytes_of(_sample_capacity(log2_width))
        + 2**LOG2_REGISTERS
    )
    return total


def _dense_choice(table: TableSpec, max_hot_rows: int) -> TableChoice:
    hot_rows = min(max_hot_rows, table.rows)
    return TableChoice(table.name, "dense", _dense_bytes(table), 0.0, 0.0, 0, hot_rows, _dense_sample_capacity(table))


def _count_min_choice(table: TableSpec, log2_width: int, max_hot_rows: int) -> TableChoice:
    # e / width with probability e^-depth: Cormode and Muthukrishnan 2005.
    return TableChoice(
        table.name,
        "count_min",
        _count_min_bytes(table, log2_width, max_hot_rows),
        math.e / (1 << log2_width),
        FAILURE_PROBABILITY,
        log2_width,
        _hot_capacity(table, log2_width, max_hot_rows),
        _sample_capacity(log2_width),
    )
