"""Types of numpy arrays, by their elements. Docstrings state shapes: int64[n], float64[groups, ranks]."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]
RowArray = Int32Array | Int64Array
Arrays = dict[str, npt.NDArray[Any]]
"""By name."""
