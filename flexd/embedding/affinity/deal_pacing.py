"""Deal batches only while that saves bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class DealtTotals:
    """Running totals of all ranks, equal on each.

    Attributes:
        batches: global batches read.
        dealt_batches: batches of which ranks exchanged what rows their samples use.
        samples: of the dealt batches.
        shipped_samples: trained in another node than read.
        row_bytes_before: of rows between nodes, as priced, had each sample been trained where it was read.
        row_bytes_after: as dealt.
        sample_bytes: of shipped samples between nodes.
        id_bytes: of rows' codes between nodes.
        time_paused_batches: not dealt since steps were measured to be shorter without, or to measure them.
    """

    batches: int = 0
    dealt_batches: int = 0
    samples: int = 0
    shipped_samples: int = 0
    row_bytes_before: int = 0
    row_bytes_after: int = 0
    sample_bytes: int = 0
    id_bytes: int = 0
    time_paused_batches: int = 0

    @property
    def saved_bytes(self) -> int:
        """Bytes between nodes that dealing has saved, all that it sends counted."""
        return self.row_bytes_before - self.row_bytes_after - self.sample_bytes - self.id_bytes

    def since(self, other: DealtTotals) -> DealtTotals:
        return DealtTotals(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def copy(self) -> DealtTotals:
        return self.since(DealtTotals())


class DealPacing:
    """Judges trials of some dealt batches; one that saves too little is followed by a pause, twice as long each time.
    A trial ends early where it has cost more than it saved.

    Every rank judges the same totals, so all pause at the same batch.

    Args:
        trial: dealt batches that are judged together, at most.
        min_saving: share of the bytes of rows between nodes that a trial must save.
        first_pause, longest_pause: batches.
    """

    def __init__(
        self, trial: int = 4, min_saving: float = 0.02, first_pause: int = 60, longest_pause: int = 4000
    ) -> None:
        self._trial, self._min_saving = trial, min_saving
        self._first, self._longest = first_pause, longest_pause
        self._pause = first_pause
        self._paused_until = 0
        self._judged = DealtTotals()

    def deals(self, totals: DealtTotals) -> bool:
        """Return whether the next batch is dealt."""
        return totals.batches >= self._paused_until

    def judge(self, totals: DealtTotals) -> None:
        """Begin a pause if the last trial is over and did not pay."""
        trial = totals.since(self._judged)
        if trial.dealt_batches < self._trial and trial.saved_bytes > 0:
            return
        self._judged = totals.copy()
        if trial.saved_bytes >= self._min_saving * trial.row_bytes_before:
            self._pause = self._first
            return
        self._paused_until = totals.batches + self._pause
        self._pause = min(self._longest, 2 * self._pause)
