"""Counting what has been counted already: rows with counts, or the cells of a count-min, instead of every id."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from flexd.core.counted_accesses import CellCounts, CountedBatch, LengthCounts, RowCounts, TableCounts
from flexd.core.errors import CodecError, SketchError
from flexd.sketch.counters.countmin import BLOCK_IDS, DEPTH, CountMin
from flexd.sketch.counters.logarithmic_table import LogTable
from flexd.sketch.quantiles import KllQuantiles
from flexd.sketch.set_types import IngestCounts
from flexd.sketch.table_set import SketchSet
from flexd.sketch.tables import CountMinTable, DenseTable

REASONS = ("cells_of_exact_table",)
"""Every value that ``CodecError.reason`` takes here."""

Int64Array = npt.NDArray[np.int64]

SAMPLED_ACCESSES = 4
"""Accesses offered to a table's sample for each one that it keeps, at most."""
MAX_LENGTHS = 2**18
"""Sequence lengths of one message that enter the quantiles as they are; of more, as many evenly spread ranks do: an
error of at most 2^-18 in rank, a thousandth of the sketch's own."""


def ingest_counts(sketches: SketchSet, batch: CountedBatch) -> IngestCounts:
    """Counts what ``SketchSet.ingest`` would have counted from the ids, as of the batch's event time.

    Exact tables end up equal bit by bit. In a count-min, estimates are never too low: rows with counts are added
    conservatively, cells are summed. In logarithmic counters they are right on average; of cells for such a table, the
    sample that comes with them is counted, each access for as many as it stands for. Accesses of an unknown table or of
    rows outside it are counted as such.

    Raises:
        CodecError: cells for a table that is counted exactly here. Nothing of the batch is counted then.
    """
    for counts in batch.tables:
        index = sketches._index.get(counts.table)
        if index is not None and isinstance(counts, CellCounts) and isinstance(sketches._tables[index], DenseTable):
            raise CodecError(
                f"table {counts.table!r} is counted exactly here, rank {batch.source_rank} sends count-min cells of it",
                reason="cells_of_exact_table",
                remedy="give the Tap more max_bytes, or the daemon less sketch.memory_bytes",
            )
    total = IngestCounts()
    for counts in batch.tables:
        total += _ingest_table(sketches, counts, batch.source_rank, batch.event_time_seconds)
    return total


def _ingest_table(sketches: SketchSet, counts: TableCounts, source_rank: int, seconds: float) -> IngestCounts:
    index = sketches._index.get(counts.table)
    if index is None:
        return IngestCounts(unknown_table=counts.accesses)
    if not counts.accesses:
        return IngestCounts()
    decay = sketches._decay
    admission = decay.admit(seconds)
    if admission.relabel_half_lives:
        for sketch in sketches._tables:
            sketch.relabel(admission.relabel_half_lives)
    sketch = sketches._tables[index]
    when = admission.event_time_seconds
    sketch.make_room(when, decay)
    units = sketch.access_units(when, decay)
    outside = 0
    if isinstance(counts, RowCounts):
        inside = int(np.searchsorted(counts.rows, sketch.spec.rows))
        outside = int(counts.counts[inside:].sum())
        rows, times = counts.rows[:inside], counts.counts[:inside]
        if isinstance(sketch, DenseTable):
            sketch._counter.add_units(rows, times * units)
        elif isinstance(sketch, LogTable):
            sketch.add_weights(rows, times.astype(np.float64) * units, int(times.sum()) * units)
        elif isinstance(sketch, CountMinTable):
            _add_rows(sketch, rows, times, units)
        sampled, stands_for = _spread(rows, times, SAMPLED_ACCESSES * sketch._sample.capacity)
    else:
        sampled = counts.sampled[counts.sampled < sketch.spec.rows]
        stands_for = counts.accesses / max(1, len(counts.sampled))
        if isinstance(sketch, LogTable):
            # Cells are of no row in particular. The sample is right on average for each, and the total is exact.
            rows, times = np.unique(sampled, return_counts=True)
            sketch.add_weights(rows, times.astype(np.float64) * (stands_for * units), counts.accesses * units)
        elif isinstance(sketch, CountMinTable):
            _add_cells(sketch, counts, units, sampled)
        else:
            raise SketchError(f"cells of table {counts.table!r}, which has none")
    sketch.relieve(when, decay)
    accepted = counts.accesses - outside
    if len(sampled):
        log_weight = decay.log_weight(when) + math.log(stands_for)
        sketch._sample.add(sampled, source_rank, log_weight, sketch.spec.rows)
    sketch.samples += accepted
    _add_lengths(sketches, index, counts.lengths)
    return IngestCounts(
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


def _add_cells(sketch: CountMinTable, counts: CellCounts, units: int, sampled: Int64Array) -> None:
    mine = sketch._counter
    other = CountMin(mine.rows, mine.log2_width, conservative=mine.conservative)
    cells = resized(counts.cells, counts.log2_width, mine.log2_width)
    other.load_values((cells * units).astype(np.uint64).reshape(DEPTH, -1), counts.accesses * units)
    mine.merge(other)
    np.maximum(sketch._distinct.registers, counts.registers, out=sketch._distinct.registers)
    hot = sketch._hot
    candidates = np.unique(sampled)
    candidates = candidates[mine.query(candidates) >= hot.threshold]
    room = len(hot.buffer)
    for start in range(0, len(candidates), room):
        hot.absorb(mine.query)
        part = candidates[start : start + room]
        hot.buffer[: len(part)] = part
        hot.buffered = len(part)
    hot.absorb(mine.query)


def resized(cells: Int64Array, log2_width: int, wanted: int) -> Int64Array:
    """int64[4 * 2^k] cells of one width as cells of another that never say less.

    A bucket number is the low bits of the hash, so a narrower sketch's cell is the sum of the wider one's cells that
    share its low bits; and a wider one's cell holds at most what the narrower one's has.
    """
    by_row = cells.reshape(DEPTH, -1)
    if wanted <= log2_width:
        return np.ascontiguousarray(by_row.reshape(DEPTH, -1, 1 << wanted).sum(axis=1).reshape(-1))
    return np.tile(by_row, (1, 1 << (wanted - log2_width))).reshape(-1)


def _spread(rows: Int64Array, times: Int64Array, at_most: int) -> tuple[Int64Array, float]:
    """(rows of accesses drawn one from each of equal stretches of all accesses, accesses that each stands for)."""
    ends = np.cumsum(times)
    accesses = int(ends[-1]) if len(ends) else 0
    if accesses <= at_most:
        return np.repeat(rows, times), 1.0
    # Seeded by what is counted: the same delta, counted again after a crash, gives the same sample.
    random = np.random.default_rng([accesses, len(rows), int(rows[-1])])
    stretch = accesses / at_most
    places = (np.arange(at_most) + random.random(at_most)) * stretch
    return rows[np.minimum(np.searchsorted(ends, places, side="right"), len(rows) - 1)], stretch


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
