"""Cold rows in a file: packed into checksummed blocks, sparse, read and written in batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.arrays import Int64Array, UInt8Array
from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.slow.block_file import PAGE_BYTES, BlockRows, aligned_bytes
from flexd.embedding.store.slow.cold_rows import FreshRows

_HEAD_BYTES = 16
"""At the start of a block: uint64 checksum of the rest, uint64 mask of the rows that were written."""
_MAX_ROWS_PER_BLOCK = 64
_WINDOW_BYTES = 16 << 20
"""Blocks that are in memory at once."""


def rows_per_block(row_bytes: int) -> tuple[int, int]:
    """Return (rows of a block, its bytes): one page, or as few as a row needs."""
    block_bytes = -(-(_HEAD_BYTES + row_bytes) // PAGE_BYTES) * PAGE_BYTES
    return min(_MAX_ROWS_PER_BLOCK, (block_bytes - _HEAD_BYTES) // row_bytes), block_bytes


class FileRows(BlockRows):
    """See ``BlockRows``. Row ``slot`` is in block ``slot // rows_per_block``.

    A block that was never written is a hole: it takes no room and is not read.
    """

    def __init__(self, path: Path, rows: int, row_bytes: int, fresh: FreshRows, **limits: float) -> None:
        per_block, block_bytes = rows_per_block(row_bytes)
        super().__init__(path, rows, row_bytes, fresh, per_block, -(-rows // per_block), block_bytes, **limits)
        self._window = max(1, _WINDOW_BYTES // block_bytes)
        self._buffer = aligned_bytes(self._window * block_bytes).reshape(self._window, block_bytes)
        self._written = np.zeros(-(-self._blocks // 8), dtype=np.uint8)
        """A bit a block."""

    @property
    def fast_nbytes(self) -> int:
        return self._written.nbytes + self._buffer.nbytes

    def _read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = np.empty((len(slots), self._row_bytes), dtype=np.uint8)
        made = np.zeros(len(slots), dtype=np.bool_)
        for blocks, rows, at, place in self._loaded(slots.numpy()):
            packed[rows] = self._payload(len(blocks))[at, place]
            made[rows] = (self._masks(len(blocks))[at] >> place.astype(np.uint64)) & np.uint64(1) == 0
        return torch.from_numpy(packed), torch.from_numpy(np.flatnonzero(made))

    def _write(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        data = packed.numpy()
        for blocks, rows, at, place in self._loaded(slots.numpy()):
            self._payload(len(blocks))[at, place] = data[rows]
            np.bitwise_or.at(self._masks(len(blocks)), at, np.uint64(1) << place.astype(np.uint64))
            filled = self._buffer[: len(blocks)]
            self._sums.seal(filled.view(np.uint64))
            self.traffic.operations += self._file.write(blocks, filled)
            self.traffic.bytes_written += filled.nbytes
            np.bitwise_or.at(self._written, blocks >> 3, (1 << (blocks & 7)).astype(np.uint8))

    def close(self) -> None:
        self._file.close()

    def _loaded(self, slots: Int64Array) -> Iterator[tuple[Int64Array, Int64Array, Int64Array, Int64Array]]:
        """Fill the buffer with as many blocks of these slots at a time as it holds.

        Yields:
            int64 [b] ascending blocks, now the first of the buffer; int64 [n] places in ``slots`` of the rows in them;
            int64 [n] in which block of the buffer each row is, and int64 [n] the row's place in it.
        """
        self._file.check()
        self._check_slots(slots)
        order = np.argsort(slots, kind="stable")
        of_slots = slots[order] // self._per_block
        starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(slots)), np.bool_), np.diff(of_slots) > 0]))
        blocks, starts = of_slots[starts], np.append(starts, len(slots))
        for first in range(0, len(blocks), self._window):
            of_window = blocks[first : first + self._window]
            bounds = starts[first : first + len(of_window) + 1]
            rows = order[bounds[0] : bounds[-1]]
            at = np.repeat(np.arange(len(of_window)), np.diff(bounds))
            self._load(of_window)
            yield of_window, rows, at, slots[rows] - of_window[at] * self._per_block

    def _load(self, blocks: Int64Array) -> None:
        """Fill the first rows of the buffer with these blocks, holes with zeros."""
        there = (self._written[blocks >> 3] >> (blocks & 7).astype(np.uint8)) & 1 == 1
        buffer = self._buffer[: len(blocks)]
        count = int(there.sum())
        if count:
            self.traffic.operations += self._file.read(blocks[there], self._buffer[:count])
            self.traffic.bytes_read += count * buffer.shape[1]
            self._check(blocks[there], self._buffer[:count])
        if count < len(blocks):
            if count:
                buffer[there] = self._buffer[:count].copy()
            buffer[~there] = 0

    def _check(self, blocks: Int64Array, buffer: UInt8Array) -> None:
        wrong = self._sums.wrong(buffer.view(np.uint64))
        if len(wrong):
            raise SlowMemoryError(
                f"{self._file.path}: {len(wrong)} of {len(blocks)} blocks are not what was written, the first of rows "
                f"from slot {int(blocks[wrong[0]]) * self._per_block}",
                remedy="start again from the checkpoint, and look at the disk",
            )

    def _payload(self, blocks: int) -> UInt8Array:
        """View of the rows of the first blocks of the buffer, uint8 [blocks, rows_per_block, row_bytes]."""
        end = _HEAD_BYTES + self._per_block * self._row_bytes
        return self._buffer[:blocks, _HEAD_BYTES:end].reshape(blocks, self._per_block, self._row_bytes)

    def _masks(self, blocks: int) -> npt.NDArray[np.uint64]:
        return self._buffer[:blocks].view(np.uint64)[:, 1]
