"""The file of kernel measurements: sets of tables, and the seconds that their kernels took on one device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import TopologyError

Float64Array = npt.NDArray[np.float64]

FORMAT = 1
MAX_FILE_BYTES = 64 * 2**20
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_COLUMNS = ("rows", "dim", "ids", "bags", "skew", "distinct")
_TIMES = ("look_up_seconds", "update_seconds")


@dataclass(frozen=True)
class TableSet:
    """Tables that one rank looks up together, fused into as few kernels as the runtime can.

    Attributes:
        dtype: of the rows.
        rows, dim: float64[T], of each table.
        ids: float64[T], look-ups in one step.
        bags: float64[T], sums in one step.
        skew: float64[T], exponent of the Zipf law by which rows are drawn.
        distinct: float64[T], different rows among the ids.

    Raises:
        TopologyError: arrays of different lengths, no table, or a number that is negative or not finite.
    """

    dtype: str
    rows: Float64Array
    dim: Float64Array
    ids: Float64Array
    bags: Float64Array
    skew: Float64Array
    distinct: Float64Array

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise TopologyError(f"tables of dtype {self.dtype!r}", remedy=f"one of {', '.join(DTYPE_BYTES)}")
        for name in _COLUMNS:
            column = getattr(self, name)
            if column.ndim != 1 or len(column) != len(self.rows) or len(column) == 0:
                raise TopologyError(f"{name} of a set of tables has shape {column.shape}", remedy="one number a table")
            if not (np.isfinite(column).all() and (column >= 0).all()):
                raise TopologyError(f"{name} of a set of tables: {column}", remedy="give numbers from 0 on")

    @property
    def row_bytes(self) -> Float64Array:
        """float64[T]: bytes of a row."""
        size: Float64Array = self.dim * DTYPE_BYTES[self.dtype]
        return size


@dataclass(frozen=True)
class KernelMeasurements:
    """Measured sets of tables.

    Attributes:
        kernels: whose they are.
        device: that ran them, as torch names it.
        source: conditions of the run, in words.
        sets: C measured sets.
        look_up_seconds: float64[C], with pooling.
        update_seconds: float64[C].
    """

    kernels: str
    device: str
    source: str
    sets: tuple[TableSet, ...]
    look_up_seconds: Float64Array
    update_seconds: Float64Array = field(repr=False)

    def __post_init__(self) -> None:
        for name in _TIMES:
            times = getattr(self, name)
            if times.shape != (len(self.sets),) or not (np.isfinite(times).all() and (times >= 0).all()):
                raise TopologyError(f"{name} of {len(self.sets)} sets of tables: not as many seconds", remedy="probe")


def write_kernels(measured: KernelMeasurements, path: Path) -> None:
    """Write a file that ``read_kernels`` reads back as equal measurements. Raises TopologyError if that fails."""
    times = {name: getattr(measured, name) for name in _TIMES}
    sets = [
        {"dtype": one.dtype}
        | {name: _numbers(getattr(one, name)) for name in _COLUMNS}
        | {name: float(values[at]) for name, values in times.items()}
        for at, one in enumerate(measured.sets)
    ]
    document = {
        "format": FORMAT,
        "kernels": measured.kernels,
        "device": measured.device,
        "source": measured.source,
        "sets": sets,
    }
    try:
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"{path}: cannot be written: {error}", remedy="give a writable path") from error


def read_kernels(path: Path) -> KernelMeasurements:
    """Read a file of ``flexd probe --kernels``.

    Raises:
        TopologyError: it cannot be read, is of a newer format, or an entry is not valid; names the file and the set.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TopologyError(f"{path}: larger than {MAX_FILE_BYTES} bytes", remedy="give a file of probe --kernels")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TopologyError(f"{path}: cannot be read: {error}", remedy="give a file of probe --kernels") from error
    if not isinstance(document, dict) or not isinstance(document.get("sets"), list):
        raise TopologyError(f"{path}: no kernel measurements", remedy="give a file of probe --kernels")
    if document.get("format") != FORMAT:
        raise TopologyError(
            f"{path}: format {document.get('format')!r}, this flexd reads {FORMAT}", remedy="measure with this flexd"
        )
    sets: list[TableSet] = []
    times: list[list[float]] = []
    for number, entry in enumerate(document["sets"]):
        try:
            sets.append(_table_set(entry))
            times.append([float(entry[name]) for name in _TIMES])
        except (TypeError, ValueError, KeyError, AttributeError, TopologyError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise TopologyError(f"{path}, set {number}: {what}", remedy="measure again") from error
    columns = np.array(times).reshape(-1, len(_TIMES)).T
    names = [str(document.get(name, "")) for name in ("kernels", "device", "source")]
    return KernelMeasurements(names[0], names[1], names[2], tuple(sets), columns[0], columns[1])


def _table_set(entry: Mapping[str, Any]) -> TableSet:
    columns = [np.array(entry[name], dtype=np.float64) for name in _COLUMNS]
    return TableSet(str(entry["dtype"]), *columns)


def _numbers(values: Float64Array) -> Sequence[float]:
    return [int(value) if value == int(value) else round(float(value), 6) for value in values]
