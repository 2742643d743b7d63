"""Chooses the kind and precision of every table's counters within one memory budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.sketch import dense_table
from flexd.sketch.counters.countmin import FAILURE_PROBABILITY, MAX_LOG2_WIDTH, MIN_LOG2_WIDTH, CountMin
from flexd.sketch.counters.hot_set import HotSet
from flexd.sketch.distinct import LOG2_REGISTERS
from flexd.sketch.logarithmic_table import packed_bytes, relative_error
from flexd.sketch.sample import AccessSample
from flexd.sketch.types import TableChoice

LOG_BITS = (3, 4, 8)
_MAX_LOG_SAMPLE = 65_536


def choose(
    tables: Sequence[TableSpec], memory_bytes: int, max_hot_rows: int, *, logarithmic: bool = True
) -> tuple[TableChoice, ...]:
    """Give every row a counter as far as memory allows, then exact ones, then more precise ones; small tables first.

    1. Tables get 3 bits per row (if ``logarithmic``).
    2. Tables that have a counter for every row get exact counters.
    3. Tables without exact counters get 4 bits per row, then 8.
    4. Tables without a counter for every row share the remaining memory as count-mins in proportion to their rows. A
       count-min is at least 2^8 wide and never larger than the dense counter it replaces.
    5. The memory that remains enlarges the samples of logarithmic tables.

    Raises:
        SketchError: the smallest choice for every table does not fit.
    """
    # Bits of each table's logarithmic counters; 0 for a count-min or exact counters.
    bits = [0] * len(tables)
    spent = [_count_min_bytes(table, MIN_LOG2_WIDTH, max_hot_rows) for table in tables]
    for i, table in enumerate(tables):
        if logarithmic and _log_bytes(table, LOG_BITS[0]) < spent[i]:
            bits[i], spent[i] = LOG_BITS[0], _log_bytes(table, LOG_BITS[0])
    exact = {i for i, table in enumerate(tables) if _dense_bytes(table) <= spent[i]}
    for i in exact:
        spent[i] = _dense_bytes(tables[i])
    if sum(spent) > memory_bytes:
        raise SketchError(
            f"{len(tables)} tables cannot be counted in {memory_bytes} bytes",
            remedy=f"give sketch.memory_bytes at least {sum(spent)}",
        )
    left = memory_bytes - sum(spent)
    ascending = sorted(range(len(tables)), key=lambda i: (tables[i].rows, i))

    def upgrade(i: int, size: int) -> bool:
        nonlocal left
        if size - spent[i] > left:
            return False
        left -= size - spent[i]
        spent[i] = size
        return True

    def upgrade_all(wanted: int) -> None:
        """Upgrade tables in ascending order until memory ends, except those that have as many bits already."""
        for i in ascending:
            if i in exact or bits[i] >= wanted:
                continue
            if not upgrade(i, _log_bytes(tables[i], wanted)):
                return
            bits[i] = wanted

    if logarithmic:
        upgrade_all(LOG_BITS[0])
    for i in ascending:
        if i not in exact:
            if not upgrade(i, _dense_bytes(tables[i])):
                break
            exact.add(i)
    if logarithmic:
        for wanted in LOG_BITS[1:]:
            upgrade_all(wanted)
    width = {i: MIN_LOG2_WIDTH for i in ascending if i not in exact and not bits[i]}
    # Widen the table with the most rows per cell next, until nothing more fits.
    growing = set(width)
    while growing:
        i = max(growing, key=lambda i: (tables[i].rows >> width[i], i))
        wider = _count_min_bytes(tables[i], width[i] + 1, max_hot_rows)
        if width[i] == MAX_LOG2_WIDTH or wider > _dense_bytes(tables[i]) or not upgrade(i, wider):
            growing.remove(i)
            continue
        width[i] += 1
    choices = []
    sketched_rows = sum(tables[i].rows for i in ascending if i not in exact and bits[i])
    for i, table in enumerate(tables):
        if i in exact:
            choices.append(_dense_choice(table, max_hot_rows))
        elif bits[i]:
            extra = int(left * table.rows / sketched_rows)
            choices.append(_log_choice(table, bits[i], max_hot_rows, extra))
        else:
            choices.append(_count_min_choice(table, width[i], max_hot_rows))
    return tuple(choices)


def _dense_bytes(table: TableSpec) -> int:
    return dense_table.bytes_of(table.rows) + AccessSample.bytes_of(_dense_sample_capacity(table))


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
    # The error exceeds e / width with probability e^-depth: Cormode and Muthukrishnan 2005.
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


def _log_sample_capacity(table: TableSpec) -> int:
    return min(_MAX_LOG_SAMPLE, max(1, table.rows // 4096))


def _log_bytes(table: TableSpec, bits: int) -> int:
    return packed_bytes(table.rows, bits) + AccessSample.bytes_of(_log_sample_capacity(table))


def _log_choice(table: TableSpec, bits: int, max_hot_rows: int, extra_bytes: int) -> TableChoice:
    more = extra_bytes // AccessSample.bytes_of(1)
    sampled = min(_MAX_LOG_SAMPLE, _log_sample_capacity(table) + more)
    return TableChoice(
        table.name,
        "logarithmic",
        packed_bytes(table.rows, bits) + AccessSample.bytes_of(sampled),
        0.0,
        0.0,
        0,
        min(max_hot_rows, table.rows),
        sampled,
        bits,
        relative_error(bits),
    )
