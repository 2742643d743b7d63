"""Steps of which batches may still arrive: the distinct rows of every entry, by step and rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


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


class OpenSteps:
    """Open steps of one table, in the order in which their first entries arrived.

    Attributes:
        total_rows: rows of all entries.
        opened: steps that were ever opened.
    """

    def __init__(self) -> None:
        self._steps: dict[int, OpenStep] = {}
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
        self.total_rows += len(distinct)

    def pop(self, number: int) -> OpenStep:
        """Return a step and forget it."""
        step = self._steps.pop(number)
        self.total_rows -= sum(map(len, step.rows))
        return step

    def before(self, number: int) -> list[int]:
        """Return the open steps below a number, ascending."""
        return sorted(step for step in self._steps if step < number)

    def ranks_of(self, number: int) -> set[int]:
        """Return the ranks that have an entry in a step."""
        return set(self._steps[number].ranks)
