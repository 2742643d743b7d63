"""Saves profiles as ``.npz`` files, as input of a replay."""

from __future__ import annotations

import dataclasses
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.sketch.profile import Profile, RowTouches, TableProfile

FORMAT = 2
_HOT = ("hot_rows", "hot_share", "hot_lower", "hot_upper")
_ARRAYS = (*_HOT, "bin_share", "bin_rows")
_TOUCHES = ("per_rank", "per_node", "anywhere")


def write_profile(profile: Profile, path: Path) -> None:
    """Write everything but the source nodes: JSON values in array ``json``, arrays of a table as ``index/name``.

    Raises:
        SketchError: the file cannot be written.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    tables = []
    for index, table in enumerate(profile.tables):
        arrays |= {f"{index}/{name}": getattr(table, name) for name in _ARRAYS}
        scalars = _scalars(table, (*_ARRAYS, "sources", "touches"))
        if table.touches is not None:
            arrays |= {f"{index}/{name}": getattr(table.touches, name) for name in _TOUCHES}
            scalars["touches"] = _scalars(table.touches, _TOUCHES)
        tables.append(scalars)
    document = {"format": FORMAT, "profile": _scalars(profile, ("tables",)), "tables": tables}
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, json=np.array(json.dumps(document)), **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise SketchError(f"profile {path}: cannot be written: {error}", remedy="give a writable path") from error


def _scalars(of: Any, without: tuple[str, ...]) -> dict[str, Any]:
    return {
        field.name: getattr(of, field.name) for field in dataclasses.fields(of) if field.name not in without
    }  # fmt: skip


def read_profile(path: Path) -> Profile:
    """Read a file of ``write_profile``.

    Raises:
        SketchError: the file cannot be read, is of another format, or its arrays do not fit each other.
    """
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("one array alone, no .npz")
            arrays = {name: file[name] for name in file.files}
        document = json.loads(str(arrays["json"]))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, this flexd reads {FORMAT}")
        tables = tuple(_table(index, scalars, arrays) for index, scalars in enumerate(document["tables"]))
        if not tables:
            raise ValueError("it has no tables")
        return Profile(tables, **document["profile"])
    except (
        OSError, EOFError, KeyError, IndexError, TypeError, ValueError, AttributeError, zipfile.BadZipFile, zlib.error,
        NotImplementedError, RecursionError, SketchError,
    ) as error:  # fmt: skip
        raise SketchError(f"profile {path}: {error}", remedy="give a file that `--save-profile` wrote") from error


def _table(index: int, scalars: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> TableProfile:
    def vector(name: str, kind: type, most: float) -> npt.NDArray[Any]:
        array = arrays[f"{index}/{name}"]
        if array.ndim != 1 or array.dtype != kind or not ((array >= 0) & (array <= most) | np.isnan(array)).all():
            raise ValueError(f"table {index}: array {name} has values out of range, or is none of {kind.__name__}")
        return array

    touches = scalars.pop("touches", None)
    if touches is not None:
        shares: dict[str, Any] = {name: vector(name, np.float64, 1.0) for name in _TOUCHES}
        touches = RowTouches(**touches, **shares)
    rows = int(scalars["rows"])
    columns: dict[str, Any] = {name: vector(name, np.float64, np.inf) for name in _ARRAYS if name != "hot_rows"}
    if not all(np.isfinite(column).all() for column in columns.values()):
        raise ValueError(f"table {index}: a share is not finite")
    made = TableProfile(**scalars, **columns, hot_rows=vector("hot_rows", np.int64, rows - 1), touches=touches)
    numbers = (made.weight, made.accesses_per_step, made.distinct_rows, made.coverage)
    if not all(0 <= number < np.inf for number in numbers):
        raise ValueError(f"table {made.table!r}: a number is negative or not finite")
    return made
