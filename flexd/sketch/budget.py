"""Chooses the kind and precision of every table's counters within one memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.sketch import count_min_table, dense_table
from flexd.sketch.count_min_table import FAILURE_PROBABILITY, MAX_LOG2_WIDTH, MIN_LOG2_WIDTH, error_share
from flexd.sketch.logarithmic_table import packed_bytes, relative_error
from flexd.sketch.table_sketch import AccessSample, TableChoice

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
    chosen = [_smallest(table, max_hot_rows, logarithmic=logarithmic) for table in tables]
    smallest = sum(choice.bytes for choice in chosen)
    if smallest > memory_bytes:
        raise SketchError(
            f"{len(tables)} tables cannot be counted in {memory_bytes} bytes",
            remedy=f"give sketch.memory_bytes at least {smallest}",
        )
    left = memory_bytes - smallest
    ascending = sorted(range(len(tables)), key=lambda i: (tables[i].rows, i))

    def upgrade(i: int, choice: TableChoice) -> bool:
        nonlocal left
        more = choice.bytes - chosen[i].bytes
        if more > left:
            return False
        left -= more
        chosen[i] = choice
        return True

    def upgrade_all(bits: int) -> None:
        """Upgrade tables in ascending order until memory ends, except those that have as many bits already."""
        for i in ascending:
            as_good = chosen[i].kind == "dense" or chosen[i].counter_bits >= bits
            if not as_good and not upgrade(i, _logarithmic(tables[i], bits, max_hot_rows)):
                return

    if logarithmic:
        upgrade_all(LOG_BITS[0])
    for i in ascending:
        if chosen[i].kind != "dense" and not upgrade(i, _dense(tables[i], max_hot_rows)):
            break
    if logarithmic:
        for bits in LOG_BITS[1:]:
            upgrade_all(bits)
    # Widen the table with the most rows per cell next, until nothing more fits.
    growing = {i for i in ascending if chosen[i].kind == "count_min"}
    while growing:
        i = max(growing, key=lambda i: (tables[i].rows >> chosen[i].log2_width, i))
        wider = _count_min(tables[i], chosen[i].log2_width + 1, max_hot_rows)
        most = _dense(tables[i], max_hot_rows).bytes
        if wider.log2_width > MAX_LOG2_WIDTH or wider.bytes > most or not upgrade(i, wider):
            growing.remove(i)
    sketched_rows = sum(tables[i].rows for i in ascending if chosen[i].kind == "logarithmic")
    for i, choice in enumerate(chosen):
        if choice.kind == "logarithmic":
            more = int(left * tables[i].rows / sketched_rows) // AccessSample.bytes_of(1)
            more = min(more, _MAX_LOG_SAMPLE - choice.sampled_accesses)
            size = choice.bytes + AccessSample.bytes_of(more)
            chosen[i] = replace(choice, sampled_accesses=choice.sampled_accesses + more, bytes=size)
    return tuple(chosen)


def _smallest(table: TableSpec, max_hot_rows: int, *, logarithmic: bool) -> TableChoice:
    """Return the choice that takes the least memory; of equal ones the most precise."""
    least = _count_min(table, MIN_LOG2_WIDTH, max_hot_rows)
    if logarithmic:
        least = min(least, _logarithmic(table, LOG_BITS[0], max_hot_rows), key=lambda choice: choice.bytes)
    return min(_dense(table, max_hot_rows), least, key=lambda choice: choice.bytes)


def _dense(table: TableSpec, max_hot_rows: int) -> TableChoice:
    sampled = min(16_384, max(256, table.rows // 128))
    size = dense_table.bytes_of(table.rows) + AccessSample.bytes_of(sampled)
    return TableChoice(table.name, "dense", size, 0.0, 0.0, 0, min(max_hot_rows, table.rows), sampled)


def _count_min(table: TableSpec, log2_width: int, max_hot_rows: int) -> TableChoice:
    hot_rows = max(1, min(max_hot_rows, (1 << log2_width) // 4, table.rows))
    sampled = min(65_536, max(1024, (1 << log2_width) // 16))
    size = count_min_table.bytes_of(log2_width, hot_rows) + AccessSample.bytes_of(sampled)
    return TableChoice(
        table.name, "count_min", size, error_share(log2_width), FAILURE_PROBABILITY, log2_width, hot_rows, sampled
    )


def _logarithmic(table: TableSpec, bits: int, max_hot_rows: int) -> TableChoice:
    sampled = min(_MAX_LOG_SAMPLE, max(1, table.rows // 4096))
    size = packed_bytes(table.rows, bits) + AccessSample.bytes_of(sampled)
    hot_rows = min(max_hot_rows, table.rows)
    return TableChoice(
        table.name, "logarithmic", size, 0.0, 0.0, 0, hot_rows, sampled, bits, relative_error(bits)
    )  # fmt: skip
