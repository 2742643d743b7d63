"""Adds the counts of a tap to the sketches: rows with counts instead of single ids."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from flexd.core.tap_counts import LengthCounts, TableCounts, TapCounts
from flexd.sketch.counters.countmin import BLOCK_IDS
from flexd.sketch.logarithmic_table import LogTable
from flexd.sketch.quantiles import KllQuantiles
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.tables import CountMinTable, DenseTable
from flexd.sketch.types import AccessCounts

Int64Array = npt.NDArray[np.int64]

SAMPLED_ACCESSES = 4
"""Accesses offered to a table's sample for each one that it keeps, at most."""
MAX_LENGTHS = 2**18
"""Sequence lengths of one message that enter the quantiles as they are; of more, as many evenly spread ranks do: an
error of at most 2^-18 in rank, a thousandth of the sketch's own."""


def ingest_counts(sketches: SketchSet, counts: TapCounts) -> AccessCounts:
    """Count what ``SketchSet.ingest`` would have counted from the ids, as of the event time of ``counts``.

    Exact tables end up equal bit by bit. In a count-min, rows are added conservatively, so estimates are never too low.
    In logarithmic counters they are right on average. Accesses of an unknown table or of rows outside it are counted
    as such.
    """
    total = AccessCounts()
    for table in counts.tables:
        total += _ingest_table(sketches, table, counts.source_rank, counts.event_time_seconds)
    return total


def _ingest_table(sketches: SketchSet, counts: TableCounts, source_rank: int, seconds: float) -> AccessCounts:
    index = sketches._index.get(counts.table)
    if index is None:
        return AccessCounts(unknown_table=counts.accesses)
    if not counts.accesses:
        return AccessCounts()
    decay = sketches._decay
    admission = decay.admit(seconds)
    if admission.relabel_half_lives:
        for sketch in sketches._tables:
            sketch.relabel(admission.relabel_half_lives)
    sketch = sketches._tables[index]
    when = admission.event_time_seconds
    sketch.make_room(when, decay)
    units = sketch.access_units(when, decay)
    inside = int(np.searchsorted(counts.rows, sketch.spec.rows))
    outside = int(counts.counts[inside:].sum())
    rows, times = counts.rows[:inside], counts.counts[:inside]
    if isinstance(sketch, DenseTable):
        sketch._counter.add_units(rows, times * units)
    elif isinstance(sketch, LogTable):
        sketch.add_weights(rows, times.astype(np.float64) * units, int(times.sum()) * units)
    elif isinstance(sketch, CountMinTable):
        _add_rows(sketch, rows, times, units)
    # A message that is counted again after a crash gives the same sample.
    random = np.random.default_rng([source_rank, int(np.float64(seconds).view(np.uint64))])
    sampled, stands_for = _draw_accesses(rows, times, SAMPLED_ACCESSES * sketch._sample.capacity, random)
    sketch.relieve(when, decay)
    accepted = counts.accesses - outside
    if len(sampled):
        log_weight = decay.log_weight(when) + math.log(stands_for)
        sketch._sample.add(sampled, source_rank, log_weight, sketch.spec.rows)
    sketch.samples += accepted
    _add_lengths(sketches, index, counts.lengths)
    return AccessCounts(
        accepted=accepted,
        row_out_of_range=outside,
        future_clamped=accepted if admission.future_clamped else 0,
        late=accepted if admission.late else 0,
    )


def _add_rows(sketch: CountMinTable, rows: Int64Array, times: Int64Array, units: int) -> None:
    """A bit of the counts at a time, so that the one kernel there is counts them, and its conservative update holds."""
    for bit in range(int(times.max()).bit_length() if len(times) else 0):
        _add_with_units(sketch, rows[(times >> bit) & 1 == 1], units << bit)


def _add_with_units(sketch: CountMinTable, rows: Int64Array, units: int) -> None:
    hot, start = sketch._hot, 0
    while start < len(rows):
        start, _, _, hot.buffered = sketch._counter.add(
            rows, start, units, sketch._distinct.registers, hot.threshold, hot.buffer, hot.buffered
        )
        if hot.buffered + BLOCK_IDS > len(hot.buffer):
            hot.absorb(sketch._counter.query)


def _draw_accesses(
    rows: Int64Array, times: Int64Array, at_most: int, random: np.random.Generator
) -> tuple[Int64Array, float]:
    """Draw a uniform sample without replacement; return its rows and the number of accesses that each stands for.

    The draw must be independent of other messages and of the order of the rows: the affinity of a table is read from
    how often two sampled accesses of a row come from one node.
    """
    ends = np.cumsum(times)
    accesses = int(ends[-1]) if len(ends) else 0
    if accesses <= at_most:
        return np.repeat(rows, times), 1.0
    places = random.choice(accesses, at_most, replace=False, shuffle=False)
    return rows[np.searchsorted(ends, places, side="right")], accesses / at_most


def _add_lengths(sketches: SketchSet, index: int, lengths: LengthCounts) -> None:
    total = int(lengths.counts.sum())
    if not total:
        return
    if total <= MAX_LENGTHS:
        values = np.repeat(lengths.lengths, lengths.counts)
    else:
        places = (np.arange(MAX_LENGTHS) + 0.5) * (total / MAX_LENGTHS)
        values = lengths.lengths[np.searchsorted(np.cumsum(lengths.counts), places, side="right")]
    sketches._lengths.setdefault(index, KllQuantiles()).add(values)
