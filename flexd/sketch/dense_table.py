"""The sketch of a table that is counted exactly."""

from __future__ import annotations

from typing import Any

from flexd.core.keyspace import TableSpec
from flexd.sketch import curve
from flexd.sketch.budget import TableChoice
from flexd.sketch.counters import dense
from flexd.sketch.counters.dense import DenseCounter
from flexd.sketch.decay import UNIT_BITS, ForwardDecay
from flexd.sketch.profile import TableProfile
from flexd.sketch.table_sketch import Arrays, Int64Array, RowArray, TableSketch

COARSEST_UNITS = 2**4
"""Least units of an access after the unit was made coarser: its weight is off by 3 % at most. Reached at 10^12 decayed
accesses of one table."""


class DenseTable(TableSketch):
    """Exact counters of one table."""

    unit_bits = UNIT_BITS
    _counter: DenseCounter
    coarsest_units = COARSEST_UNITS

    def __init__(self, spec: TableSpec, choice: TableChoice, seed: int) -> None:
        super().__init__(spec, choice, seed)
        self._counter = DenseCounter(spec.rows)

    def _read_profile(self, decay: ForwardDecay, max_hot_rows: int) -> TableProfile:
        read = curve.enumerate_rows(*self._counter.low_and_high(), max_hot_rows)
        if read.total_units == 0:
            return self._empty_profile()
        share = read.hot_units / read.total_units
        return TableProfile(
            table=self.spec.name,
            rows=self.spec.rows,
            weight=read.total_units * self._unit_weight(decay),
            accesses_per_step=0.0,
            hot_rows=read.hot_rows,
            hot_share=share,
            hot_lower=share,
            hot_upper=share,
            bin_share=read.bin_units / read.total_units,
            bin_rows=read.bin_rows,
            distinct_rows=float(read.distinct_rows),
            coverage=1.0,
        )

    def _count(self, rows: RowArray, time: float, decay: ForwardDecay) -> tuple[int, int]:
        negative, outside = 0, 0
        for start in range(0, len(rows), dense.CHECK_IDS):
            units = self.access_units(time, decay)
            below, beyond = self._counter.add(rows[start : start + dense.CHECK_IDS], units)
            negative += below
            outside += beyond
            self.coarsen_if_crowded(time, decay)
        return negative, outside

    def _count_times(self, rows: Int64Array, times: Int64Array, units: int) -> None:
        self._counter.add_units(rows, times * units)

    def _crowded(self) -> bool:
        return self._counter.side_rows > dense.side_rows_allowed(self.spec.rows)

    def _state(self) -> tuple[dict[str, Any], Arrays]:
        return {}, self._counter.state()

    def _load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self._counter.load(arrays)
