"""Traces of (table, row) events, and the batches that a next-item sequence model trains on."""

from __future__ import annotations

import itertools
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import StreamError

Int64Array = npt.NDArray[np.int64]

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
    seconds: npt.NDArray[np.float64]
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
    arrays = _read_arrays(path)
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


def _read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with path.open("rb") as opened:
            if not zipfile.is_zipfile(opened):  # numpy's error would advise to allow pickles
                raise ValueError("no .npz archive")
            opened.seek(0)
            file = np.load(opened, allow_pickle=False)
            return {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise StreamError(f"trace {path}: cannot be read: {error}", remedy="give an .npz trace") from error


def synthetic_trace(
    events: int, seed: int = 0, *, rows: int = 12_000, active: int = 2_000, users: int = 1_000, exponent: float = 1.0
) -> Trace:
    """Generate the trace of a shop: Zipf popularity over the items in season, a third of which change every season.

    Items come in ``_STYLES`` styles; half of a user's events are in the user's own style, which a model can learn.
    Most rows of the table are idle at any time, as RecShard (arXiv 2201.10095) reports of production tables. There is
    one event a second.
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


@dataclass(frozen=True)
class Batch:
    """One rank's samples of one step: for each sample a history and, as its last element, the item to predict.

    Attributes:
        ids: by table, int64 row ids, sample by sample.
        lengths: by table, int64 [samples].
        order: int64 [elements], the index of each element of each sequence (sample by sample, in time order) in the
            concatenated ids of the tables.
        sequence_lengths: int64 [samples], length of history and target.
        seconds: event time of the last sample.
    """

    ids: tuple[Int64Array, ...]
    lengths: tuple[Int64Array, ...]
    order: Int64Array
    sequence_lengths: Int64Array
    seconds: float


class Batches:
    """``steps`` batches for every rank, spread evenly over the whole trace to include its drift.

    A sample is an event with at least ``min_history`` earlier events: of the same user, or, in a trace without users,
    of the stream itself. Consecutive samples go to the ranks in turn, as with a distributed sampler.
    """

    def __init__(
        self, trace: Trace, *, world_size: int, batch_size: int, steps: int, history: int, min_history: int
    ) -> None:
        self.trace = trace
        self.history = history
        self._world_size = world_size
        self._batch_size = batch_size
        events = len(trace)
        if trace.user is None:
            self._order = np.arange(events)
            position, start = self._order, np.zeros(events, dtype=np.int64)
        else:
            self._order = np.argsort(trace.user, kind="stable")
            users = trace.user[self._order]
            firsts = np.flatnonzero(np.concatenate([[True], users[1:] != users[:-1]]))
            position = np.empty(events, dtype=np.int64)
            position[self._order] = np.arange(events)
            start = np.empty(events, dtype=np.int64)
            start[self._order] = np.repeat(firsts, np.diff(np.append(firsts, events)))
        usable = np.flatnonzero(position - start >= min_history)
        wanted = steps * batch_size * world_size
        if len(usable) == 0:
            raise StreamError(
                f"the trace has no event with {min_history} earlier events of its user",
                remedy="use a trace with longer histories",
            )
        picks = usable[np.linspace(0, len(usable) - 1, wanted).astype(np.int64)]
        self._last = position[picks].reshape(steps, batch_size, world_size)
        self._first = np.maximum(start[picks], position[picks] - history).reshape(self._last.shape)
        self._seconds = trace.seconds[picks].reshape(self._last.shape)

    @cached_property
    def span_seconds(self) -> float:
        """Event time between the first and the last sample."""
        return float(self._seconds[-1].max() - self._seconds[0].min())

    def batch(self, step: int, rank: int) -> Batch:
        first, last = self._first[step, :, rank], self._last[step, :, rank]
        lengths = last - first + 1
        ends = np.cumsum(lengths)
        elements = np.repeat(first - (ends - lengths), lengths) + np.arange(ends[-1])
        events = self._order[elements]
        table, row = self.trace.table[events], self.trace.row[events]
        sample = np.repeat(np.arange(len(lengths)), lengths)
        by_table = np.argsort(table, kind="stable")
        order = np.empty(len(table), dtype=np.int64)
        order[by_table] = np.arange(len(table))
        ids, counts = [], []
        bounds = np.searchsorted(table[by_table], np.arange(len(self.trace.table_rows) + 1))
        for low, high in itertools.pairwise(bounds):
            chosen = by_table[low:high]
            ids.append(row[chosen])
            counts.append(np.bincount(sample[chosen], minlength=len(lengths)))
        return Batch(tuple(ids), tuple(counts), order, lengths, float(self._seconds[step, -1, rank]))
