"""Estimate of distinct rows: HyperLogLog registers, filled in the same pass as the count-min cells.

The DataSketches binding updates its HLL one item a call (about 5 M/s); these registers are filled in bulk by
``flexd.sketch.counters.countmin`` at no measurable extra cost, so no sampling is needed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError

UInt8Array = npt.NDArray[np.uint8]

LOG2_REGISTERS = 12
RELATIVE_STANDARD_ERROR = 1.04 / math.sqrt(2**LOG2_REGISTERS)
"""1.6 % (Flajolet et al. 2007)."""
_HASH_BITS = 62
"""Bits examined for leading zeros: a register holds 0 to 63, as in DataSketches."""


class DistinctRows:
    """HyperLogLog with Ertl's improved estimator (*New cardinality estimation algorithms for HyperLogLog sketches*,
    arXiv 1702.01284, algorithm 6): unbiased from zero up, without the empirical tables of HLL++.

    ``registers`` is uint8[4096], updated in place by ``CountMin.add``.
    """

    def __init__(self) -> None:
        self.registers: UInt8Array = np.zeros(2**LOG2_REGISTERS, dtype=np.uint8)

    def estimate(self) -> float:
        """Return the estimate of distinct rows, with relative standard error ``RELATIVE_STANDARD_ERROR``."""
        m = len(self.registers)
        counts = np.bincount(self.registers, minlength=_HASH_BITS + 2).tolist()
        if counts[0] == m:
            return 0.0
        z = m * _tau(1 - counts[_HASH_BITS + 1] / m)
        for k in range(_HASH_BITS, 0, -1):
            z = 0.5 * (z + counts[k])
        z += m * _sigma(counts[0] / m)
        return m * m / (2 * math.log(2)) / z

    def load(self, registers: npt.NDArray[Any]) -> None:
        """Replace the registers by saved ones.

        Raises:
            SketchError: they do not fit or are damaged.
        """
        fits = registers.dtype == np.uint8 and registers.shape == self.registers.shape
        if not fits or int(registers.max()) > _HASH_BITS + 1:
            raise SketchError("saved HyperLogLog registers are damaged", remedy="start from empty counters")
        self.registers = registers.copy()


def _sigma(x: float) -> float:
    """Return the sum over k of x^(2^k) 2^(k-1), plus x (Ertl, equation 20)."""
    if x == 1:
        return math.inf
    y, z = 1.0, x
    while True:
        x *= x
        before = z
        z += x * y
        y += y
        if z == before:
            return z


def _tau(x: float) -> float:
    """Return tau(x) of Ertl, equation 25."""
    if x in (0, 1):
        return 0.0
    y, z = 1.0, 1 - x
    while True:
        x = math.sqrt(x)
        before = z
        y *= 0.5
        z -= (1 - x) ** 2 * y
        if z == before:
            return z / 3
