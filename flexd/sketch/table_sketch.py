"""The common part of the sketches of one table: unit, sample of accesses, state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.keyspace import TableSpec
from flexd.core.layout import RankLayout
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.node_sources import read_sources
from flexd.sketch.profile import TableProfile
from flexd.sketch.sample import AccessSample, draw_accesses
from flexd.sketch.types import TableChoice

RowArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]

OFFERED_ACCESSES = 4
"""Counted accesses offered to a table's sample for each one that it keeps, at most."""
COARSEN_BITS = 2
"""Bits by which the unit becomes coarser at a time."""


class TableSketch(ABC):
    """Counters of one table in units of ``2^exponent`` (``ForwardDecay``; the exponent is None before any access), and
    a sample of its accesses with their source ranks.

    Args:
        seed: of the sample.
    """

    unit_bits: int
    """An access is counted with a weight of ``2^unit_bits`` to four times as many units."""
    coarsest_units: int
    """Least units of one access at which ``coarsen_if_crowded`` still makes the unit coarser."""
    rounds_up = False
    """Round the weight of an access up to whole units, instead of to nearest."""

    def __init__(self, spec: TableSpec, choice: TableChoice, seed: int) -> None:
        self.spec = spec
        self._sample = AccessSample(choice.sampled_accesses, seed)
        self.exponent: int | None = None
        self.samples = 0
        """Accesses counted, undecayed."""

    def add(self, rows: RowArray, source_rank: int, event_time_seconds: float, decay: ForwardDecay) -> tuple[int, int]:
        """Count accesses of one event time and one rank.

        Args:
            rows: int32[n] or int64[n], contiguous.

        Returns:
            (ids below 0, ids beyond the table); neither are counted.
        """
        self.fit_unit(event_time_seconds, decay)
        negative, outside = self._count(rows, event_time_seconds, decay)
        self._sample.add(rows, source_rank, decay.log_weight(event_time_seconds), self.spec.rows)
        self.samples += len(rows) - negative - outside
        return negative, outside

    def add_counted(
        self,
        rows: Int64Array,
        times: Int64Array,
        source_rank: int,
        event_time_seconds: float,
        decay: ForwardDecay,
        random: np.random.Generator,
    ) -> int:
        """Count accesses of one event time and one rank that come as numbers of accesses by row.

        Args:
            rows: int64[n], ascending without repeats, not negative.
            times: int64[n], accesses of each row.
            random: draws the accesses that are offered to the sample.

        Returns:
            Accesses beyond the table, which are not counted.
        """
        self.fit_unit(event_time_seconds, decay)
        inside = int(np.searchsorted(rows, self.spec.rows))
        outside = int(times[inside:].sum())
        rows, times = rows[:inside], times[:inside]
        self._count_times(rows, times, self.access_units(event_time_seconds, decay))
        sampled, accesses_each = draw_accesses(rows, times, OFFERED_ACCESSES * self._sample.capacity, random)
        self.coarsen_if_crowded(event_time_seconds, decay)
        if len(sampled):
            log_weight = decay.log_weight(event_time_seconds) + math.log(accesses_each)
            self._sample.add(sampled, source_rank, log_weight, self.spec.rows)
        self.samples += int(times.sum())
        return outside

    def fit_unit(self, time: float, decay: ForwardDecay) -> None:
        """Choose the unit at the first access, and a coarser one once an access of this time weighs too many units."""
        if self.exponent is None:
            self.exponent = decay.unit_exponent(time, self.unit_bits)
        elif decay.needs_rescale(time, self.exponent, self.unit_bits):
            self._raise_exponent(decay.unit_exponent(time, self.unit_bits))

    def access_units(self, time: float, decay: ForwardDecay) -> int:
        """Return the weight of one access of this time in the present unit."""
        return 0 if self.exponent is None else decay.units(time, self.exponent, up=self.rounds_up)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return a copy of everything: (JSON-able values, arrays)."""
        meta, arrays = self._state()
        sample_meta, sample = self._sample.state()
        return {"exponent": self.exponent, "samples": self.samples, **meta, **sample_meta}, {**arrays, **sample}

    def load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        """Replace everything by what ``state`` returned.

        Raises:
            SketchError: the arrays do not fit this table.
            KeyError, TypeError, ValueError: fields are missing or malformed.
        """
        self._load(meta, arrays)
        self._sample.load(meta, arrays, self.spec.rows)
        self.exponent = None if meta["exponent"] is None else int(meta["exponent"])
        self.samples = int(meta["samples"])

    def coarsen_if_crowded(self, time: float, decay: ForwardDecay) -> None:
        """Make the unit coarser while too many counters exceed their word and present accesses stay precise."""
        if decay.half_life_seconds is None or self.exponent is None:
            return
        while self._crowded() and self.access_units(time, decay) >> COARSEN_BITS >= self.coarsest_units:
            self._raise_exponent(self.exponent + COARSEN_BITS)

    def _raise_exponent(self, exponent: int) -> None:
        if self.exponent is not None and exponent > self.exponent:
            self.rescale(exponent - self.exponent)
            self.exponent = exponent

    def _unit_weight(self, decay: ForwardDecay) -> float:
        return 0.0 if self.exponent is None else decay.unit_weight(self.exponent)

    def _empty_profile(self) -> TableProfile:
        none, no_rows = np.empty(0, dtype=np.float64), np.empty(0, dtype=np.int64)
        return TableProfile(self.spec.name, self.spec.rows, 0.0, 0.0, no_rows, none, none, none, none, none, 0.0, 0.0)

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self.counter_bytes + AccessSample.bytes_of(self._sample.capacity)

    def profile(self, decay: ForwardDecay, max_hot_rows: int, layout: RankLayout | None = None) -> TableProfile:
        """Return the table's profile with ``accesses_per_step`` 0, and with its sources if a layout is given."""
        profile = self._read_profile(decay, max_hot_rows)
        if layout is None:
            return profile
        sources = read_sources(self._sample.rows(), self._sample.source_ranks(), profile.hot_rows, layout)
        return replace(profile, sources=sources)

    def query(self, rows: Int64Array, decay: ForwardDecay) -> Float64Array:
        """Return the decayed accesses of int64[n] rows of the table as float64[n]."""
        weight: Float64Array = self.row_units(rows).astype(np.float64) * self._unit_weight(decay)
        return weight

    @property
    @abstractmethod
    def counter_bytes(self) -> int:
        """Memory of the counters in use."""

    @abstractmethod
    def row_units(self, rows: Int64Array) -> Int64Array | Float64Array:
        """Return the units of int64[n] rows of the table as int64[n] or float64[n]."""

    @abstractmethod
    def rescale(self, bits: int) -> None:
        """Divide all counters by ``2^bits``; ``bits`` is 1 or more."""

    @abstractmethod
    def _read_profile(self, decay: ForwardDecay, max_hot_rows: int) -> TableProfile: ...

    @abstractmethod
    def _crowded(self) -> bool: ...

    @abstractmethod
    def _count(self, rows: RowArray, time: float, decay: ForwardDecay) -> tuple[int, int]: ...

    @abstractmethod
    def _count_times(self, rows: Int64Array, times: Int64Array, units: int) -> None:
        """Add ``units`` to each row as often as ``times`` says; all rows are in the table, without repeats."""

    @abstractmethod
    def _state(self) -> tuple[dict[str, Any], Arrays]: ...

    @abstractmethod
    def _load(self, meta: dict[str, Any], arrays: Arrays) -> None: ...
