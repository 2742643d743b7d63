"""Counters of a tap on the training device: look-ups by row, and the distinct rows of some forward passes.

Counters take fixed memory; no host waits for the device, and nothing loops over ids. From the distinct rows of a pass
the daemon counts touches. These passes are chosen by their number alone, so all ranks keep the same ones without
agreement: the touches of a row by a node and by anyone are counted from the passes that all ranks have sent. Where a
limit forces a rank to keep fewer, it goes over to a sample that is part of the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexd.core.errors import ConfigError
from flexd.core.keyspace import TableSpec
from flexd.core.tap_counts import PassRows, TableCounts, is_sampled

MAX_PARTS = 4096
"""Parts (a table of a pass) in one message: the daemon counts them under a lock, 10 to 50 us each."""
_SPARSEST = 2**20


def max_values(world_size: int) -> int:
    """Return the limit of the ids that a rank holds, so that the daemon can hold the passes of all ranks."""
    return max(2**16, 2**22 // world_size)


@dataclass(frozen=True)
class KeptPass:
    """The look-ups of one pass on the training device, by table."""

    number: int
    ids: tuple[tuple[torch.Tensor, ...], ...]

    def read(self) -> PassRows:
        """Return the distinct rows on the host. Waits for the device."""
        rows = tuple(
            torch.unique(torch.cat(parts)).cpu().to(torch.int64).numpy() if parts else torch.empty(0).long().numpy()
            for parts in self.ids
        )
        return PassRows(self.number, rows, tuple(sum(part.shape[0] for part in parts) for parts in self.ids))


class PassSample:
    """The kept passes of one interval.

    Args:
        every: one pass in this many is kept; 0 keeps none.
        tables: number of tables.
        limit: of the ids that are held.
    """

    def __init__(self, every: int, tables: int, limit: int) -> None:
        self._asked = self._every = every
        self._tables = tables
        self._limit = limit
        self._ids = 0
        self._kept: list[KeptPass] = []

    def wants(self, number: int) -> bool:
        return self._every > 0 and is_sampled(number, self._every)

    def add(self, number: int, ids: Sequence[Sequence[torch.Tensor]]) -> None:
        """Keep copies of a pass's ids, by table: the caller may write into its own."""
        kept = KeptPass(number, tuple(tuple(part.clone() for part in parts) for parts in ids))
        self._kept.append(kept)
        self._ids += _ids(kept)
        while self._ids > self._limit or len(self._kept) * self._tables > max(MAX_PARTS, self._tables):
            self._every = sparser(self._every)
            if self._every == 0:
                self._kept = []
            self._kept = [each for each in self._kept if is_sampled(each.number, self._every)]
            self._ids = sum(map(_ids, self._kept))

    def drain(self) -> list[PassRows]:
        """Return the kept passes and start again with the sample that was asked for. Waits for the device."""
        kept, self._kept, self._ids, self._every = self._kept, [], 0, self._asked
        return [each.read() for each in kept]


def sparser(every: int) -> int:
    """Return the next sample, a part of this one; 0 after the sparsest."""
    return 2 * every if every < _SPARSEST else 0


def thinned(passes: list[PassRows], limit: int) -> list[PassRows]:
    """Return the passes of the densest sample of at most ``limit`` numbers and ``MAX_PARTS`` parts."""
    every = 1
    while passes and (
        sum(each.values for each in passes) > limit or (sum(len(each.rows) for each in passes) > MAX_PARTS
        and len(passes) > 1)
    ):  # fmt: skip
        every = sparser(every)
        passes = [each for each in passes if is_sampled(each.number, every)] if every else []
    return passes


def _ids(kept: KeptPass) -> int:
    return sum(part.shape[0] for parts in kept.ids for part in parts)


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
