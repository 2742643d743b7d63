"""Steps of which batches may still arrive, and how far the batches of a table have been seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

STALE_STEPS = 128
"""A partition has no more batches of the table, because publishers have left it, after so many opened steps without."""


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
    """Distinct rows of every entry of the open steps of one table, in the order in which their first entries arrived.

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


class StepProgress:
    """Newest step number by rank, and by partition.

    A rank's batches may lie in several partitions, which are read unevenly: a step is over when every
    rank and every partition has passed it.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._partitions: dict[str, int] = {}
        self._advanced: dict[str, int] = {}
        """Steps that were opened when a partition's newest step changed last."""

    def latest(self, rank: int) -> int:
        """Return the newest step of a rank; -1 without one."""
        return self._ranks.get(rank, -1)

    def advance(self, rank: int, step: int) -> bool:
        """Note a step of a rank; return whether it is its newest one."""
        if step <= self.latest(rank):
            return False
        self._ranks[rank] = step
        return True

    def reach(self, partition: str, step: int, opened: int) -> bool:
        """Note a step of a partition, when ``opened`` steps were ever opened; return whether it is its newest one."""
        if step <= self._partitions.get(partition, -1):
            return False
        self._partitions[partition] = step
        self._advanced[partition] = opened
        return True

    def passed(self, ranks: int, opened: int) -> int:
        """Return the step that all have reached; -1 if fewer than ``ranks`` ranks are known."""
        if not self._ranks or len(self._ranks) < ranks:
            return -1
        stale = [name for name, then in self._advanced.items() if opened - then > STALE_STEPS]
        for name in stale:
            del self._partitions[name], self._advanced[name]
        slowest = min(self._ranks.values())
        return min(slowest, min(self._partitions.values(), default=slowest))
