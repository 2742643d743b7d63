"""The sketch of a table that is counted by a count-min, with hot set, sample and distinct count."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexd.core.keyspace import TableSpec
from flexd.sketch import curve
from flexd.sketch.counters import countmin
from flexd.sketch.counters.countmin import CountMin
from flexd.sketch.counters.hot_set import HotSet
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.distinct import DistinctRows
from flexd.sketch.profile import TableProfile
from flexd.sketch.table_sketch import Arrays, Float64Array, Int64Array, RowArray, TableSketch
from flexd.sketch.types import TableChoice

JOINED_SHARE = 1 / 8
"""Share of a decayed count-min's cells that may share a value before the unit is made coarser."""
COARSEST_UNITS = 2**8
"""Least units of an access after the unit was made coarser: its weight is off by 0.4 % at most. From there on cells
join, at no memory."""
COUNT_MIN_UNIT_BITS = 10
"""Fewer than an exact counter's: rounding up costs at most 0.1 % of a weight, less than the error of a count-min, and a
row's cells join, which slows counting down, 64 times later."""


class CountMinTable(TableSketch):
    """Count-min counters, the rows that may be hot, and a distinct count; the sample gives the tail."""

    unit_bits = COUNT_MIN_UNIT_BITS
    coarsest_units = COARSEST_UNITS
    rounds_up = True

    def __init__(self, spec: TableSpec, choice: TableChoice, seed: int) -> None:
        super().__init__(spec, choice, seed)
        self._counter = CountMin(spec.rows, choice.log2_width)
        self._hot = HotSet(choice.hot_rows)
        self._distinct = DistinctRows()

    @property
    def counter_bytes(self) -> int:
        return self._counter.nbytes + HotSet.bytes_of(self._hot.capacity) + self._distinct.registers.nbytes

    def _read_profile(self, decay: ForwardDecay, max_hot_rows: int) -> TableProfile:
        total = float(self._counter.total_units)
        if total == 0:
            return self._empty_profile()
        self._hot.admit_buffered(self._counter.query)
        rows = self._hot.rows()
        units = self._counter.query(rows)
        order = np.lexsort((rows, -units))[: min(max_hot_rows, self._hot.capacity)]
        rows, units = rows[order], units[order].astype(np.float64)
        mean_noise, noise_bound = self._counter.noise()
        distinct = min(self._distinct.estimate(), float(self.spec.rows))
        # A sampled access of a steady stream weighs half of one made now on average; without decay all weigh 1.
        access_units = 1.0 if decay.half_life_seconds is None else 0.5 / max(self._unit_weight(decay), 1e-300)
        tail_rows, tail_units, tail_share = self._tail(rows, total, mean_noise, access_units, distinct)
        hot_share = np.minimum(units / total, 1.0)
        return TableProfile(
            table=self.spec.name,
            rows=self.spec.rows,
            weight=total * self._unit_weight(decay),
            accesses_per_step=0.0,
            hot_rows=rows,
            hot_share=hot_share,
            hot_lower=np.maximum(units - noise_bound, 0.0) / total,
            hot_upper=hot_share,
            bin_share=tail_units / total,
            bin_rows=tail_rows,
            distinct_rows=distinct,
            coverage=min(1.0, float(hot_share.sum()) + tail_share),
        )

    def _tail(
        self, hot: Int64Array, total: float, mean_noise: float, access_units: float, distinct: float
    ) -> tuple[Float64Array, Float64Array, float]:
        """Return (rows in each bin, units of one such row, share of all accesses) of the rows not in ``hot``."""
        sampled = self._sample.rows()
        if not len(sampled):
            return np.empty(0), np.empty(0), 0.0
        cold = sampled[~np.isin(sampled, hot)]
        share = len(cold) / len(sampled)
        estimates = self._counter.query(cold).astype(np.float64)
        # A row that was accessed has at least that access, whatever the noise.
        units = np.maximum(np.maximum(estimates - mean_noise, np.minimum(estimates, access_units)), 1.0)
        rows, row_units = curve.tail_curve(units, share * total, max(1.0, distinct - len(hot)))
        return rows, row_units, share

    def _count(self, rows: RowArray, time: float, decay: ForwardDecay) -> tuple[int, int]:
        hot = self._hot
        start, negative, outside = 0, 0, 0
        while start < len(rows):
            self.coarsen_if_crowded(time, decay)
            units = self.access_units(time, decay)
            start, below, beyond, hot.buffered = self._counter.add(
                rows, start, units, self._distinct.registers, hot.threshold, hot.buffer, hot.buffered
            )
            negative += below
            outside += beyond
            if hot.buffered + countmin.BLOCK_IDS > len(hot.buffer):
                hot.admit_buffered(self._counter.query)
        return negative, outside

    def _count_times(self, rows: Int64Array, times: Int64Array, units: int) -> None:
        # One bit of the counts at a time, so that the conservative update of the one kernel holds.
        for bit in range(int(times.max()).bit_length() if len(times) else 0):
            self._add(rows[(times >> bit) & 1 == 1], units << bit)

    def _add(self, rows: Int64Array, units: int) -> None:
        hot, start = self._hot, 0
        while start < len(rows):
            start, _, _, hot.buffered = self._counter.add(
                rows, start, units, self._distinct.registers, hot.threshold, hot.buffer, hot.buffered
            )
            if hot.buffered + countmin.BLOCK_IDS > len(hot.buffer):
                hot.admit_buffered(self._counter.query)

    def _crowded(self) -> bool:
        return self._counter.joined_share > JOINED_SHARE

    def row_units(self, rows: Int64Array) -> Int64Array:
        return self._counter.query(rows)

    def rescale(self, bits: int) -> None:
        self._counter.rescale(bits)
        self._hot.rescale(bits)

    def _state(self) -> tuple[dict[str, Any], Arrays]:
        hot_meta, hot = self._hot.state()
        meta = {"total_units": self._counter.total_units, **hot_meta}
        cells: Arrays = {"cells": self._counter.cells(), "registers": self._distinct.registers.copy()}
        return meta, {**cells, **hot}

    def _load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self._counter.load(arrays["cells"], int(meta["total_units"]))
        self._distinct.load(arrays["registers"])
        self._hot.load(meta, arrays, self.spec.rows)
