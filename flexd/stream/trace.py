"""Traces of (table, row) events in order of time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array, read_arrays
from flexd.core.errors import StreamError

_STYLES = 10
_REQUIRED = ("row", "ts", "table_rows", "table_names")
_KINDS = {"row": "iu", "ts": "iuf", "table": "iu", "user": "iu", "table_rows": "iu", "table_names": "U"}
"""Allowed numpy dtype kinds of each array."""


@dataclass(frozen=True)
class Trace:
    """Events in time order.

    Attributes:
        table: int64 [n], index into ``table_names``.
        row: int64 [n], dense in its table.
        seconds: float64 [n], event time.
        user: int64 [n], or None for a plain stream of accesses.
        table_rows: int64 [tables], number of rows of each table.
        table_names: name of each table.
    """

    table: Int64Array
    row: Int64Array
    seconds: Float64Array
    user: Int64Array | None
    table_rows: Int64Array
    table_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.row)


def load_trace(path: Path) -> Trace:
    """Read an ``.npz`` with arrays row, ts, table_rows, table_names, and optionally table (default 0) and user.

    Raises:
        StreamError: the file cannot be read, lacks an array, has an array of a wrong type or length, has rows outside
            its tables, or is not in time order.
    """
    try:
        arrays = read_arrays(path)
    except (OSError, ValueError) as error:
        raise StreamError(f"trace {path}: cannot be read: {error}", remedy="give an .npz trace") from error
    missing = [name for name in _REQUIRED if name not in arrays]
    if missing:
        raise StreamError(f"trace {path}: no array {', '.join(missing)}", remedy=f"it needs {', '.join(_REQUIRED)}")
    for name, kinds in _KINDS.items():
        array = arrays.get(name)
        if array is not None and (array.ndim != 1 or array.dtype.kind not in kinds):
            raise StreamError(
                f"trace {path}: array {name} is {array.dtype}{list(array.shape)}",
                remedy="give vectors: integers for row, table, user and table_rows, numbers for ts, text for names",
            )
    row, table_rows = arrays["row"].astype(np.int64), arrays["table_rows"].astype(np.int64)
    table = arrays["table"].astype(np.int64) if "table" in arrays else np.zeros(len(row), dtype=np.int64)
    user = arrays["user"].astype(np.int64) if "user" in arrays else None
    seconds = arrays["ts"].astype(np.float64)
    names = tuple(str(name) for name in arrays["table_names"])
    columns = [table, seconds, *([] if user is None else [user])]
    if any(len(column) != len(row) for column in columns) or len(row) == 0:
        raise StreamError(f"trace {path}: its event arrays are empty or differ in length")
    if len(names) != len(table_rows) or len(set(names)) != len(names):
        raise StreamError(f"trace {path}: {len(names)} table names for {len(table_rows)} tables, or one named twice")
    if table.min() < 0 or table.max() >= len(table_rows) or row.min() < 0 or (row >= table_rows[table]).any():
        raise StreamError(f"trace {path}: an event names a table or row that table_rows does not have")
    # In this form the comparison fails for NaN too.
    if not (seconds[0] >= 0 and np.isfinite(seconds[-1]) and (np.diff(seconds) >= 0).all()):
        raise StreamError(f"trace {path}: ts is not in order of time, or not finite and from 0", remedy="sort by ts")
    return Trace(table, row, seconds, user, table_rows, names)


def synthetic_trace(
    events: int, seed: int = 0, *, rows: int = 12_000, active: int = 2_000, users: int = 1_000, exponent: float = 1.0
) -> Trace:
    """Generate the trace of a shop: Zipf popularity over the items in season, a third of which change every season.

    Items come in ``_STYLES`` styles; half of a user's events are in the user's own style, which a model can learn.
    Most rows of the table are idle at any time, as RecShard (arXiv 2201.10095) reports of production tables. There is
    one event per second.
    """
    rng = np.random.default_rng(seed)
    weight = np.arange(1, active + 1) ** -exponent
    rank = np.minimum(np.searchsorted(np.cumsum(weight) / weight.sum(), rng.random(events)), active - 1)
    user = rng.integers(0, users, events)
    loyal = rng.random(events) < 0.5
    rank = np.where(loyal, np.minimum(rank - rank % _STYLES + user % _STYLES, active - 1), rank)
    row = np.empty(events, dtype=np.int64)
    items = rng.permutation(rows)
    for season in np.array_split(np.arange(events), 6):
        row[season] = items[rank[season]]
        leaving = rng.choice(active, active // 3, replace=False)
        coming = active + rng.choice(rows - active, len(leaving), replace=False)
        items[leaving], items[coming] = items[coming], items[leaving]
    seconds = np.arange(events, dtype=np.float64) + 1.7e9
    return Trace(np.zeros(events, np.int64), row, seconds, user, np.array([rows]), ("item",))


def built_in_trace(seed: int = 0) -> Trace:
    """Return the synthetic trace that ``flexd demo`` and ``flexd simulate`` use where none is given."""
    return synthetic_trace(2_000_000, seed, users=4_000)
