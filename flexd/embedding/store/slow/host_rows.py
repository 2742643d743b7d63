"""Cold rows in host memory, beside cache slots on an accelerator."""

from __future__ import annotations

import time

import torch

from flexd.embedding.store.slow.cold_rows import FreshRows, SlowTraffic


class HostRows:
    """See ``ColdRows``. Pages of host memory are taken by the rows that are written.

    Args:
        pinned: page-locked, for copies to a device that do not wait; takes all pages at once. What ``read`` returns is
            page-locked too.
    """

    def __init__(self, rows: int, row_bytes: int, fresh: FreshRows, *, pinned: bool = False) -> None:
        self._packed = torch.empty((rows, row_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._written = torch.zeros(rows, dtype=torch.bool)
        self._fresh, self._pinned = fresh, pinned
        self.traffic = SlowTraffic()

    @property
    def fast_nbytes(self) -> int:
        return self._written.nbytes

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        packed = torch.empty((len(slots), self._packed.shape[1]), dtype=torch.uint8, pin_memory=self._pinned)
        torch.index_select(self._packed, 0, slots, out=packed)
        unwritten = (~self._written.index_select(0, slots)).nonzero().view(-1)
        if len(unwritten):
            packed.index_copy_(0, unwritten, self._fresh(slots.index_select(0, unwritten)))
        self.traffic.bytes_read += (len(slots) - len(unwritten)) * self._packed.shape[1]
        self.traffic.operations += 1
        self.traffic.seconds += time.perf_counter() - began
        return packed

    def write(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        began = time.perf_counter()
        self._packed.index_copy_(0, slots, packed)
        self._written[slots] = True
        self.traffic.bytes_written += packed.numel()
        self.traffic.operations += 1
        self.traffic.seconds += time.perf_counter() - began

    def close(self) -> None:
        self._packed, self._written = self._packed[:0].clone(), self._written[:0].clone()
