"""The planner's input: per table the access rate, the frequency curve and the hot rows with error bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array
from flexd.sketch.node_sources import TableSources

_ZIPF_BINS = 256


@dataclass(frozen=True)
class RowTouches:
    """Measured touches of a table's listed rows: means a forward pass, NaN where unknown.

    Attributes:
        nodes, local_ranks: the layout under which they were measured.
        per_rank: float64[h], share of the ranks that look the row up (u).
        per_node: float64[h], share of the nodes of which any rank does (v).
        anywhere: float64[h], share of the passes in which any rank does (w).
        accesses: mean look-ups of the table by a rank in the batches that were counted; None if they are those of
            the profile.
    """

    nodes: int
    local_ranks: int
    per_rank: Float64Array
    per_node: Float64Array
    anywhere: Float64Array
    accesses: float | None = None


@dataclass(frozen=True)
class TableProfile:
    """The accesses of one table as shares of the table's own accesses.

    Attributes:
        table: name.
        rows: rows of the table.
        weight: decayed accesses counted (the sum over rows); 0 means that the stream has not touched the table.
        accesses_per_step: expected accesses of the whole job (all ranks) to this table in one training step.
        hot_rows: int64[h], individually listed row ids, most frequent first.
        hot_share: float64[h], estimated share of the table's accesses (``estimate / weight``).
        bin_share: float64[k], share of one row in each frequency bin of the other rows.
        bin_rows: float64[k], rows in each bin (fractional where a sketch estimates the curve).
        distinct_rows: rows with at least one access (estimate).
        hot_bounds: (float64[h], float64[h]), bounds on ``hot_share``; None for exact counters.
        sources: source nodes of the accesses, or None if the layout was not known.
        touches: measured touches of the hot rows, or None if none were measured.
    """

    table: str
    rows: int
    weight: float
    accesses_per_step: float
    hot_rows: Int64Array
    hot_share: Float64Array
    bin_share: Float64Array
    bin_rows: Float64Array
    distinct_rows: float
    hot_bounds: tuple[Float64Array, Float64Array] | None = None
    sources: TableSources | None = None
    touches: RowTouches | None = None

    @property
    def hot_lower(self) -> Float64Array:
        """Lower bounds on ``hot_share``."""
        return self.hot_share if self.hot_bounds is None else self.hot_bounds[0]

    @property
    def hot_upper(self) -> Float64Array:
        """Upper bounds on ``hot_share``."""
        return self.hot_share if self.hot_bounds is None else self.hot_bounds[1]

    @property
    def coverage(self) -> float:
        """Share of ``weight`` that hot rows and bins together explain, 0-1."""
        # Rounded, because shares add up to 1 only nearly.
        return round(min(1.0, float(self.hot_share.sum() + self.bin_share @ self.bin_rows)), 9)


@dataclass(frozen=True)
class Profile:
    """All tables at one moment.

    Attributes:
        tables: one entry per table, in the order of the key space.
        generation: number of the profile, increasing across restarts of the daemon.
        event_time_seconds: newest event time (Unix seconds), NaN before the first access.
        half_life_seconds: of the decay; inf without decay.
        lag_messages: stream messages not yet read when the profile was made.
        samples: accesses counted, undecayed.
    """

    tables: tuple[TableProfile, ...]
    generation: int = 0
    event_time_seconds: float = float("nan")
    half_life_seconds: float = float("inf")
    lag_messages: int = 0
    samples: int = 0


def zipf_table(name: str, rows: int, exponent: float, listed: int, accesses_per_step: float, turn: int) -> TableProfile:
    """Return the profile of a table whose look-ups follow Zipf's law, in closed form.

    The share of the k-th most frequent row is proportional to k^-exponent. The first ``listed`` rows are listed one by
    one, the rest is in bins.

    The sum over a bin [m, n) is the integral of x^-s from m - 1/2 to n - 1/2 (midpoint rule, relative error at most
    s(s+1) / 24 m^2).
    Row ids are spread over the table by a stride that shares no factor with its rows; ``turn`` shifts them.
    """
    listed = min(listed, rows)
    frequency = np.arange(1, listed + 1, dtype=np.float64) ** -exponent
    edges = np.unique(np.geomspace(listed + 1, rows + 1, _ZIPF_BINS).astype(np.int64)) if listed < rows else np.empty(0)
    low, high = edges[:-1] - 0.5, edges[1:] - 0.5
    power = 1.0 - exponent
    summed = np.log(high / low) if abs(power) < 1e-9 else (high**power - low**power) / power
    number = high - low
    total = float(frequency.sum() + summed.sum())
    stride = max(int(rows * 0.6180339887), 1)
    while math.gcd(stride, rows) != 1:
        stride += 1
    share = frequency / total
    return TableProfile(
        table=name,
        rows=rows,
        weight=1e9,
        accesses_per_step=accesses_per_step,
        hot_rows=(np.arange(listed, dtype=np.int64) * stride + turn) % rows,
        hot_share=share,
        bin_share=summed / number / total if len(number) else np.empty(0),
        bin_rows=number if len(number) else np.empty(0),
        distinct_rows=float(rows),
    )
