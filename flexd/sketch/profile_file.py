"""Saves profiles as ``.npz`` files, as input of a replay."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.sketch.profile import Profile, RowTouches, TableProfile

FORMAT = 1
_SCALARS = ("weight", "accesses_per_step", "distinct_rows", "coverage")
_HOT = ("hot_rows", "hot_share", "hot_lower", "hot_upper")
_BINS = ("bin_share", "bin_rows")
_TOUCHES = ("touch_per_rank", "touch_per_node", "touch_anywhere")
"""Optional, by hot row; NaN where unknown. ``touch_layout`` has nodes and local ranks of each table, 0 for none."""
_TOUCH_ACCESSES = "touch_accesses"
"""Optional, by table: ``RowTouches.accesses``, NaN for None."""
_SPANS = ("window_seconds", "event_time_seconds", "half_life_seconds")


def write_profile(profile: Profile, path: Path) -> None:
    """Write everything but the source nodes.

    Raises:
        SketchError: the file cannot be written.
    """
    tables = profile.tables
    arrays: dict[str, npt.NDArray[Any]] = {
        "format": np.array([FORMAT]),
        "tables": np.array([table.table for table in tables]),
        "rows": np.array([table.rows for table in tables], dtype=np.int64),
        "hot": np.array([len(table.hot_rows) for table in tables], dtype=np.int64),
        "bins": np.array([len(table.bin_rows) for table in tables], dtype=np.int64),
        "counts": np.array([profile.generation, profile.lag_messages, profile.samples], dtype=np.int64),
        "spans": np.array([getattr(profile, name) for name in _SPANS], dtype=np.float64),
    }
    arrays |= {name: np.array([getattr(table, name) for table in tables], dtype=np.float64) for name in _SCALARS}
    arrays |= {name: np.concatenate([getattr(table, name) for table in tables]) for name in (*_HOT, *_BINS)}
    if any(table.touches is not None for table in tables):
        arrays |= _touch_arrays(tables)
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise SketchError(f"profile {path}: cannot be written: {error}", remedy="give a writable path") from error


def _touch_arrays(tables: tuple[TableProfile, ...]) -> dict[str, npt.NDArray[Any]]:
    known = [table.touches or RowTouches(1, 1, *np.full((3, len(table.hot_rows)), np.nan)) for table in tables]
    columns = ("per_rank", "per_node", "anywhere")
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.concatenate([getattr(touches, column) for touches in known])
        for name, column in zip(_TOUCHES, columns, strict=True)
    }
    arrays[_TOUCH_ACCESSES] = np.array([math.nan if each.accesses is None else each.accesses for each in known])
    arrays["touch_layout"] = np.array(
        [(0, 0) if table.touches is None else (table.touches.nodes, table.touches.local_ranks) for table in tables],
        dtype=np.int64,
    ).reshape(len(tables), 2)
    return arrays


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
        if "format" not in arrays:
            raise ValueError("no array 'format', no profile")
        if int(arrays["format"][0]) != FORMAT:
            raise ValueError(f"format {int(arrays['format'][0])}, this flexd reads {FORMAT}")
        return _profile(arrays)
    except (
        OSError, EOFError, KeyError, IndexError, TypeError, ValueError, zipfile.BadZipFile, zlib.error,
        NotImplementedError,
    ) as error:  # fmt: skip
        raise SketchError(f"profile {path}: {error}", remedy="give a file that `--save-profile` wrote") from error


def _profile(arrays: dict[str, npt.NDArray[Any]]) -> Profile:
    names = [str(name) for name in arrays["tables"]]
    ends = {kind: np.cumsum(arrays[kind]) for kind in ("hot", "bins")}
    for kind, columns in (("hot", _HOT), ("bins", _BINS)):
        total = int(ends[kind][-1]) if len(names) else 0
        if min(arrays[kind].min(initial=0), 0) < 0 or any(arrays[column].shape != (total,) for column in columns):
            raise ValueError(f"its arrays of {kind} differ in length")
    if any(arrays[name].shape != (len(names),) for name in ("rows", "hot", "bins", *_SCALARS)) or not names:
        raise ValueError("its arrays of tables differ in length")
    if any(arrays[name].dtype.kind != "i" for name in ("rows", "hot", "bins", "hot_rows", "counts")):
        raise ValueError("a count is no integer")
    finite = (*_SCALARS, *_HOT, *_BINS)
    if not all(np.isfinite(arrays[name]).all() and (arrays[name] >= 0).all() for name in finite):
        raise ValueError("a number is negative or not finite")
    layouts = _touch_layouts(arrays, len(names), len(arrays["hot_rows"]))
    made = []
    for index, name in enumerate(names):
        hot = slice(int(ends["hot"][index] - arrays["hot"][index]), int(ends["hot"][index]))
        bins = slice(int(ends["bins"][index] - arrays["bins"][index]), int(ends["bins"][index]))
        if (arrays["hot_rows"][hot] >= arrays["rows"][index]).any():
            raise ValueError(f"a listed row lies outside table {name!r}")
        made.append(
            TableProfile(
                table=name,
                rows=int(arrays["rows"][index]),
                weight=float(arrays["weight"][index]),
                accesses_per_step=float(arrays["accesses_per_step"][index]),
                hot_rows=arrays["hot_rows"][hot].astype(np.int64),
                hot_share=arrays["hot_share"][hot],
                hot_lower=arrays["hot_lower"][hot],
                hot_upper=arrays["hot_upper"][hot],
                bin_share=arrays["bin_share"][bins],
                bin_rows=arrays["bin_rows"][bins],
                distinct_rows=float(arrays["distinct_rows"][index]),
                coverage=float(arrays["coverage"][index]),
                touches=None
                if layouts is None or not layouts[index].all()
                else RowTouches(
                    int(layouts[index][0]),
                    int(layouts[index][1]),
                    arrays[_TOUCHES[0]][hot],
                    arrays[_TOUCHES[1]][hot],
                    arrays[_TOUCHES[2]][hot],
                    _touch_accesses(arrays, index),
                ),
            )
        )
    generation, lag, samples = (int(count) for count in arrays["counts"])
    window, event_time, half_life = (float(span) for span in arrays["spans"])
    return Profile(tuple(made), generation, window, event_time, half_life, lag, samples)


def _touch_accesses(arrays: dict[str, npt.NDArray[Any]], index: int) -> float | None:
    accesses = float(arrays[_TOUCH_ACCESSES][index]) if _TOUCH_ACCESSES in arrays else math.nan
    return accesses if math.isfinite(accesses) and accesses >= 0 else None


def _touch_layouts(arrays: dict[str, npt.NDArray[Any]], tables: int, hot: int) -> npt.NDArray[np.int64] | None:
    """Return int64[tables, 2] of the layouts; None for a file without touches."""
    if "touch_layout" not in arrays:
        return None
    layouts = arrays["touch_layout"]
    if layouts.shape != (tables, 2) or layouts.dtype.kind != "i" or (layouts < 0).any():
        raise ValueError("the layouts of its touches do not fit its tables")
    for name in _TOUCHES:
        column = arrays[name]
        if (
            column.shape != (hot,)
            or column.dtype.kind != "f"
            or not (np.isnan(column) | ((column >= 0) & (column <= 1))).all()
        ):
            raise ValueError("a touch is no share, or its arrays of touches differ in length")
    return layouts
