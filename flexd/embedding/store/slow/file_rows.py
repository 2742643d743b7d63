"""Cold rows in a file: packed into checksummed blocks, sparse, read and written in batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexd.core.arrays import Int64Array, first_of_run
from flexd.embedding.store.slow.block_file import PAGE_BYTES, BlockFile, aligned_bytes
from flexd.embedding.store.slow.cold_rows import ColdRows, FreshRows

# At the start of a block: uint64 checksum of the rest, uint64 mask of the rows that were written.
_HEAD_BYTES = 16
# Blocks that are in memory at once.
_WINDOW_BYTES = 16 << 20


class BlockRows(ColdRows):
    """Rows in the blocks of a file.

    The file holds nothing of worth beyond its process: a run begins with a new one (``BlockFile``), and its rows come
    from a checkpoint.

    Args:
        row_bytes: of a packed row.
        fresh: makes rows that were never written.
        per_block: rows of a full block.
        blocks: of the file.
        block_bytes: a multiple of ``PAGE_BYTES``.
        head_bytes: of a block, before its rows.
        limits: arguments of ``BlockFile``.

    Raises:
        SlowMemoryError: as ``BlockFile``.
    """

    def __init__(
        self, path: Path, row_bytes: int, fresh: FreshRows, per_block: int, blocks: int, block_bytes: int,
        head_bytes: int, **limits: Any,
    ) -> None:  # fmt: skip
        super().__init__(fresh)
        self._row_bytes, self._per_block = row_bytes, per_block
        self._file = BlockFile(path, blocks, block_bytes, **limits)
        window = max(1, min(blocks, _WINDOW_BYTES // block_bytes))
        self._buffer = aligned_bytes(window * block_bytes).reshape(window, block_bytes)
        of_rows = self._buffer[:, head_bytes : head_bytes + per_block * row_bytes]
        # View of the rows in ``_buffer``.
        self._payload = of_rows.reshape(window, per_block, row_bytes)

    def close(self) -> None:
        self._file.close()

    def _loaded(self, places: Int64Array) -> Iterator[tuple[Int64Array, Int64Array, Int64Array, Int64Array]]:
        """Fill the buffer with the blocks of rows, as many at a time as it holds.

        Args:
            places: int64 [n] places of rows among those of all blocks.

        Yields:
            int64 [b] ascending blocks, now the first of the buffer; int64 [m] numbers of the rows in them, in which
            block of the buffer each is, and its place there.
        """
        self._file.check()
        order = np.argsort(places, kind="stable")
        of_rows, within = np.divmod(places[order], self._per_block)
        starts = np.flatnonzero(first_of_run(of_rows)) if len(places) else places
        bounds = np.append(starts, len(places))
        for first in range(0, len(starts), len(self._buffer)):
            mine = bounds[first : first + len(self._buffer) + 1]
            blocks, rows = of_rows[mine[:-1]], slice(mine[0], mine[-1])
            self._load(blocks)
            yield blocks, order[rows], np.repeat(np.arange(len(blocks)), np.diff(mine)), within[rows]

    def _load(self, blocks: Int64Array) -> None:
        """Fill the first rows of the buffer with int64 [b] ascending blocks."""
        self._file.read(blocks, self._buffer[: len(blocks)])
        self.traffic.bytes_read += len(blocks) * self._file.block_bytes

    def _store(self, blocks: Int64Array) -> None:
        """Write the first rows of the buffer to int64 [b] ascending blocks."""
        self._file.write(blocks, self._buffer[: len(blocks)])
        self.traffic.bytes_written += len(blocks) * self._file.block_bytes


def rows_per_block(row_bytes: int, head_bytes: int = _HEAD_BYTES, most: int = 64) -> tuple[int, int]:
    """Return (rows of a block, its bytes): one page, or as few as a row needs."""
    block_bytes = -(-(head_bytes + row_bytes) // PAGE_BYTES) * PAGE_BYTES
    return min(most, (block_bytes - head_bytes) // row_bytes), block_bytes


class FileRows(BlockRows):
    """Row ``slot`` is in block ``slot // rows_per_block``.

    A block that was never written is a hole: it takes no room and is not read.
    """

    def __init__(self, path: Path, rows: int, row_bytes: int, fresh: FreshRows, **limits: Any) -> None:
        per_block, block_bytes = rows_per_block(row_bytes)
        blocks = -(-rows // per_block)
        super().__init__(path, row_bytes, fresh, per_block, blocks, block_bytes, _HEAD_BYTES, **limits)
        self._masks = self._buffer.view(np.uint64)[:, 1]
        # A bit a block.
        self._written = np.zeros(-(-blocks // 8), dtype=np.uint8)

    @property
    def fast_nbytes(self) -> int:
        return self._written.nbytes + self._buffer.nbytes

    def _read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = np.empty((len(slots), self._row_bytes), dtype=np.uint8)
        unwritten = np.zeros(len(slots), dtype=np.bool_)
        for _, rows, at, within in self._loaded(slots.numpy()):
            packed[rows] = self._payload[at, within]
            unwritten[rows] = (self._masks[at] >> within.astype(np.uint64)) & np.uint64(1) == 0
        return torch.from_numpy(packed), torch.from_numpy(np.flatnonzero(unwritten))

    def _write(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        data = packed.numpy()
        for blocks, rows, at, within in self._loaded(slots.numpy()):
            self._payload[at, within] = data[rows]
            np.bitwise_or.at(self._masks, at, np.uint64(1) << within.astype(np.uint64))
            self._store(blocks)
            np.bitwise_or.at(self._written, blocks >> 3, (1 << (blocks & 7)).astype(np.uint8))

    def _load(self, blocks: Int64Array) -> None:
        """Holes are zeros."""
        there = (self._written[blocks >> 3] >> (blocks & 7).astype(np.uint8)) & 1 == 1
        found, buffer = self._buffer[: np.count_nonzero(there)], self._buffer[: len(blocks)]
        if len(found):
            super()._load(blocks[there])
        if len(found) < len(blocks):
            buffer[there] = found.copy()
            buffer[~there] = 0
