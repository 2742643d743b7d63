"""Counters of looked-up rows on the training device: fixed memory, no wait of host for device, no loop over ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexd.core.counted_accesses import DEPTH, LOG2_REGISTERS, CellCounts, LengthCounts, RowCounts, TableCounts
from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import TableSpec
from flexd.embedding.tap.hashing import hashed

MAX_LENGTH = 4096
"""Longer sequences are counted as of this length."""
MIN_LOG2_WIDTH, MAX_LOG2_WIDTH = 12, 20
_SIDES = 2
_BLOCK_IDS = 32_768
"""Ids hashed at a time on a CPU, where the temporaries of a larger block leave the caches."""


@dataclass(frozen=True)
class TapChoice:
    """How one table is counted on the device. ``log2_width`` is None for exact counters. Bytes of both buffers."""

    table: str
    log2_width: int | None
    bytes: int


def choose(tables: Sequence[TableSpec], max_bytes: int, sampled: int) -> tuple[TapChoice, ...]:
    """Exact counters for the smallest tables as far as they fit, count-min cells for the others.

    Raises:
        EmbeddingError: not even the narrowest cells fit.
    """
    left = max_bytes
    least = [min(_dense_bytes(spec.rows), _cell_bytes(MIN_LOG2_WIDTH, sampled)) for spec in tables]
    reserved = sum(least)
    if reserved > max_bytes:
        raise EmbeddingError(
            f"tap: {max_bytes} bytes for {len(tables)} tables", remedy=f"give max_bytes={reserved} or more"
        )
    chosen: dict[int, TapChoice] = {}
    order = sorted(range(len(tables)), key=lambda index: tables[index].rows)
    for index in order:
        needed = _dense_bytes(tables[index].rows)
        if needed <= left - (reserved - least[index]):
            chosen[index] = TapChoice(tables[index].name, None, needed)
            left, reserved = left - needed, reserved - least[index]
    wide = [index for index in order if index not in chosen]
    for index in wide:
        share = left // len(wide)
        width = MIN_LOG2_WIDTH
        while width < MAX_LOG2_WIDTH and _cell_bytes(width + 1, sampled) <= share:
            width += 1
        chosen[index] = TapChoice(tables[index].name, width, _cell_bytes(width, sampled))
    return tuple(chosen[index] for index in range(len(tables)))


def _dense_bytes(rows: int) -> int:
    return _SIDES * 4 * (rows + MAX_LENGTH + 1)


def _cell_bytes(log2_width: int, sampled: int) -> int:
    return _SIDES * (4 * (DEPTH << log2_width) + 4 * (1 << LOG2_REGISTERS) + 8 * (sampled + 1) + 4 * (MAX_LENGTH + 1))


class _Lengths:
    """Exact histogram, in int32: the owner takes the counters away before 2^31 accesses."""

    def __init__(self, device: torch.device) -> None:
        self.histogram = torch.zeros(MAX_LENGTH + 1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    def add(self, lengths: torch.Tensor) -> None:
        at = lengths.to(self.histogram.device, torch.int64, non_blocking=True).clamp(0, MAX_LENGTH)
        self.histogram.scatter_add_(0, at, self._one.expand(at.shape[0]))

    def take(self) -> LengthCounts:
        lengths = torch.nonzero(self.histogram).squeeze(1)
        found = LengthCounts(lengths.cpu().numpy(), self.histogram[lengths].to(torch.int64).cpu().numpy())
        self.histogram.zero_()
        return found


class DenseTap:
    """One int32 a row."""

    def __init__(self, spec: TableSpec, device: torch.device) -> None:
        self._table = spec.name
        self._counts = torch.zeros(spec.rows, dtype=torch.int32, device=device)
        self._host = self._counts.numpy() if device.type == "cpu" else None
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._lengths = _Lengths(device)

    def add(self, ids: torch.Tensor, lengths: torch.Tensor) -> None:
        """int[n] ids of the table (checked by the caller), integer[b] lengths."""
        if self._host is not None:
            # Twice as fast as scatter_add_ on one CPU thread.
            np.add.at(self._host, ids.numpy(), np.int32(1))
        else:
            ids = ids.to(torch.int64)
            self._counts.scatter_add_(0, ids, self._one.expand(ids.shape[0]))
        self._lengths.add(lengths)

    def take(self) -> TableCounts:
        """What was counted, on the host; starts from zero again. Waits for the device."""
        rows = torch.nonzero(self._counts).squeeze(1)
        counts = self._counts[rows].to(torch.int64)
        self._counts.zero_()
        return RowCounts(self._table, rows.cpu().numpy(), counts.cpu().numpy(), self._lengths.take())


class CellTap:
    """4 x 2^k int32 count-min cells with the daemon's hash functions, HyperLogLog registers, and a uniform sample of
    the accesses (Vitter's reservoir, a batch at a time), from which the daemon learns which rows to ask for.

    A row with a share p of the n accesses of an interval is missing from a sample of s with probability (1-p)^s:
    at s = 16,384 a row of a two-thousandth of the traffic once in 3,500 intervals.
    """

    def __init__(self, spec: TableSpec, log2_width: int, sampled: int, device: torch.device) -> None:
        self._table = spec.name
        self._log2_width = log2_width
        self._cells = torch.zeros(DEPTH << log2_width, dtype=torch.int32, device=device)
        self._registers = torch.zeros(1 << LOG2_REGISTERS, dtype=torch.int32, device=device)
        # The last slot takes what is not sampled, so that shapes do not depend on the draws.
        self._sample = torch.zeros(sampled + 1, dtype=torch.int64, device=device)
        self._sampled = sampled
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._lengths = _Lengths(device)
        self._accesses = 0
        self._block = _BLOCK_IDS if device.type == "cpu" else 2**31

    def add(self, ids: torch.Tensor, lengths: torch.Tensor) -> None:
        """As ``DenseTap.add``."""
        ids = ids.to(torch.int64)
        for block in torch.split(ids, self._block):
            found = hashed(block, self._log2_width)
            self._cells.scatter_add_(0, found.cells.reshape(-1), self._one.expand(found.cells.numel()))
            self._registers.scatter_reduce_(0, found.registers, found.ranks.to(torch.int32), "amax")
        self._add_to_sample(ids)
        self._lengths.add(lengths)

    def take(self) -> TableCounts:
        """As ``DenseTap.take``."""
        kept = min(self._accesses, self._sampled)
        found = CellCounts(
            self._table,
            self._log2_width,
            self._cells.cpu().numpy().astype(np.int64),
            self._registers.cpu().numpy().astype(np.uint8),
            self._sample[:kept].cpu().numpy().copy(),
            self._accesses,
            self._lengths.take(),
        )
        self._cells.zero_()
        self._registers.zero_()
        self._accesses = 0
        return found

    def _add_to_sample(self, ids: torch.Tensor) -> None:
        n = ids.shape[0]
        number = torch.arange(self._accesses, self._accesses + n, device=ids.device)
        slot = (torch.rand(n, dtype=torch.float64, device=ids.device) * (number + 1)).to(torch.int64)
        slot = torch.where(number < self._sampled, number, slot.clamp(max=self._sampled))
        self._sample.scatter_(0, slot, ids)
        self._accesses += n
