"""Distinct keys of a batch."""

from __future__ import annotations

import threading

import torch

from flexd.embedding import devices

MAX_TABLE_ROWS = 2**23
"""``Dedup`` sorts where there are more rows: its table (8 bytes a row) would take too much memory."""


class Dedup:
    """Finds the distinct keys of a range, without sorting where a table of its rows is small enough. Thread-safe.

    Args:
        first, rows: keys lie in [first, first + rows).
        numbers: of the device.
    """

    def __init__(self, first: int, rows: int, device: torch.device, numbers: devices.Numbers) -> None:
        self._first = first
        self._numbers = numbers
        self._lock = threading.Lock()
        # Its content between calls is irrelevant: every place is written before it is read.
        self._table = torch.empty(rows, dtype=torch.int64, device=device) if rows <= MAX_TABLE_ROWS else None

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return 0 if self._table is None else self._table.nbytes

    def unique(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 [n] keys -> (int64 [m] distinct keys, int64 [n] place of each key among them).

        The places are None if all keys are distinct; then the distinct keys are the keys as given.
        """
        if self._table is None:
            distinct, places = torch.unique(keys, return_inverse=True)
            return (keys, None) if len(distinct) == len(keys) else (distinct, places)
        at = keys - self._first if self._first else keys
        number = self._numbers.first(len(keys))
        with self._lock:
            table = self._table
            # The last writer among equal keys represents them all.
            table.scatter_(0, at, number)
            chosen = (table.index_select(0, at) == number).nonzero().view(-1)
            if len(chosen) == len(keys):
                return keys, None
            distinct = keys.index_select(0, chosen)
            of_distinct = distinct if at is keys else at.index_select(0, chosen)
            table.scatter_(0, of_distinct, number[: len(chosen)])
            return distinct, table.index_select(0, at)
