"""How far the batches of a table have been seen, by rank and by partition of the stream."""

from __future__ import annotations

STALE_STEPS = 128
"""A partition has no more batches of the table, because publishers have left it, after so many opened steps without."""


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
