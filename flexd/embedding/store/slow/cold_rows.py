"""The task of every slow memory: keep packed rows with their optimizer state, and give them back in batches. One of
them is host memory, beside cache slots on an accelerator."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

FreshRows = Callable[[torch.Tensor], torch.Tensor]
"""int64 [n] slots -> uint8 [n, row_bytes]: packed rows that nobody has written yet, from their seed."""


@dataclass
class SlowTraffic:
    """Bytes and seconds of a slow memory since it was made.

    Attributes:
        bytes_read, bytes_written: moved to and from the medium, whole blocks where it has blocks; what a write must
            read before is in ``bytes_read``.
        seconds: that callers waited.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0


class ColdRows(ABC):
    """Packed rows of a dim-group that have their home on this rank, by slot.

    Sparse: a row that was never written costs nothing and is made by ``FreshRows`` when it is read. Calls come from one
    thread at a time.
    """

    def __init__(self, fresh: FreshRows) -> None:
        self._fresh = fresh
        self.traffic = SlowTraffic()

    @property
    @abstractmethod
    def fast_nbytes(self) -> int:
        """Bytes of fast memory (host memory where the medium is a file) that finding rows takes, buffers included."""

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return uint8 [n, row_bytes] of int64 [n] distinct slots in any order, in host memory.

        Raises:
            SlowMemoryError: the medium failed, or what it gave is not what was written.
        """
        began = time.perf_counter()
        packed, unwritten = self._read(slots)
        if len(unwritten):
            packed.index_copy_(0, unwritten, self._fresh(slots.index_select(0, unwritten)))
        self.traffic.seconds += time.perf_counter() - began
        return packed

    def write(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        """Keep uint8 [n, row_bytes] rows at int64 [n] distinct slots.

        Raises:
            SlowMemoryError: the medium failed; rows of this call may be written or not.
        """
        began = time.perf_counter()
        self._write(slots, packed)
        self.traffic.seconds += time.perf_counter() - began

    @abstractmethod
    def close(self) -> None:
        """Release the medium and its content; twice is fine."""

    @abstractmethod
    def _read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows, and int64 places of those that were never written, whose bytes are undefined."""

    @abstractmethod
    def _write(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        """As ``write``."""


class HostRows(ColdRows):
    """Rows in host memory, whose pages are taken by the rows that are written.

    Args:
        pinned: page-locked, for copies to a device that do not wait; takes all pages at once. What ``read`` returns is
            page-locked too.
    """

    def __init__(self, rows: int, row_bytes: int, fresh: FreshRows, *, pinned: bool = False) -> None:
        super().__init__(fresh)
        self._packed = torch.empty((rows, row_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._written = torch.zeros(rows, dtype=torch.bool)
        self._pinned = pinned

    @property
    def fast_nbytes(self) -> int:
        return self._written.nbytes

    def _read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = torch.empty((len(slots), self._packed.shape[1]), dtype=torch.uint8, pin_memory=self._pinned)
        torch.index_select(self._packed, 0, slots, out=packed)
        unwritten = (~self._written.index_select(0, slots)).nonzero().view(-1)
        self.traffic.bytes_read += (len(slots) - len(unwritten)) * self._packed.shape[1]
        return packed, unwritten

    def _write(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        self._packed.index_copy_(0, slots, packed)
        self._written[slots] = True
        self.traffic.bytes_written += packed.numel()

    def close(self) -> None:
        self._packed, self._written = self._packed[:0].clone(), self._written[:0].clone()
