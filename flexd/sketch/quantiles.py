"""Quantiles of sequence lengths and of access frequencies: Apache DataSketches KLL, always fed in bulk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasketches
import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError

Float64Array = npt.NDArray[np.float64]

KLL_K = 400
"""Normalised rank error 0.65 % (99 % confidence) in about 5 kB."""


class KllQuantiles:
    """KLL sketch of float32 values (Karnin, Lang and Liberty, *Optimal quantile approximation in streams*, 2016).

    Its compactions are random (the library offers no seed), so two runs over one stream agree within ``rank_error``
    and not bit by bit; a saved sketch comes back bit by bit.
    """

    def __init__(self) -> None:
        self._sketch = datasketches.kll_floats_sketch(KLL_K)

    @property
    def count(self) -> int:
        """Values seen."""
        return int(self._sketch.n)

    @property
    def rank_error(self) -> float:
        """Of a quantile, as a share of the values, at 99 % confidence."""
        return float(self._sketch.normalized_rank_error(False))

    def add(self, values: npt.NDArray[Any]) -> None:
        """Values of any real dtype, [n]."""
        # Only a one-dimensional float32 array takes the bulk path; anything else would be one item, or an error.
        if values.ndim != 1 or values.dtype.kind not in "iuf":
            raise SketchError(f"quantiles of {values.dtype}{list(values.shape)}", remedy="give a vector of numbers")
        if len(values):
            self._sketch.update(np.ascontiguousarray(values, dtype=np.float32))

    def quantiles(self, ranks: Sequence[float]) -> Float64Array:
        """float64[len(ranks)]: values at normalised ranks 0-1; empty if nothing was seen."""
        if self._sketch.is_empty():
            return np.empty(0, dtype=np.float64)
        return np.array(self._sketch.get_quantiles(list(ranks), True), dtype=np.float64)

    def merge(self, other: KllQuantiles) -> None:
        self._sketch.merge(other._sketch)

    def serialized(self) -> npt.NDArray[np.uint8]:
        """The sketch in the DataSketches format, which other tools read: uint8[bytes]."""
        return np.frombuffer(self._sketch.serialize(), dtype=np.uint8).copy()

    def load(self, image: npt.NDArray[Any]) -> None:
        """Takes over a serialised sketch. Raises SketchError if it is none."""
        try:
            self._sketch = datasketches.kll_floats_sketch.deserialize(image.astype(np.uint8, copy=False).tobytes())
        except (RuntimeError, ValueError, TypeError, IndexError, MemoryError) as error:
            raise SketchError(f"saved KLL sketch is damaged: {error}", remedy="start from empty counters") from error
