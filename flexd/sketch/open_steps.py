"""Steps of which batches may still arrive: the distinct rows of every entry, by step and rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError

Int64Array = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]

_ENTRIES, _TIMES, _GAPS = "open_step_entries", "open_step_times", "open_step_row_gaps"
_MAX_NUMBER = 2**62
_UNSIGNED = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64))


@dataclass
class OpenStep:
    """One step.

    Attributes:
        event_time_seconds: of its newest entry.
        ranks, rows, accesses: of each entry: the rank, its ascending distinct rows (int64), and its number of look-ups.
    """

    event_time_seconds: float
    ranks: list[int] = field(default_factory=list)
    rows: list[Int64Array] = field(default_factory=list)
    accesses: list[int] = field(default_factory=list)


@dataclass
class SharedRows:
    """Rows in the open steps of several tables together."""

    count: int = 0


class OpenSteps:
    """Open steps of one table, in the order in which their first entries arrived.

    Args:
        shared: counts these rows too.

    Attributes:
        total_rows: rows of all entries.
        opened: steps that were ever opened.
    """

    def __init__(self, shared: SharedRows | None = None) -> None:
        self._steps: dict[int, OpenStep] = {}
        self.shared = shared or SharedRows()
        self.total_rows = 0
        self.opened = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def add(self, number: int, rank: int, distinct: Int64Array, accesses: int, event_time_seconds: float) -> None:
        """Add an entry: the ascending distinct rows of a rank in a step, of so many look-ups."""
        step = self._steps.get(number)
        if step is None:
            step = self._steps[number] = OpenStep(event_time_seconds)
            self.opened += 1
        step.event_time_seconds = max(step.event_time_seconds, event_time_seconds)
        step.ranks.append(rank)
        step.rows.append(distinct)
        step.accesses.append(accesses)
        self._count_rows(len(distinct))

    def pop(self, number: int) -> OpenStep:
        """Return a step and forget it."""
        step = self._steps.pop(number)
        self._count_rows(-sum(map(len, step.rows)))
        return step

    def _count_rows(self, rows: int) -> None:
        self.total_rows += rows
        self.shared.count += rows

    def before(self, number: int) -> list[int]:
        """Return the open steps below a number, ascending."""
        return sorted(step for step in self._steps if step < number)

    def ranks_of(self, number: int) -> set[int]:
        """Return the ranks that have an entry in a step."""
        return set(self._steps[number].ranks)

    def entries(self) -> Iterator[tuple[int, int, Int64Array, int, float]]:
        """Yield the arguments of ``add`` of every entry."""
        for number, step in self._steps.items():
            for rank, rows, accesses in zip(step.ranks, step.rows, step.accesses, strict=True):
                yield number, rank, rows, accesses, step.event_time_seconds

    def state(self) -> Arrays:
        """Return the entries as numeric arrays; empty without one."""
        if not self._steps:
            return {}
        entries = list(self.entries())
        columns = [(number, rank, accesses, len(rows)) for number, rank, rows, accesses, _ in entries]
        gaps = np.concatenate([np.diff(rows, prepend=0) for _, _, rows, _, _ in entries])
        dtype = next(each for each in _UNSIGNED if gaps.max(initial=0) <= np.iinfo(each).max)
        return {
            _ENTRIES: np.array(columns, dtype=np.int64).T.copy(),
            _TIMES: np.array([time for *_, time in entries]),
            _GAPS: gaps.astype(dtype),
        }

    @classmethod
    def of_state(cls, arrays: Mapping[str, npt.NDArray[Any]], table_rows: int) -> OpenSteps:
        """Return the steps that ``state`` described; other arrays are ignored.

        Raises:
            SketchError: they do not fit each other, or a table of so many rows.
        """
        steps = cls()
        if _ENTRIES not in arrays:
            return steps
        entries, times, gaps = (arrays.get(name, np.empty(0)) for name in (_ENTRIES, _TIMES, _GAPS))
        count = entries.shape[-1] if entries.ndim else 0
        fits = entries.shape == (4, count) and times.shape == (count,) and gaps.ndim == 1
        types = entries.dtype == np.int64 and times.dtype == np.float64 and gaps.dtype in _UNSIGNED
        if not (fits and types) or (entries < 0).any() or (entries >= _MAX_NUMBER).any():
            raise _damaged("do not fit each other")
        sizes = entries[3].tolist()
        # Each entry's sum is below the table's rows before the whole is summed up, so nothing overflows.
        if sum(sizes) != len(gaps) or not np.isfinite(times).all() or (gaps >= table_rows).any():
            raise _damaged("do not fit the table")
        first = 0
        for (number, rank, accesses, size), time in zip(entries.T.tolist(), times.tolist(), strict=True):
            rows = np.cumsum(gaps[first : first + size], dtype=np.int64)
            if size and (int(rows[-1]) >= table_rows or not gaps[first + 1 : first + size].all()):
                raise _damaged("do not fit the table")
            first += size
            steps.add(number, rank, rows, accesses, time)
        return steps


def _damaged(what: str) -> SketchError:
    return SketchError(f"touches of open steps {what}", remedy="run the same flexd on both sides")
