"""Cold rows in a file that is written in the order in which rows leave fast memory.

Rows that leave together fill whole blocks, so a write reads nothing before and seven rows of 512 bytes cost one
operation; an index in memory finds them. Blocks whose rows were mostly written again elsewhere are cleaned: their other
rows move (Rosenblum, Ousterhout: The design and implementation of a log-structured file system, ACM TOCS 10(1), 1992).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexd.core.arrays import Int64Array, UInt8Array
from flexd.embedding.store.slow.cold_rows import FreshRows
from flexd.embedding.store.slow.file_rows import BlockRows, rows_per_block

# Blocks that a search looks at, at least.
_WINDOW = 4096
# Cleaning takes the emptiest of so many blocks for each that it is to free: near to the emptiest of all (Mitzenmacher:
# The power of two choices, 2001; Desnoyers: Analytic models of SSD write performance, ACM TOS 2014), without a search
# of all.
_CHOICES = 16


class BlockSpace:
    """Counts of valid rows by block; a block without one is free.

    Args:
        per_block: rows that a block holds, at most 255.
    """

    def __init__(self, blocks: int, per_block: int) -> None:
        self._valid = np.zeros(blocks, dtype=np.uint8)
        self._per_block = per_block
        self._next_free = self._next_cleaned = 0
        self.free = blocks

    @property
    def nbytes(self) -> int:
        return self._valid.nbytes

    def allocate(self, counts: Int64Array) -> Int64Array:
        """Return int64 [n] ascending free blocks, which hold int64 [n] rows each from now on, all above 0.

        Adjoining blocks where there are some. The caller has checked ``free``.
        """
        if len(counts) > self.free:
            raise AssertionError(f"{self.free} free blocks, not {len(counts)}")
        found: list[Int64Array] = []
        missing, width = len(counts), max(_WINDOW, 4 * len(counts))
        while missing:
            window = self._valid[self._next_free : self._next_free + width]
            free = np.flatnonzero(window == 0)[:missing] + self._next_free
            missing -= len(free)
            found.append(free)
            self._next_free = int(free[-1]) + 1 if not missing else self._next_free + len(window)
            if self._next_free >= len(self._valid):
                self._next_free = 0
        blocks = np.sort(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)
        self._valid[blocks] = counts
        self.free -= len(blocks)
        return blocks

    def drop(self, blocks: Int64Array) -> None:
        """Note that a row of each of int64 [n] blocks, repeats allowed, is valid no more."""
        distinct, counts = np.unique(blocks, return_counts=True)
        self._valid[distinct] -= counts.astype(np.uint8)
        self.free += int((self._valid[distinct] == 0).sum())

    def to_clean(self, gain: int) -> Int64Array:
        """Return int64 ascending blocks of few valid rows: with these packed together, ``gain`` more blocks are free,
        or as many as can be."""
        width, blocks = max(_WINDOW, _CHOICES * gain), len(self._valid)
        while True:
            width = min(width, blocks)
            numbers = (self._next_cleaned + np.arange(width)) % blocks
            valid = self._valid[numbers].astype(np.int64)
            some = np.flatnonzero((valid > 0) & (valid < self._per_block))
            some = some[np.argsort(valid[some], kind="stable")]
            packed = -(-np.cumsum(valid[some]) // self._per_block)
            gains = np.arange(1, len(some) + 1) - packed
            enough = int(np.searchsorted(gains, gain))
            if enough < len(some) or width == blocks:
                self._next_cleaned = (self._next_cleaned + width) % blocks
                return np.sort(numbers[some[: enough + 1]])
            width *= 4


INDEX_BYTES = 5
"""Of a row in memory: where it is, and its part of the counts of blocks."""
# Blocks of the file over those that all rows fill: with more, cleaning moves fewer rows.
_SPACE = 2
_SUM_BYTES, _SLOT_BYTES = 8, 8


class LogRows(BlockRows):
    """See ``BlockRows``. The file is sparse, and at most twice as large as its rows."""

    def __init__(self, path: Path, rows: int, row_bytes: int, fresh: FreshRows, **limits: Any) -> None:
        per_block, block_bytes = rows_per_block(_SLOT_BYTES + row_bytes, _SUM_BYTES, most=255)
        blocks, head_bytes = _SPACE * -(-rows // per_block) + 1, _SUM_BYTES + _SLOT_BYTES * per_block
        super().__init__(path, row_bytes, fresh, per_block, blocks, block_bytes, head_bytes, **limits)
        # View of the slots of the rows in ``_buffer``, -1 where there is none.
        self._slots = self._buffer.view(np.int64)[:, 1 : 1 + per_block]
        self._space = BlockSpace(blocks, per_block)
        # 1 + the place of each row among all rows of all blocks; 0: never written.
        self._places = np.zeros(rows, dtype=np.int32 if blocks * per_block < 2**31 - 1 else np.int64)

    @property
    def fast_nbytes(self) -> int:
        return self._places.nbytes + self._space.nbytes + self._buffer.nbytes

    def _read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = slots.numpy()
        packed = np.empty((len(wanted), self._row_bytes), dtype=np.uint8)
        places = self._places[wanted].astype(np.int64) - 1
        written = np.flatnonzero(places >= 0)
        for blocks, numbers, at, within in self._loaded(places[written]):
            rows = written[numbers]
            if (self._slots[at, within] != wanted[rows]).any():
                raise self._file.other_blocks(blocks)
            packed[rows] = self._payload[at, within]
        return torch.from_numpy(packed), torch.from_numpy(np.flatnonzero(places < 0))

    def _write(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        given, data = slots.numpy(), packed.numpy()
        at_once = len(self._buffer) * self._per_block
        for first in range(0, len(given), at_once):
            part = given[first : first + at_once]
            self._forget(part)
            missing = -(-len(part) // self._per_block) - self._space.free
            if missing > 0:
                self._clean(missing)
            self._append(part, data[first : first + at_once])

    def _forget(self, slots: Int64Array) -> None:
        places = self._places[slots].astype(np.int64) - 1
        self._space.drop(places[places >= 0] // self._per_block)
        self._places[slots] = 0

    def _append(self, slots: Int64Array, packed: UInt8Array) -> None:
        """Write rows that are in no block, as many as fit into the buffer."""
        at, within = np.divmod(np.arange(len(slots)), self._per_block)
        blocks = self._space.allocate(np.bincount(at))
        self._slots[: len(blocks)] = -1
        self._slots[at, within] = slots
        self._payload[at, within] = packed
        self._places[slots] = blocks[at] * self._per_block + within + 1
        self._store(blocks)

    def _clean(self, gain: int) -> None:
        """Free so many blocks by packing rows of others together."""
        cleaned = self._space.to_clean(gain)
        slots, rows = [], []
        for first in range(0, len(cleaned), len(self._buffer)):
            blocks = cleaned[first : first + len(self._buffer)]
            self._load(blocks)
            of_blocks = self._slots[: len(blocks)]
            places = blocks[:, None] * self._per_block + np.arange(self._per_block) + 1
            at, within = np.nonzero((of_blocks >= 0) & (self._places[np.maximum(of_blocks, 0)] == places))
            slots.append(of_blocks[at, within])
            rows.append(self._payload[at, within])
        moved, data = np.concatenate(slots), np.concatenate(rows)
        self._forget(moved)
        at_once = len(self._buffer) * self._per_block
        for first in range(0, len(moved), at_once):
            self._append(moved[first : first + at_once], data[first : first + at_once])
