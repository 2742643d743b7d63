"""Cold rows in a file that is written in the order in which rows leave fast memory.

Rows that leave together fill whole blocks, so a write reads nothing before and seven rows of 512 bytes cost one
operation; an index in memory finds them. Blocks whose rows were mostly written again elsewhere are cleaned: their other
rows move (Rosenblum, Ousterhout: The design and implementation of a log-structured file system, ACM TOCS 10(1), 1992).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.arrays import Int64Array, UInt8Array
from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.slow.block_file import PAGE_BYTES, BlockBatch, BlockRows, aligned_bytes
from flexd.embedding.store.slow.cold_rows import FreshRows

_WINDOW = 4096
"""Blocks that a search looks at, at least."""
_CHOICES = 16
"""Cleaning takes the emptiest of so many blocks for each that it is to free: near to the emptiest of all (Mitzenmacher:
The power of two choices, 2001; Desnoyers: Analytic models of SSD write performance, ACM TOS 2014), without a search of
all."""


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
_SPACE = 2
"""Blocks of the file over those that all rows fill: with more, cleaning moves fewer rows."""
_MAX_ROWS_PER_BLOCK = 255
_READ_BYTES, _WRITE_BYTES = 4 << 20, 4 << 20
_BEHIND = 2
"""Buffers of ``_WRITE_BYTES`` that are written while training goes on."""
_SUM_BYTES, _SLOT_BYTES = 8, 8


def log_rows_per_block(row_bytes: int) -> tuple[int, int]:
    """Return (rows of a block, its bytes): one page, or as few as a row needs."""
    block_bytes = -(-(_SUM_BYTES + _SLOT_BYTES + row_bytes) // PAGE_BYTES) * PAGE_BYTES
    return min(_MAX_ROWS_PER_BLOCK, (block_bytes - _SUM_BYTES) // (row_bytes + _SLOT_BYTES)), block_bytes


@dataclass
class _Staged:
    """Blocks on their way to the file, which are read from here until they are there."""

    buffer: UInt8Array
    blocks: Int64Array = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    written: Future[int] | None = None


@dataclass(frozen=True)
class _Fetch:
    """Blocks that are read.

    Attributes:
        on_disk: bool [n], which of ``blocks`` are read from the file, into the first of ``buffer``.
        from_memory: places in ``blocks`` of the others, and these.
    """

    blocks: Int64Array
    on_disk: npt.NDArray[np.bool_]
    from_memory: list[tuple[Int64Array, UInt8Array]]
    buffer: UInt8Array
    batch: BlockBatch | None


class LogRows(BlockRows):
    """See ``BlockRows``. ``write`` returns when the rows are in a buffer that a thread writes: an
    error of the disk is raised by a later call, the first one that reads what may be lost at the latest.

    The file is sparse, and at most twice as large as its rows.
    """

    def __init__(self, path: Path, rows: int, row_bytes: int, fresh: FreshRows, **limits: float) -> None:
        per_block, block_bytes = log_rows_per_block(row_bytes)
        blocks = _SPACE * -(-rows // per_block) + 1
        super().__init__(path, rows, row_bytes, fresh, per_block, blocks, block_bytes, **limits)
        self._space = BlockSpace(blocks, self._per_block)
        # 1 + the place of each row among all rows of all blocks; 0: never written.
        self._places = np.zeros(self._rows, dtype=np.int32 if blocks * self._per_block < 2**31 - 1 else np.int64)
        self._buffers = [_blocks_of(max(1, min(blocks, _READ_BYTES // block_bytes)), block_bytes) for _ in range(2)]
        """One is read into while what is in the other is used."""
        self._staged = [
            _Staged(_blocks_of(max(1, min(blocks, _WRITE_BYTES // block_bytes)), block_bytes)) for _ in range(_BEHIND)
        ]
        """In the order of their writes."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="flexd-slow-writer")

    @property
    def fast_nbytes(self) -> int:
        buffers = [*self._buffers, *(staged.buffer for staged in self._staged)]
        return self._places.nbytes + self._space.nbytes + sum(buffer.nbytes for buffer in buffers)

    def _read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = self._checked(slots)
        packed = np.empty((len(wanted), self._row_bytes), dtype=np.uint8)
        places = self._places[wanted].astype(np.int64) - 1
        written = np.flatnonzero(places >= 0)
        order = written[np.argsort(places[written], kind="stable")]
        of_rows, within = np.divmod(places[order], self._per_block)
        windows = list(_windows(of_rows, len(self._buffers[0])))
        with closing(self._fetched([window[0] for window in windows])) as fetched:
            for (blocks, first, last, at), buffer in zip(windows, fetched, strict=True):
                if (self._slots(buffer)[at, within[first:last]] != wanted[order[first:last]]).any():
                    raise self._not_what_was_written(blocks)
                packed[order[first:last]] = self._payload(buffer)[at, within[first:last]]
        return torch.from_numpy(packed), torch.from_numpy(np.flatnonzero(places < 0))

    def _write(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        given, data = self._checked(slots), packed.numpy()
        at_once = len(self._staged[0].buffer) * self._per_block
        for first in range(0, len(given), at_once):
            part = given[first : first + at_once]
            self._forget(part)
            missing = -(-len(part) // self._per_block) - self._space.free
            if missing > 0:
                self._clean(missing)
            self._append(part, data[first : first + at_once])

    def close(self) -> None:
        self._writer.shutdown(wait=True)
        self._file.close()

    def _checked(self, slots: torch.Tensor) -> Int64Array:
        """Return the slots, of a file that can be used."""
        self._file.check()
        for staged in self._staged:
            if staged.written is not None and staged.written.done():
                self._end(staged)
        wanted: Int64Array = slots.numpy()
        self._check_slots(wanted)
        return wanted

    def _forget(self, slots: Int64Array) -> None:
        """Give up what was written of these rows."""
        places = self._places[slots].astype(np.int64) - 1
        self._space.drop(places[places >= 0] // self._per_block)
        self._places[slots] = 0

    def _append(self, slots: Int64Array, packed: UInt8Array) -> None:
        """Stage rows that are in no block, as many as fit into one buffer, for the writer."""
        staged = self._staged.pop(0)
        self._staged.append(staged)
        self._end(staged)
        if not len(slots):
            return
        count = -(-len(slots) // self._per_block)
        counts = np.full(count, self._per_block, dtype=np.int64)
        counts[-1] = len(slots) - (count - 1) * self._per_block
        staged.blocks = self._space.allocate(counts)
        buffer = staged.buffer[:count]
        at, within = np.divmod(np.arange(len(slots)), self._per_block)
        of_block = self._slots(buffer)
        of_block[:] = -1
        of_block[at, within] = slots
        self._payload(buffer)[at, within] = packed
        self._places[slots] = staged.blocks[at] * self._per_block + within + 1
        self.traffic.bytes_written += buffer.nbytes
        staged.written = self._writer.submit(self._write_blocks, staged.blocks, buffer)

    def _write_blocks(self, blocks: Int64Array, buffer: UInt8Array) -> int:
        self._sums.seal(buffer.view(np.uint64))
        return self._file.write(blocks, buffer)

    def _end(self, staged: _Staged) -> None:
        """Wait until the blocks are in the file."""
        if staged.written is not None:
            # Kept where it failed: no call succeeds after that.
            self.traffic.operations += staged.written.result()
            staged.written = None

    def _clean(self, gain: int) -> None:
        """Free so many blocks by packing rows of others together."""
        cleaned = self._space.to_clean(gain)
        slots, rows = [], []
        at_a_time = len(self._buffers[0])
        windows = [cleaned[first : first + at_a_time] for first in range(0, len(cleaned), at_a_time)]
        with closing(self._fetched(windows)) as fetched:
            for blocks, buffer in zip(windows, fetched, strict=True):
                of_blocks = self._slots(buffer)
                places = blocks[:, None] * self._per_block + np.arange(self._per_block) + 1
                at, within = np.nonzero((of_blocks >= 0) & (self._places[np.maximum(of_blocks, 0)] == places))
                slots.append(of_blocks[at, within])
                rows.append(self._payload(buffer)[at, within])
        moved, data = np.concatenate(slots), np.concatenate(rows)
        self._forget(moved)
        at_once = len(self._staged[0].buffer) * self._per_block
        for first in range(0, len(moved), at_once):
            self._append(moved[first : first + at_once], data[first : first + at_once])

    def _fetched(self, windows: Sequence[Int64Array]) -> Generator[UInt8Array, None, None]:
        """Yield uint8 [n, block_bytes] of the ascending blocks of each window; the next ones are read meanwhile.

        What is yielded is valid until the one after it.
        """
        started: deque[_Fetch] = deque()
        try:
            for number, blocks in enumerate(windows):
                started.append(self._start_fetch(blocks, self._buffers[number % 2]))
                if number:
                    yield self._end_fetch(started)
            if started:
                yield self._end_fetch(started)
        finally:
            for fetch in started:  # an error: the buffer must not be read into behind it
                if fetch.batch is not None:
                    wait(fetch.batch.futures, self._deadline_seconds)

    def _start_fetch(self, blocks: Int64Array, buffer: UInt8Array) -> _Fetch:
        on_disk = np.ones(len(blocks), dtype=np.bool_)
        from_memory: list[tuple[Int64Array, UInt8Array]] = []
        for staged in reversed(self._staged):  # the newest first: a block may have been freed and filled again
            if staged.written is None:
                continue
            if staged.written.done():
                self._end(staged)
                continue
            at = np.searchsorted(staged.blocks, blocks).clip(max=len(staged.blocks) - 1)
            mine = np.flatnonzero(on_disk & (staged.blocks[at] == blocks))
            from_memory.append((mine, staged.buffer[at[mine]]))
            on_disk[mine] = False
        count = int(on_disk.sum())
        batch = self._file.start_read(blocks[on_disk], buffer[:count]) if count else None
        return _Fetch(blocks, on_disk, from_memory, buffer, batch)

    def _end_fetch(self, started: deque[_Fetch]) -> UInt8Array:
        """Return the blocks of the first of these, and take it away."""
        fetch = started[0]
        buffer = fetch.buffer[: len(fetch.blocks)]
        if fetch.batch is not None:
            self.traffic.operations += self._file.finish(fetch.batch)
            read = fetch.buffer[: fetch.batch.blocks]
            self.traffic.bytes_read += read.nbytes
            wrong = self._sums.wrong(read.view(np.uint64))
            if len(wrong):
                raise self._not_what_was_written(fetch.blocks[fetch.on_disk][wrong])
            if len(read) < len(buffer):
                buffer[fetch.on_disk] = read.copy()
        for mine, data in fetch.from_memory:
            buffer[mine] = data
        started.popleft()
        return buffer

    def _not_what_was_written(self, blocks: Int64Array) -> SlowMemoryError:
        return SlowMemoryError(
            f"{self._file.path}: blocks are not what was written, the first at byte "
            f"{PAGE_BYTES + int(blocks[0]) * self._file.block_bytes}",
            remedy="start again from the checkpoint, and look at the disk",
        )

    def _slots(self, buffer: UInt8Array) -> Int64Array:
        """View of the slots of the rows in blocks, int64 [blocks, rows_per_block], -1 where there is none."""
        return buffer.view(np.int64)[:, 1 : 1 + self._per_block]

    def _payload(self, buffer: UInt8Array) -> UInt8Array:
        """View of the rows of blocks, uint8 [blocks, rows_per_block, row_bytes]."""
        first = _SUM_BYTES + _SLOT_BYTES * self._per_block
        rows = buffer[:, first : first + self._per_block * self._row_bytes]
        return rows.reshape(len(buffer), self._per_block, self._row_bytes)


def _blocks_of(count: int, block_bytes: int) -> UInt8Array:
    return aligned_bytes(count * block_bytes).reshape(count, block_bytes)


def _windows(of_rows: Int64Array, most: int) -> Iterator[tuple[Int64Array, int, int, Int64Array]]:
    """Split int64 [n] ascending blocks of rows into windows of at most ``most`` blocks.

    Yields:
        int64 ascending blocks of a window, its first row and the one after its last, and int64 the place of each of
        these rows' blocks in the window.
    """
    starts = np.flatnonzero(np.diff(of_rows, prepend=-1) > 0)
    bounds = np.append(starts, len(of_rows))
    for first in range(0, len(starts), most):
        mine = bounds[first : first + most + 1]
        yield of_rows[mine[:-1]], int(mine[0]), int(mine[-1]), np.repeat(np.arange(len(mine) - 1), np.diff(mine))
