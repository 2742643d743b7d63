"""Convert the counters of a table to another kind, size, number of rows or half-life.

What is kept: the present weight of every row, as far as the new counters can hold it. A conversion is made only where
the new counters keep their promise: exact and logarithmic counters stay right on average, and a count-min is never too
low. So a count-min, whose estimates are too high by an unknown part, becomes no other kind, and logarithmic counters,
which may be too low, become no count-min.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.keyspace import TableSpec
from flexd.sketch.budget import TableChoice
from flexd.sketch.count_min_table import CountMinTable
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.dense_table import DenseTable
from flexd.sketch.logarithmic_table import LogTable
from flexd.sketch.table_sketch import TableSketch

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

BLOCK_ROWS = 2**20
_MOST_UNITS = 2.0**60
_SAMPLED_ROWS = 2**20
"""Rows whose counts decide the step of logarithmic counters."""

_POSSIBLE = {
    ("dense", "dense"), ("dense", "logarithmic"), ("dense", "count_min"), ("logarithmic", "dense"),
    ("logarithmic", "logarithmic"), ("count_min", "count_min"),
}  # fmt: skip


@dataclass(frozen=True)
class Clocks:
    """The clock of the saved counters and that of the new ones, both at the same newest event time."""

    saved: ForwardDecay
    new: ForwardDecay

    @property
    def same(self) -> bool:
        return self.saved.half_life_seconds == self.new.half_life_seconds

    def restated(self, exponent: int, old: TableSketch, new: TableSketch) -> tuple[int, float]:
        """Return (exponent of the new counters, new units for one old unit), so that present weights are equal."""
        newest = self.saved.newest_seconds
        canonical = self.new.unit_exponent(newest, new.unit_bits)
        if self.same:
            if old.unit_bits == new.unit_bits or canonical <= exponent:
                return exponent, 1.0
            return canonical, math.ldexp(1.0, max(-1000, exponent - canonical))
        weight = self.saved.unit_weight(exponent)
        return canonical, weight / self.new.unit_weight(canonical)

    def log_weight_change(self) -> float:
        """Return what is added to the logarithm of a forward weight, so that the present weight stays."""
        newest = self.saved.newest_seconds
        return self.new.log_weight(newest) - self.saved.log_weight(newest)


def changes(
    old: TableSpec, old_choice: TableChoice, new: TableSpec, new_choice: TableChoice, same_half_life: bool
) -> list[str]:
    """Return in words what differs for the counters of a table; empty if they can be loaded as they are."""
    found = []
    if old.rows != new.rows:
        found.append(f"{old.rows} rows to {new.rows}")
    if _shape(old_choice) != _shape(new_choice):
        found.append(f"{_words(old_choice)} to {_words(new_choice)}")
    if not same_half_life:
        found.append("half-life")
    if old_choice.sampled_accesses != new_choice.sampled_accesses:
        found.append("sample")
    if new_choice.kind == "count_min" == old_choice.kind and old_choice.hot_rows != new_choice.hot_rows:
        found.append("hot set")
    return found


def obstacle(old: TableSpec, old_choice: TableChoice, new: TableSpec, new_choice: TableChoice) -> str | None:
    """Return why the counters cannot be converted; None if they can."""
    if (old_choice.kind, new_choice.kind) not in _POSSIBLE:
        return f"{_words(old_choice)} counters cannot become {_words(new_choice)} ones"
    if old_choice.kind == "count_min" and new.rows < old.rows:
        return f"a count-min of {old.rows} rows cannot leave out rows (now {new.rows})"
    return None


def convert(old: TableSketch, new: TableSketch, clocks: Clocks, seed: int) -> None:
    """Fill empty counters from saved ones; ``obstacle`` must be None. The saved ones are changed and must not be used.

    Args:
        seed: of the random rounding, where there is one.
    """
    if old.exponent is None:
        return
    kept_share = 1.0
    exponent, factor = clocks.restated(old.exponent, old, new)
    new.exponent = exponent
    if isinstance(old, CountMinTable) and isinstance(new, CountMinTable):
        new.fill_from(old, factor)
    else:
        assert isinstance(old, DenseTable | LogTable)  # noqa: S101
        kept_share = _kept_share(old, new.spec.rows)
        access_units = new.access_units(clocks.new.newest_seconds, clocks.new)
        _fill(old, new, factor, kept_share, access_units, seed)
    new.fill_sample_from(old, clocks.log_weight_change())
    new.samples = round(old.samples * kept_share)
    if not math.isnan(clocks.new.newest_seconds):
        new.coarsen_if_crowded(clocks.new.newest_seconds, clocks.new)


def _fill(
    old: DenseTable | LogTable, new: TableSketch, factor: float, kept_share: float, access_units: int, seed: int
) -> None:
    rows = min(old.spec.rows, new.spec.rows)
    if isinstance(new, LogTable):
        total = round(old.total_units * kept_share * factor)
        new.begin_fill(_step(old, new, factor, access_units), total)
        # Counters of as many bits keep their levels, and so the units beyond the top one stay in the total.
        for block, units in _blocks(old, rows, spread=not (isinstance(old, LogTable) and old.bits == new.bits)):
            new.add_row_units(block, units * factor)
        return
    assert isinstance(new, DenseTable | CountMinTable)  # noqa: S101
    random = np.random.default_rng(seed)
    for block, units in _blocks(old, rows, spread=True):
        scaled = np.minimum(units * factor, _MOST_UNITS)
        if isinstance(new, CountMinTable):
            whole = np.ceil(scaled)
        elif factor == 1.0 and isinstance(old, DenseTable):
            whole = scaled
        else:
            # At random, so that the mean stays: without decay a unit is an access, and a tail of half accesses counts.
            whole = np.floor(scaled)
            whole += random.random(len(scaled)) < scaled - whole
        kept = whole > 0
        new.add_row_units(block[kept], whole[kept].astype(np.int64))


def _blocks(old: DenseTable | LogTable, rows: int, spread: bool) -> Iterator[tuple[Int64Array, Float64Array]]:
    """Yield (rows, units) of the rows that have units.

    Args:
        spread: logarithmic counters: with the units beyond the top level.
    """
    for start in range(0, rows, BLOCK_ROWS):
        block = np.arange(start, min(start + BLOCK_ROWS, rows), dtype=np.int64)
        units = old.row_units(block) if spread or isinstance(old, DenseTable) else old.level_units(block)
        used = np.flatnonzero(units > 0)
        yield block[used], units[used]


def _kept_share(old: DenseTable | LogTable, rows: int) -> float:
    """Return the share of the units that rows below ``rows`` have: estimated for logarithmic counters."""
    if rows >= old.spec.rows:
        return 1.0
    kept = total = 0.0
    for block, units in _blocks(old, old.spec.rows, spread=True):
        total += float(units.sum())
        kept += float(units[block < rows].sum())
    return kept / total if total else 1.0


def _step(old: DenseTable | LogTable, new: LogTable, factor: float, access_units: int) -> float:
    """Return the step of new logarithmic counters: as fine as the top level allows, and not below one access."""
    if isinstance(old, LogTable) and old.bits == new.bits:
        return old.step * factor
    rows = min(old.spec.rows, new.spec.rows)
    stride = max(1, rows // _SAMPLED_ROWS)
    units = old.row_units(np.arange(0, rows, stride, dtype=np.int64)) * factor
    crowded = float(np.quantile(units, 1 - new.top_share / 2)) if len(units) else 0.0
    return max(float(access_units), crowded / new.top_value, 1e-300)


def _shape(choice: TableChoice) -> tuple[str, int, int]:
    return choice.kind, choice.counter_bits, choice.log2_width


def _words(choice: TableChoice) -> str:
    if choice.kind == "logarithmic":
        return f"logarithmic ({choice.counter_bits} bits)"
    return "dense" if choice.kind == "dense" else f"count-min (2^{choice.log2_width})"
