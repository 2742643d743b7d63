"""Traces of (table, row) events in order of time, and bounded Zipf samples in bulk, exactly and without a table of
probabilities."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array, read_arrays
from flexd.core.errors import StreamError

_STYLES = 10
_REQUIRED = ("row", "ts", "table_rows", "table_names")
# Allowed numpy dtype kinds of each array.
_KINDS = {"row": "iu", "ts": "iuf", "table": "iu", "user": "iu", "table_rows": "iu", "table_names": "U"}


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


class ZipfSampler:
    """Draw ranks 0..n-1 with probability proportional to ``(rank + 1) ** -exponent``.

    Rejection-inversion of W. Hörmann and G. Derflinger, "Rejection-inversion to generate variates from monotone
    discrete distributions", ACM TOMACS 6(3), 1996, algorithm RI; vectorised. Costs no memory per rank, so it serves
    tables of 10^9 rows.

    Args:
        ranks: n, at least 1.
        exponent: above 0.
    """

    def __init__(self, ranks: int, exponent: float) -> None:
        self._ranks = ranks
        self._exponent = exponent
        # The hat is the integral of x^-s over [k - 1/2, k + 1/2]; that of rank 1 is shortened to exactly its mass.
        self._low = float(self._integral(np.array(1.5))) - 1.0
        self._high = float(self._integral(np.array(ranks + 0.5)))
        inside = self._integral(np.array(2.5)) - 2.0**-exponent
        self._always = 2.0 - float(self._inverse(inside))

    def sample(self, count: int, random: np.random.Generator) -> Int64Array:
        """Draw int64[count] ranks."""
        ranks = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            # Acceptance is above 0.9 for common exponents; a tenth more makes a second round rare.
            want = count - filled
            u = self._high + random.random(want + want // 8 + 8) * (self._low - self._high)
            x = self._inverse(u)
            k = np.clip(np.rint(x), 1, self._ranks)
            accepted = (k - x <= self._always) | (u >= self._integral(k + 0.5) - k**-self._exponent)
            chosen = k[accepted][:want]
            ranks[filled : filled + len(chosen)] = chosen
            filled += len(chosen)
        ranks -= 1
        return ranks

    def _integral(self, x: Float64Array) -> Float64Array:
        """H(x), an antiderivative of x^-s: (x^(1-s) - 1) / (1 - s), log x at s = 1, without cancellation near it."""
        log_x = np.log(x)
        t = (1.0 - self._exponent) * log_x
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(np.abs(t) > 1e-8, np.expm1(t) / t, 1.0 + t / 2)
        return np.asarray(log_x * ratio)

    def _inverse(self, y: Float64Array) -> Float64Array:
        t = np.maximum(np.asarray(y) * (1.0 - self._exponent), -1.0 + 1e-15)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(np.abs(t) > 1e-8, np.log1p(t) / t, 1.0 - t / 2)
        return np.asarray(np.exp(y * ratio))


def scatter_multiplier(rows: int) -> int:
    """Return a factor coprime to ``rows``, near ``rows`` times the golden ratio, that keeps products below 2^63."""
    multiplier = max(1, min(int(rows * 0.6180339887), 2**62 // rows))
    while math.gcd(multiplier, rows) != 1:
        multiplier -= 1
    return multiplier


def scatter(ranks: Int64Array, rows: int, multiplier: int) -> Int64Array:
    """Map popularity ranks, int64 [n] of any integers, to rows of a table, int64 [n].

    The map is a bijection modulo ``rows`` that spreads neighbouring ranks over the table.
    """
    return (ranks % rows) * multiplier % rows
