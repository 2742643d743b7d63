"""What every slow memory does: keep packed rows with their optimizer state, and give them back in batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

FreshRows = Callable[[torch.Tensor], torch.Tensor]
"""int64 [n] slots -> uint8 [n, row_bytes]: packed rows that nobody has written yet, from their seed."""


@dataclass
class SlowTraffic:
    """What a slow memory has done since it was made.

    Attributes:
        bytes_read, bytes_written: moved to and from the medium, whole blocks where it has blocks; what a write must
            read before is in ``bytes_read``.
        operations: calls of the medium, each for one block or several adjoining ones.
        seconds: that callers waited.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    operations: int = 0
    seconds: float = 0.0


class ColdRows(Protocol):
    """Packed rows of a dim-group that have their home on this rank, by slot.

    Sparse: a row that was never written costs nothing and is made by ``FreshRows`` when it is read. Calls come from one
    thread at a time.
    """

    traffic: SlowTraffic

    @property
    def fast_nbytes(self) -> int:
        """Bytes of fast memory (host memory where the medium is a file) that finding rows takes, buffers included."""
        ...

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return uint8 [n, row_bytes] of int64 [n] distinct slots in any order, in host memory.

        Raises:
            SlowMemoryError: the medium failed, or what it gave is not what was written.
        """
        ...

    def write(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        """Keep uint8 [n, row_bytes] rows at int64 [n] distinct slots.

        Raises:
            SlowMemoryError: the medium failed; rows of this call may be written or not. A medium that writes behind
                raises it from a later call.
        """
        ...

    def close(self) -> None:
        """Let go of the medium and its content; twice is fine."""
        ...
