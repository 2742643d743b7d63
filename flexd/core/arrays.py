"""Types of numpy arrays, by their elements; runs of equal values and of places; files of arrays. Docstrings state
shapes: int64[n]."""

import zipfile
import zlib
from pathlib import Path
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
# By name.
Arrays = dict[str, npt.NDArray[Any]]


def first_of_run(ordered: npt.NDArray[Any]) -> BoolArray:
    """Return bool[n]: which of ordered values differ from the one before, the first one included."""
    first = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return first


def matches(ordered: Int64Array, wanted: npt.NDArray[np.integer[Any]]) -> tuple[Int64Array, Int64Array]:
    """Return int64[m] twice: places of the wanted values that are among ascending ones, and their places there."""
    if not len(ordered):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    found = np.flatnonzero(ordered[at] == wanted)
    return found, at[found]


def places_of_runs(first: Int64Array | int, lengths: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Return int64[sum of lengths]: first, first + 1, ... of each run, one run behind another."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.repeat(first - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def read_arrays(path: str | Path) -> Arrays:
    """Read all arrays of an ``.npz`` file.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no such file, damaged, or holds Python objects.
    """
    with Path(path).open("rb") as opened:
        if not zipfile.is_zipfile(opened):  # numpy's error would advise to allow pickles
            raise ValueError("no .npz archive")
        opened.seek(0)
        try:
            file = np.load(opened, allow_pickle=False)
            return {name: file[name] for name in file.files}
        except (EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            raise ValueError(f"damaged: {error}") from error
