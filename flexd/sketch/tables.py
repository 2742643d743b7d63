"""What is remembered of one table: exact counters, or a count-min with hot set, sample and distinct count."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.core.layout import RankLayout
from flexd.sketch import curve
from flexd.sketch.budget import TableChoice
from flexd.sketch.counters import countmin, dense
from flexd.sketch.counters.countmin import CountMin
from flexd.sketch.counters.dense import DenseCounter
from flexd.sketch.counters.hot_set import HotSet
from flexd.sketch.decay import UNIT_BITS, ForwardDecay
from flexd.sketch.distinct import DistinctRows
from flexd.sketch.node_sources import read_sources
from flexd.sketch.profile import TableProfile
from flexd.sketch.sample import AccessSample

RowArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]

JOINED_SHARE = 1 / 8
"""Of a decayed count-min's cells, how many may share a value before the unit is made coarser."""
COARSEN_BITS = 2
COARSEST_DENSE_UNITS = 2**4
COARSEST_COUNT_MIN_UNITS = 2**8
"""An access keeps at least so many units when the unit is made coarser: its weight is off by 3 % and 0.4 % at most. An
exact counter gets there at 10^12 decayed accesses of one table; a count-min joins cells instead, at no memory."""
COUNT_MIN_UNIT_BITS = 10
"""Fewer than an exact counter's: rounding up costs at most 0.1 % of a weight, less than a count-min is off by anyway,
and a row's cells join, which makes counting it slower, 64 times later."""


class TableSketch(ABC):
    """Counters of one table in units of ``2^exponent`` (``ForwardDecay``; the exponent is None before any access), and
    a sample of its accesses, which tells where they come from.

    Args:
        seed: of the sample.
    """

    unit_bits: int
    """An access weighs ``2^unit_bits`` to four times as many units when it is counted."""
    coarsest_units: int
    """Of one access, see ``relieve``."""
    rounds_up = False
    """The weight of an access is rounded up to whole units, instead of to nearest."""

    def __init__(self, spec: TableSpec, choice: TableChoice, seed: int) -> None:
        self.spec = spec
        self._sample = AccessSample(choice.sampled_accesses, seed)
        self.exponent: int | None = None
        self.samples = 0
        """Accesses counted, undecayed."""

    def add(self, rows: RowArray, source_rank: int, event_time_seconds: float, decay: ForwardDecay) -> tuple[int, int]:
        """Counts accesses of one event time and one rank.

        Args:
            rows: int32[n] or int64[n], contiguous.

        Returns:
            (ids below 0, ids beyond the table), which are not counted.
        """
        self.make_room(event_time_seconds, decay)
        negative, outside = self._count(rows, event_time_seconds, decay)
        self._sample.add(rows, source_rank, decay.log_weight(event_time_seconds), self.spec.rows)
        self.samples += len(rows) - negative - outside
        return negative, outside

    def make_room(self, time: float, decay: ForwardDecay) -> None:
        """Chooses the unit before the first access, and a coarser one once accesses of this time weigh too many."""
        if self.exponent is None:
            self.exponent = decay.unit_exponent(time, self.unit_bits)
        elif decay.needs_rescale(time, self.exponent, self.unit_bits):
            self._raise_to(decay.unit_exponent(time, self.unit_bits))

    def access_units(self, time: float, decay: ForwardDecay) -> int:
        """What one access of this time weighs in the present unit."""
        return 0 if self.exponent is None else decay.units(time, self.exponent, up=self.rounds_up)

    def relabel(self, half_lives: int) -> None:
        """Counts everything so far as of this many half-lives earlier."""
        if self.exponent is not None:
            self.exponent -= half_lives
        self._sample.relabel(-half_lives * math.log(2.0))

    def merge(self, other: TableSketch) -> None:
        """Adds the other's accesses to these; the other is left as it is.

        Raises:
            SketchError: of another table, kind or width.
        """
        if type(other) is not type(self) or other.spec.rows != self.spec.rows:
            raise SketchError(
                f"table {self.spec.name!r}: sketches of different kind or rows cannot be merged",
                remedy="give all daemons of a job the same tables and sketch settings",
            )
        if other.exponent is None:
            return
        exponent = other.exponent if self.exponent is None else max(self.exponent, other.exponent)
        if other.exponent < exponent:
            other = other.copy()
            other._raise_to(exponent)
        self._raise_to(exponent)
        self.exponent = exponent
        self._merge_counts(other)
        self._sample.merge(other._sample)
        self.samples += other.samples

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """(JSON-able, arrays): all of it, copied."""
        meta, arrays = self._state()
        sample_meta, sample = self._sample.state()
        return {"exponent": self.exponent, "samples": self.samples, **meta, **sample_meta}, {**arrays, **sample}

    def load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        """Takes over what ``state`` gave.

        Raises:
            SketchError: the arrays do not fit this table.
            KeyError, TypeError, ValueError: fields are missing or malformed.
        """
        self._load(meta, arrays)
        self._sample.load(meta, arrays, self.spec.rows)
        self.exponent = None if meta["exponent"] is None else int(meta["exponent"])
        self.samples = int(meta["samples"])

    def relieve(self, time: float, decay: ForwardDecay) -> None:
        """Makes the unit coarser while too many counters have outgrown their word and accesses of now stay precise."""
        if decay.half_life_seconds is None or self.exponent is None:
            return
        while self._crowded() and self.access_units(time, decay) >> COARSEN_BITS >= self.coarsest_units:
            self._raise_to(self.exponent + COARSEN_BITS)

    def _raise_to(self, exponent: int) -> None:
        if self.exponent is not None and exponent > self.exponent:
            self._rescale(exponent - self.exponent)
            self.exponent = exponent

    def _unit_weight(self, decay: ForwardDecay) -> float:
        return 0.0 if self.exponent is None else decay.unit_weight(self.exponent)

    def _nothing(self) -> TableProfile:
        none, no_rows = np.empty(0, dtype=np.float64), np.empty(0, dtype=np.int64)
        return TableProfile(self.spec.name, self.spec.rows, 0.0, 0.0, no_rows, none, none, none, none, none, 0.0, 0.0)

    @property
    def nbytes(self) -> int:
        """Memory held now."""
        return self._counter_bytes() + AccessSample.bytes_of(self._sample.capacity)

    def copy(self) -> Self:
        """A sketch that later changes of this one do not reach."""
        twin = copy.copy(self)
        twin._sample = self._sample.copy()
        self._copy_counts(twin)
        return twin

    def profile(self, decay: ForwardDecay, max_hot_rows: int, layout: RankLayout | None = None) -> TableProfile:
        """What the planner reads, with ``accesses_per_step`` 0; the sources only if a layout is given."""
        profile = self._profile(decay, max_hot_rows)
        if layout is None:
            return profile
        sources = read_sources(self._sample.rows(), self._sample.source_ranks(), profile.hot_rows, layout)
        return replace(profile, sources=sources)

    @abstractmethod
    def query(self, rows: Int64Array, decay: ForwardDecay) -> Float64Array:
        """int64[n] rows of the table -> float64[n] decayed accesses (never too few)."""

    @abstractmethod
    def _profile(self, decay: ForwardDecay, max_hot_rows: int) -> TableProfile: ...

    @abstractmethod
    def _counter_bytes(self) -> int: ...

    @abstractmethod
    def _copy_counts(self, twin: Any) -> None: ...

    @abstractmethod
    def _crowded(self) -> bool: ...

    @abstractmethod
    def _count(self, rows: RowArray, time: float, decay: ForwardDecay) -> tuple[int, int]: ...

    @abstractmethod
    def _rescale(self, bits: int) -> None: ...

    @abstractmethod
    def _merge_counts(self, other: Any) -> None: ...

    @abstractmethod
    def _state(self) -> tuple[dict[str, Any], Arrays]: ...

    @abstractmethod
    def _load(self, meta: dict[str, Any], arrays: Arrays) -> None: ...


class DenseTable(TableSketch):
    """Exact counters."""

    unit_bits = UNIT_BITS
    coarsest_units = COARSEST_DENSE_UNITS

    def __init__(self, spec: TableSpec, choice: TableChoice, seed: int) -> None:
        super().__init__(spec, choice, seed)
        self._counter = DenseCounter(spec.rows)

    def _counter_bytes(self) -> int:
        return self._counter.nbytes

    def _copy_counts(self, twin: DenseTable) -> None:
        twin._counter = self._counter.copy()

    def query(self, rows: Int64Array, decay: ForwardDecay) -> Float64Array:
        weight: Float64Array = self._counter.query(rows).astype(np.float64) * self._unit_weight(decay)
        return weight

    def _profile(self, decay: ForwardDecay, max_hot_rows: int) -> TableProfile:
        read = curve.enumerate_rows(*self._counter.split(), max_hot_rows)
        if read.total_units == 0:
            return self._nothing()
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
            self.relieve(time, decay)
        return negative, outside

    def _crowded(self) -> bool:
        return self._counter.side_rows > dense.side_rows_allowed(self.spec.rows)

    def _rescale(self, bits: int) -> None:
        self._counter.rescale(bits)

    def _merge_counts(self, other: DenseTable) -> None:
        self._counter.merge(other._counter)

    def _state(self) -> tuple[dict[str, Any], Arrays]:
        return {"kind": "dense"}, self._counter.state()

    def _load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self._counter.load(arrays)


class CountMinTable(TableSketch):
    """Count-min counters, with the rows that may be hot and a distinct count; the sample gives the tail."""

    unit_bits = COUNT_MIN_UNIT_BITS
    coarsest_units = COARSEST_COUNT_MIN_UNITS
    rounds_up = True

    def __init__(self, spec: TableSpec, choice: TableChoice, seed: int, conservative: bool = True) -> None:
        super().__init__(spec, choice, seed)
        self._counter = CountMin(spec.rows, choice.log2_width, conservative=conservative)
        self._hot = HotSet(choice.hot_rows)
        self._distinct = DistinctRows()

    def _counter_bytes(self) -> int:
        return self._counter.nbytes + HotSet.bytes_of(self._hot.capacity) + self._distinct.registers.nbytes

    def _copy_counts(self, twin: CountMinTable) -> None:
        twin._counter, twin._hot = self._counter.copy(), self._hot.copy()
        twin._distinct = self._distinct.copy()

    def query(self, rows: Int64Array, decay: ForwardDecay) -> Float64Array:
        weight: Float64Array = self._counter.query(rows).astype(np.float64) * self._unit_weight(decay)
        return weight

    def _profile(self, decay: ForwardDecay, max_hot_rows: int) -> TableProfile:
        total = float(self._counter.total_units)
        if total == 0:
            return self._nothing()
        self._hot.absorb(self._counter.query)
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
        """(rows in each bin, units of one such row, share of all accesses) of the rows not in ``hot``."""
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
            self.relieve(time, decay)
            units = self.access_units(time, decay)
            start, below, beyond, hot.buffered = self._counter.add(
                rows, start, units, self._distinct.registers, hot.threshold, hot.buffer, hot.buffered
            )
            negative += below
            outside += beyond
            if hot.buffered + countmin.BLOCK_IDS > len(hot.buffer):
                hot.absorb(self._counter.query)
        return negative, outside

    def _crowded(self) -> bool:
        return self._counter.joined_share > JOINED_SHARE

    def _rescale(self, bits: int) -> None:
        self._counter.rescale(bits)
        self._hot.rescale(bits)

    def _merge_counts(self, other: CountMinTable) -> None:
        self._counter.merge(other._counter)
        self._hot.merge(other._hot, self._counter.query)
        self._distinct.merge(other._distinct)

    def _state(self) -> tuple[dict[str, Any], Arrays]:
        hot_meta, hot = self._hot.state()
        meta = {
            "kind": "count_min",
            "log2_width": self._counter.log2_width,
            "total_units": self._counter.total_units,
            **hot_meta,
        }
        cells: Arrays = {"cells": self._counter.cells(), "registers": self._distinct.registers.copy()}
        return meta, {**cells, **hot}

    def _load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self._counter.load(arrays["cells"], int(meta["total_units"]))
        self._distinct.load(arrays["registers"])
        self._hot.load(meta, arrays, self.spec.rows)
