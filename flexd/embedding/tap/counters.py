"""Counters of looked-up rows on the training device: fixed memory, no wait of host for device, no loop over ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flexd.core.errors import ConfigError
from flexd.core.keyspace import TableSpec
from flexd.core.tap_counts import TableCounts

_BUFFERS = 2


def counter_bytes(rows: int) -> int:
    """Return the device memory of both buffers of a table's counters."""
    return _BUFFERS * 4 * rows


def check_memory(tables: Sequence[TableSpec], max_bytes: int) -> None:
    """Refuse tables whose counters need more than ``max_bytes`` of device memory.

    Raises:
        ConfigError: names the first table that does not fit, smallest first, and the bytes that all tables need.
    """
    needed = sum(counter_bytes(spec.rows) for spec in tables)
    if needed <= max_bytes:
        return
    spent = 0
    for spec in sorted(tables, key=lambda spec: spec.rows):
        spent += counter_bytes(spec.rows)
        if spent > max_bytes:
            raise ConfigError(
                f"tap: table {spec.name!r} ({spec.rows} rows) needs {counter_bytes(spec.rows)} bytes of counters; all "
                f"{len(tables)} tables together need {needed}, max_bytes is {max_bytes}",
                remedy=f"give max_bytes={needed} or more (8 bytes a row of device memory), or publish accesses to a "
                "log and set stream.source to it instead of a tap",
            )


class TableCounter:
    """One int32 for each row of a table."""

    def __init__(self, spec: TableSpec, device: torch.device) -> None:
        self._table = spec.name
        self._counts = torch.zeros(spec.rows, dtype=torch.int32, device=device)
        self._host = self._counts.numpy() if device.type == "cpu" else None
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    def add(self, ids: torch.Tensor) -> None:
        """Count int[n] ids of the table (checked by the caller)."""
        if self._host is not None:
            # Twice as fast as scatter_add_ on one CPU thread.
            np.add.at(self._host, ids.numpy(), np.int32(1))
        else:
            ids = ids.to(torch.int64)
            self._counts.scatter_add_(0, ids, self._one.expand(ids.shape[0]))

    def drain(self) -> TableCounts:
        """Return the counts on the host and start from zero again. Waits for the device."""
        rows = torch.nonzero(self._counts).squeeze(1)
        counts = self._counts[rows].to(torch.int64)
        self._counts.zero_()
        return TableCounts(self._table, rows.cpu().numpy(), counts.cpu().numpy())
