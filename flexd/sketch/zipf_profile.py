"""The profile of a table whose look-ups follow Zipf's law, in closed form."""

from __future__ import annotations

import math

import numpy as np

from flexd.sketch.profile import TableProfile

TAIL_BINS = 256


def zipf_table(name: str, rows: int, exponent: float, listed: int, accesses_per_step: float, turn: int) -> TableProfile:
    """Share of the k-th most frequent row ~ k^-exponent; the first ``listed`` rows one by one, the rest in bins.

    The sum over a bin [m, n) is the integral of x^-s from m - 1/2 to n - 1/2 (midpoint rule, relative error at most
    s(s+1) / 24 m^2).
    Row ids are spread over the table by a stride that shares no factor with its rows; ``turn`` shifts them.
    """
    listed = min(listed, rows)
    frequency = np.arange(1, listed + 1, dtype=np.float64) ** -exponent
    edges = np.unique(np.geomspace(listed + 1, rows + 1, TAIL_BINS).astype(np.int64)) if listed < rows else np.empty(0)
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
        hot_lower=share,
        hot_upper=share,
        bin_share=summed / number / total if len(number) else np.empty(0),
        bin_rows=number if len(number) else np.empty(0),
        distinct_rows=float(rows),
        coverage=1.0,
    )
