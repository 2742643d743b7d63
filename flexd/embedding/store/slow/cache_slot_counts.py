"""What look-ups found in fast memory, by table."""

from __future__ import annotations

import torch

from flexd.control.protocol.report import SLOW_TABLE_QUANTITIES

USED, MISSED, EVICTED, WRITTEN = range(len(SLOW_TABLE_QUANTITIES))


class CacheSlotCounts:
    """Home rows of a dim-group by table and by what became of them (``SlowTableReport``), since its tables were made.

    Counted on the device of the rows; the host reads them when it reports.
    """

    def __init__(self, device: torch.device) -> None:
        self._first_slots = self._of_tables = torch.zeros(1, dtype=torch.int64, device=device)
        self._counted = torch.zeros((len(SLOW_TABLE_QUANTITIES), 1), dtype=torch.int64, device=device)

    def begin(self, tables: int, first_slots: torch.Tensor, of_tables: torch.Tensor) -> None:
        """Forget what was counted, and count by table: home rows from int64 [r] ascending slots on are of the tables of
        int64 [r] numbers."""
        device = self._counted.device
        self._first_slots, self._of_tables = first_slots.to(device), of_tables.to(device)
        self._counted = self._counted.new_zeros((len(SLOW_TABLE_QUANTITIES), tables))

    def by_table(self) -> torch.Tensor:
        """Return int64 [t, quantities] so far, in host memory."""
        return self._counted.t().to("cpu", copy=True)

    def add(self, quantity: int, slots: torch.Tensor) -> None:
        """Count int64 [n] distinct home slots: ``USED`` by a look-up, ``MISSED`` of those in no cache slot,
        ``EVICTED`` from their cache slots, ``WRITTEN`` of those because they had changed."""
        if self._counted.shape[1] == 1:
            self._counted[quantity] += len(slots)
        elif len(slots):
            of_run = torch.searchsorted(self._first_slots, slots, right=True) - 1
            of_table = self._of_tables.index_select(0, of_run)
            self._counted[quantity].index_add_(0, of_table, torch.ones_like(of_table))
