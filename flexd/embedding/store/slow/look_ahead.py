"""The home rows of a dim-group that the next batches look up, as far as a loop over prefetched batches knows them.

They decide which row leaves its frame, and nothing else: a wrong or missing one costs a read.
"""

from __future__ import annotations

from collections import deque

import torch

from flexd.embedding.store.slow.frame_table import FrameTable


class LookAhead:
    """Batches that are known, numbered from 1. Not thread-safe.

    Attributes:
        present: number of the batch whose rows are being fetched; 0 before the first.
    """

    def __init__(self, table: FrameTable) -> None:
        self._table = table
        self._known: deque[tuple[int, torch.Tensor]] = deque()
        self._last = 0
        self.present = 0

    @property
    def known(self) -> int:
        """Number of batches after the present one that are known."""
        return self._last - self.present

    @property
    def nbytes(self) -> int:
        return sum(slots.nbytes for _, slots in self._known)

    def use_table(self, table: FrameTable) -> None:
        """Go on with a table that has the scores of the present one."""
        self._table = table

    def add(self, slots: torch.Tensor) -> None:
        """Add the batch after the last one that is known: int64 [n] ascending slots that it looks up."""
        self._last += 1
        self._known.append((self._last, slots))
        frames = self._table.find(slots)
        self._table.expect(frames[frames >= 0], self._last)

    def begin(self, passes_kept: int) -> None:
        """Begin to fetch the next batch; rows of batches before it that no update needs any more are let go.

        Args:
            passes_kept: batches before it whose rows an update still needs.
        """
        self.present += 1
        self._last = max(self._last, self.present)
        while self._known and self._known[0][0] < self.present - passes_kept:
            number, slots = self._known.popleft()
            frames = self._table.find(slots)
            held = frames >= 0
            self._table.pass_over(frames[held], number, self._next_use(slots[held]))

    def end(self) -> None:
        """Forget all batches."""
        while self._known:
            number, slots = self._known.popleft()
            frames = self._table.find(slots)
            frames = frames[frames >= 0]
            self._table.pass_over(frames, number, torch.zeros_like(frames))
        self.present = self._last

    def use_of(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return for int64 [n] slots that are looked up now the number of the present batch, 0 for those that it was
        not known to look up; None if no batch is known."""
        for number, known in self._known:
            if number == self.present:
                return torch.where(_are_in(slots, known), number, 0)
        return None

    def _next_use(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 [n] slots -> int64 [n] the next batch that looks each up, 0 where none is known."""
        following = torch.zeros_like(slots)
        for number, known in reversed(self._known):
            following = torch.where(_are_in(slots, known), number, following)
        return following


def _are_in(slots: torch.Tensor, ascending: torch.Tensor) -> torch.Tensor:
    if not len(ascending):
        return torch.zeros_like(slots, dtype=torch.bool)
    at = torch.searchsorted(ascending, slots).clamp_(max=len(ascending) - 1)
    return ascending.index_select(0, at) == slots
