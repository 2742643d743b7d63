"""The sketch of one table: how it is counted, its unit, its sample of accesses with their source ranks, and what each
kind of counters implements."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal

import numba
import numpy as np

from flexd.core.arrays import Arrays, Float64Array, Int32Array, Int64Array, RowArray
from flexd.core.keyspace import TableSpec
from flexd.core.placement import RankLayout
from flexd.core.tap_counts import GAMMA
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.kernel_parts import finalise
from flexd.sketch.profile import TableProfile, read_sources

Kind = Literal["dense", "logarithmic", "count_min"]


@dataclass(frozen=True)
class SketchSettings:
    """Settings of a ``SketchSet``. They are saved with its state, which only loads into a set of equal settings.

    Attributes:
        memory_bytes: for the counters of all tables.
        half_life_seconds: event time in which an access loses half its weight; None counts for ever.
        max_future_seconds: accesses dated further ahead of their arrival are counted at their arrival.
        max_hot_rows: rows listed individually in a profile, per table.
        late_after_seconds: accesses older than the newest event by more than this are counted as late.
        logarithmic: allow logarithmic counters for tables too large for exact ones.
        coaccess_memory_bytes: of the sample of rows that occur together, besides; 0 keeps none.
        share: share of the stream that is counted. Below 1 no step is seen whole.
    """

    memory_bytes: int = 512 * 2**20
    half_life_seconds: float | None = 3600.0
    max_future_seconds: float = 300.0
    max_hot_rows: int = 1_000_000
    late_after_seconds: float = 60.0
    logarithmic: bool = True
    coaccess_memory_bytes: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class TableChoice:
    """The kind and precision of one table's counters.

    Attributes:
        table: name.
        kind: ``dense`` (exact), ``logarithmic`` (every row, right on average) or ``count_min``.
        bytes: memory of the counters.
        error_share: error of one row's estimate in a count-min, as a share of the table's accesses, exceeded with
            probability at most ``failure_probability``; 0 for the other kinds.
        failure_probability: of ``error_share``.
        log2_width: of the count-min; 0 for the other kinds.
        hot_rows: rows that can be listed individually.
        sampled_accesses: size of the sample that gives the source nodes, the tail of a count-min, and the hottest rows
            of logarithmic counters.
        counter_bits: bits of a logarithmic counter; 0 for the other kinds.
        relative_error: relative standard error of one row's estimate in logarithmic counters; 0 for the other kinds.
    """

    table: str
    kind: Kind
    bytes: int
    error_share: float
    failure_probability: float
    log2_width: int
    hot_rows: int
    sampled_accesses: int
    counter_bits: int = 0
    relative_error: float = 0.0

    def words(self) -> str:
        """Return what counters of another choice cannot be loaded into, in words."""
        if self.kind == "logarithmic":
            return f"logarithmic ({self.counter_bits} bits)"
        return "dense" if self.kind == "dense" else f"count-min (2^{self.log2_width}, {self.hot_rows} hot rows)"


# Bits by which the unit becomes coarser at a time.
COARSEN_BITS = 2
# Below this chance of an access to enter, the distance to the next one is drawn instead of every access.
_SPARSE = 0.1
_MAX_RANK = 2**31 - 1


@numba.njit(cache=True, nogil=True)
def _exponential(state: Any) -> Any:
    # Draw from Exp(1) with SplitMix64: passing numpy's generators to compiled code takes as long as a message.
    state[0] += np.uint64(GAMMA)
    return -np.log((np.float64(finalise(state[0]) >> np.uint64(11)) + 0.5) * 2.0**-53)


@numba.njit(cache=True, nogil=True)
def _select(
    ids: Any,
    start: int,
    chance: float,
    gap: float,
    random: Any,
    table_rows: int,
    rank: Any,
    log_weight: float,
    rows: Any,
    ranks: Any,
    keys: Any,
    count: int,
) -> tuple[int, float, int]:
    """Append the accesses that enter, until there are no more or the buffer is full.

    Each access covers a length of ``chance`` on a line with points at unit rate. It enters if a point lies on its part,
    and the position of the first point there is its draw. ``gap`` is the distance from ``start`` to the next point.
    """
    at = start
    while at < ids.size and count < rows.size:
        if chance > _SPARSE:
            draw = _exponential(random)
            entered = at
            at += 1
            if draw >= chance:
                continue
        else:
            parts = gap / chance
            if parts >= ids.size - at:
                return ids.size, gap - (ids.size - at) * chance, count
            entered = at + int(parts)
            draw = min(max(gap - int(parts) * chance, 0.0), chance)
            at = entered + 1
            gap = _exponential(random)
        row = np.int64(ids[entered])
        if 0 <= row < table_rows:
            rows[count] = row
            ranks[count] = rank
            keys[count] = np.log(max(draw, 5e-324)) - log_weight
            count += 1
    return at, gap, count


class AccessSample:
    """Keeps the accesses with the lowest ``Exp(1) / weight`` (Efraimidis and Spirakis, *Weighted random sampling with
    a reservoir*, IPL 2006; with forward decay as in Cormode et al. 2009, section 4).

    A share p estimated from a sample of n has a standard error of ``sqrt(p (1 - p) / n)``, at most 0.2 % for 65,536.
    Keys are logarithms, so they need no rescaling. Only accesses that enter cost time: the weight that passes until the
    next one enters is exponential and drawn in advance (the "exponential jumps" of the same paper), so most messages
    cost one comparison.

    Args:
        capacity: accesses kept (up to twice as many between two trims).
        seed: of the draws; equal streams give equal samples.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self._random = np.array([seed % 2**64], dtype=np.uint64)
        self._rows: Int64Array = np.empty(2 * capacity, dtype=np.int64)
        self._ranks: Int32Array = np.empty(2 * capacity, dtype=np.int32)
        self._keys: Float64Array = np.empty(2 * capacity, dtype=np.float64)
        self._count = 0
        # Accesses with a larger key are not in the sample.
        self._limit = math.inf
        # Distance to the next access that enters, in units of an access' chance to enter.
        self._gap = float(_exponential(self._random))

    @staticmethod
    def bytes_of(capacity: int) -> int:
        """Return the memory of a sample: row, rank and key of twice its capacity."""
        return 2 * (8 + 4 + 8) * capacity

    def add(self, rows: RowArray, source_rank: int, log_weight: float, table_rows: int) -> None:
        """Offer accesses of one event time and one rank.

        Args:
            rows: int32[n] or int64[n]; ids outside ``0..table_rows`` are left out.
            source_rank: of all of them; kept as -1 if it is no rank.
            log_weight: natural logarithm of their forward weight.
        """
        chance = self._chance(log_weight)
        if chance <= _SPARSE and len(rows) * chance <= self._gap:
            self._gap -= len(rows) * chance
            return
        rank = np.int32(source_rank if 0 <= source_rank <= _MAX_RANK else -1)
        start, given = 0, readonly(rows)
        while start < len(rows):
            start, self._gap, self._count = _select(
                given, start, self._chance(log_weight), self._gap, self._random, table_rows, rank, log_weight,
                self._rows, self._ranks, self._keys, self._count,
            )  # fmt: skip
            if self._count == len(self._rows):
                self._keep_best(self._rows, self._ranks, self._keys)

    def _chance(self, log_weight: float) -> float:
        # Return the chance of an access to enter, to first order: its length on the line that ``_gap`` measures.
        power = self._limit + log_weight
        return math.exp(power) if power < 700 else math.inf

    def rows(self) -> Int64Array:
        """Return the row of each sampled access, int64[n]; rows repeat as often as they were sampled."""
        return self._rows[: self._count]

    def source_ranks(self) -> Int32Array:
        """Return the source rank of each of ``rows``, int32[n]; -1 if it was no rank."""
        return self._ranks[: self._count]

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return (random state and limit, {``sample_rows`` int64[n], ``sample_ranks`` int32[n], ``sample_keys``
        float64[n]}); the arrays are not copied."""
        meta = {
            "sample_limit": self._limit.hex(),
            "sample_gap": self._gap.hex(),
            "sample_random": f"{int(self._random[0]):x}",
        }
        arrays: Arrays = {
            "sample_rows": self.rows(), "sample_ranks": self.source_ranks(), "sample_keys": self._keys[: self._count],
        }  # fmt: skip
        return meta, arrays

    def load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        """Replace everything by what ``state`` returned, of a sample of any capacity."""
        rows, ranks, keys = arrays["sample_rows"], arrays["sample_ranks"], arrays["sample_keys"]
        self._limit, self._gap = float.fromhex(meta["sample_limit"]), float.fromhex(meta["sample_gap"])
        self._random = np.array([int(meta["sample_random"], 16) % 2**64], dtype=np.uint64)
        if len(rows) > 2 * self.capacity:
            self._keep_best(rows, ranks, keys)
            return
        self._count = len(rows)
        for held, saved in ((self._rows, rows), (self._ranks, ranks), (self._keys, keys)):
            held[: self._count] = saved

    def _keep_best(self, rows: Int64Array, ranks: Int32Array, keys: Float64Array) -> None:
        kept = self.capacity
        best = np.sort(np.argpartition(keys, kept - 1)[:kept])
        for held, given in ((self._rows, rows), (self._ranks, ranks), (self._keys, keys)):
            held[:kept] = given[best]
        self._count = kept
        self._limit = float(self._keys[:kept].max())


def draw_accesses(
    rows: Int64Array, times: Int64Array, at_most: int, random: np.random.Generator
) -> tuple[Int64Array, float]:
    """Draw uniformly, without replacement, from accesses counted by row.

    The draw must be independent of other messages and of the order of the rows, because the affinity of a table is
    estimated from how often two sampled accesses of a row come from one node.

    Args:
        rows, times: int64[n], ``times`` accesses of each row.
        at_most: accesses to draw.

    Returns:
        (row of each drawn access, accesses that each drawn one represents).
    """
    ends = np.cumsum(times)
    accesses = int(ends[-1]) if len(ends) else 0
    if accesses <= at_most:
        return np.repeat(rows, times), 1.0
    places = random.choice(accesses, at_most, replace=False, shuffle=False)
    return rows[np.searchsorted(ends, places, side="right")], accesses / at_most


class TableSketch(ABC):
    """Counters of one table in units of ``2^exponent`` (``ForwardDecay``; the exponent is None before any access), and
    a sample of its accesses with their source ranks.

    Args:
        seed: of the sample.
    """

    # An access is counted with a weight of ``2^unit_bits`` to four times as many units.
    unit_bits: int
    # Least units of one access at which ``coarsen_if_crowded`` still makes the unit coarser.
    coarsest_units: int
    # Round the weight of an access up to whole units, instead of to nearest.
    rounds_up = False

    def __init__(self, spec: TableSpec, choice: TableChoice, seed: int) -> None:
        self.spec = spec
        self._sample = AccessSample(choice.sampled_accesses, seed)
        self.exponent: int | None = None
        # Accesses counted, undecayed.
        self.samples = 0

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
        # At most four accesses are offered to the sample for each one that it keeps.
        sampled, accesses_each = draw_accesses(rows, times, 4 * self._sample.capacity, random)
        self.coarsen_if_crowded(event_time_seconds, decay)
        log_weight = decay.log_weight(event_time_seconds) + math.log(accesses_each)
        self._sample.add(sampled, source_rank, log_weight, self.spec.rows)
        self.samples += int(times.sum())
        return outside

    def fit_unit(self, time: float, decay: ForwardDecay) -> None:
        """Choose the unit at the first access, and a coarser one once an access of this time weighs too many units."""
        exponent = decay.unit_exponent(time, self.unit_bits)
        if self.exponent is None:
            self.exponent = exponent
        # Counters are rescaled every two half-lives of event time.
        elif exponent >= self.exponent + 2:
            self.rescale(exponent - self.exponent)
            self.exponent = exponent

    def access_units(self, time: float, decay: ForwardDecay) -> int:
        """Return the weight of one access of this time in the present unit."""
        return 0 if self.exponent is None else decay.units(time, self.exponent, up=self.rounds_up)

    def coarsen_if_crowded(self, time: float, decay: ForwardDecay) -> None:
        """Make the unit coarser while too many counters exceed their word and present accesses stay precise."""
        if decay.half_life_seconds is None or self.exponent is None:
            return
        while self._crowded() and self.access_units(time, decay) >> COARSEN_BITS >= self.coarsest_units:
            self.rescale(COARSEN_BITS)
            self.exponent += COARSEN_BITS

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return a copy of everything: (JSON-able values, arrays)."""
        meta, arrays = self._state()
        sample_meta, sample = self._sample.state()
        copies = {name: array.copy() for name, array in {**arrays, **sample}.items()}
        return {"exponent": self.exponent, "samples": self.samples, **meta, **sample_meta}, copies

    def load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        """Replace everything by what ``state`` returned, of equal rows and choice; the arrays are taken over.

        Checksums and format number of the snapshot are checked before, and nothing is checked again.

        Raises:
            KeyError, TypeError, ValueError: fields are missing or malformed.
        """
        self._load(meta, arrays)
        self._sample.load(meta, arrays)
        self.exponent = None if meta["exponent"] is None else int(meta["exponent"])
        self.samples = int(meta["samples"])

    def profile(self, decay: ForwardDecay, max_hot_rows: int, layout: RankLayout | None = None) -> TableProfile:
        """Return the table's profile with ``accesses_per_step`` 0, and with its sources if a layout is given."""
        profile = self._read_profile(decay, max_hot_rows)
        if layout is None:
            return profile
        sources = read_sources(self._sample.rows(), self._sample.source_ranks(), profile.hot_rows, layout)
        return replace(profile, sources=sources)

    def query(self, rows: Int64Array, decay: ForwardDecay) -> Float64Array:
        """Return the decayed accesses of int64[n] rows of the table as float64[n]."""
        return self.row_units(rows).astype(np.float64) * self._unit_weight(decay)

    def _unit_weight(self, decay: ForwardDecay) -> float:
        return 0.0 if self.exponent is None else decay.unit_weight(self.exponent)

    def _empty_profile(self) -> TableProfile:
        none, no_rows = np.empty(0, dtype=np.float64), np.empty(0, dtype=np.int64)
        return TableProfile(self.spec.name, self.spec.rows, 0.0, 0.0, no_rows, none, none, none, 0.0)

    @abstractmethod
    def row_units(self, rows: Int64Array) -> Int64Array | Float64Array:
        """Return the units of int64[n] rows of the table as int64[n] or float64[n]."""

    @abstractmethod
    def rescale(self, bits: int) -> None:
        """Divide all counters by ``2^bits``; ``bits`` is 1 or more."""

    def _crowded(self) -> bool:
        return False

    @abstractmethod
    def _count(self, rows: RowArray, time: float, decay: ForwardDecay) -> tuple[int, int]:
        """Implement ``add`` for the counters, in the present unit."""

    @abstractmethod
    def _count_times(self, rows: Int64Array, times: Int64Array, units: int) -> None:
        """Add ``units`` to each row as often as ``times`` says; all rows are in the table, without repeats."""

    @abstractmethod
    def _read_profile(self, decay: ForwardDecay, max_hot_rows: int) -> TableProfile:
        """Implement ``profile`` without sources."""

    @abstractmethod
    def _state(self) -> tuple[dict[str, Any], Arrays]:
        """Implement ``state`` for the counters, without copies."""

    @abstractmethod
    def _load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        """Implement ``load`` for the counters."""


def readonly(values: Any) -> Any:
    """Return a read-only view: one compiled version of a loop serves arrays of both kinds."""
    view = values.view()
    view.flags.writeable = False
    return view
