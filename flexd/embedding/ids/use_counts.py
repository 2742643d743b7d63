"""The use of unbounded ids, for the daemon."""

from __future__ import annotations

import torch

from flexd.control.protocol.report import IdsReport, most_used
from flexd.embedding.ids.unbounded_ids import UnboundedIds


class UseCounts:
    """The use of a rank's slots since the call before. Reading waits for the device."""

    def __init__(self, ids: UnboundedIds) -> None:
        self._ids, self._slots = ids, ids.slots
        self._before = ids.slots.counts.to("cpu", copy=True)

    def __call__(self) -> tuple[IdsReport, ...]:
        slots = self._ids.slots
        if slots is not self._slots:  # all rows were taken from their ids
            self._slots, self._before = slots, torch.zeros_like(self._before)
        counts, used = slots.counts.to("cpu", copy=True), slots.used().tolist()
        since = (counts - self._before).tolist()
        self._before = counts
        return most_used(
            IdsReport(table.table, of_slots, *of_counts)
            for table, of_slots, of_counts in zip(self._ids.sets.tables, used, since, strict=True)
        )
