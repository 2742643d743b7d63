"""Quantiles of sequence lengths and access frequencies: Apache DataSketches KLL, updated in bulk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasketches
import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError

Float64Array = npt.NDArray[np.float64]

KLL_K = 400
"""Gives a normalised rank error of 0.65 % (99 % confidence) in about 5 kB."""
MAX_COUNTED_VALUES = 2**18
"""Most values of one histogram that are added one by one; of more, as many at evenly spread ranks are: an error of at
most 2^-18 in rank, a thousandth of the sketch's own."""


def check_values(values: npt.NDArray[Any]) -> None:
    """Raise SketchError unless ``values`` is a vector of numbers.

    Only a one-dimensional float32 array takes the library's bulk path; anything else would be one item, or an error.
    """
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise SketchError(f"quantiles of {values.dtype}{list(values.shape)}", remedy="give a vector of numbers")


class KllQuantiles:
    """KLL sketch of float32 values (Karnin, Lang and Liberty, *Optimal quantile approximation in streams*, 2016).

    Compactions are random (the library offers no seed), so two runs over one stream agree within the error of
    ``KLL_K`` and not bit by bit; a saved sketch is restored bit by bit.
    """

    def __init__(self) -> None:
        self._sketch = datasketches.kll_floats_sketch(KLL_K)

    @property
    def count(self) -> int:
        """Number of values added."""
        return int(self._sketch.n)

    def add(self, values: npt.NDArray[Any]) -> None:
        """Add [n] values of any real dtype."""
        check_values(values)
        if len(values):
            self._sketch.update(np.ascontiguousarray(values, dtype=np.float32))

    def add_counted(self, values: npt.NDArray[np.int64], times: npt.NDArray[np.int64]) -> None:
        """Add a histogram: int64[m] ascending values and how many times each occurs."""
        total = int(times.sum())
        if not total:
            return
        if total <= MAX_COUNTED_VALUES:
            self.add(np.repeat(values, times))
        else:
            places = (np.arange(MAX_COUNTED_VALUES) + 0.5) * (total / MAX_COUNTED_VALUES)
            self.add(values[np.searchsorted(np.cumsum(times), places, side="right")])

    def quantiles(self, ranks: Sequence[float]) -> Float64Array:
        """Return the values at normalised ranks 0-1 as float64[len(ranks)]; empty if nothing was added."""
        if self._sketch.is_empty():
            return np.empty(0, dtype=np.float64)
        return np.array(self._sketch.get_quantiles(list(ranks), True), dtype=np.float64)

    def serialized(self) -> npt.NDArray[np.uint8]:
        """Return the sketch in the DataSketches format, uint8[bytes]."""
        return np.frombuffer(self._sketch.serialize(), dtype=np.uint8).copy()

    def load(self, image: npt.NDArray[Any]) -> None:
        """Replace the sketch by a serialised one.

        Raises:
            SketchError: it is damaged.
        """
        try:
            self._sketch = datasketches.kll_floats_sketch.deserialize(image.astype(np.uint8, copy=False).tobytes())
        except (RuntimeError, ValueError, TypeError, IndexError, MemoryError) as error:
            raise SketchError(f"saved KLL sketch is damaged: {error}", remedy="start from empty counters") from error
