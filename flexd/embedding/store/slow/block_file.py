"""Blocks of a file, read and written in batches: sorted, adjoining ones in one call, several calls in flight."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexd.core.arrays import Int64Array, UInt8Array, UInt64Array, places_of_runs
from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.slow.cold_rows import ColdRows, FreshRows

PAGE_BYTES = 4096
"""Unit of direct I/O: offsets, lengths and buffers are multiples of it."""
MAX_CALL_BYTES = 1 << 20
_MARK = b"flexd slow rows 1\n"
"""Begins the first page, so that no other file is taken for one of these."""
_SLOW_DISK = "look at the disk (iostat), or put the file on a faster one"
_DIRECT = getattr(os, "O_DIRECT", 0)


def aligned_bytes(count: int) -> UInt8Array:
    """Return uint8 [count] at the start of a page; its pages are freed with it."""
    return np.frombuffer(mmap.mmap(-1, max(1, count)), dtype=np.uint8, count=count)


_GOLDEN = 0x9E3779B97F4A7C15


class BlockSums:
    """Multilinear hash of the 64-bit words of a block after the first (Lemire, Kaser: Strongly universal string hashing
    is fast, 2014, section 3) with odd factors modulo 2^64, so that any one changed word changes it.

    Not zero for a block of zeros, which is a hole.
    """

    def __init__(self, block_bytes: int) -> None:
        # splitmix64's first round.
        mixed = np.arange(1, block_bytes // 8, dtype=np.uint64) * np.uint64(_GOLDEN)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        self._factors = (mixed ^ (mixed >> np.uint64(27))) | np.uint64(1)

    def of(self, words: UInt64Array) -> UInt64Array:
        """uint64 [n, words of a block] -> uint64 [n]."""
        sums: UInt64Array = words[:, 1:] @ self._factors
        return sums + np.uint64(_GOLDEN)

    def seal(self, words: UInt64Array) -> None:
        """Write the checksum of each block into its first word."""
        words[:, 0] = self.of(words)

    def wrong(self, words: UInt64Array) -> npt.NDArray[np.int64]:
        """Return int64, ascending: the blocks whose first word is not their checksum."""
        return np.flatnonzero(words[:, 0] != self.of(words))


QUEUE_CALLS = 128
"""In flight at once: below the 256 that block devices take by default, so that handing over does not wait."""
_WAIT_SECONDS = 1.0
_SYSTEM_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents and io_submit."""
_CALL = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("flags", "<i4"), ("opcode", "<u2"), ("priority", "<i2"), ("file", "<u4"),
        ("address", "<u8"), ("size", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("more", "<u8"),
    ]
)  # fmt: skip
"""struct iocb of linux/aio_abi.h."""
_EVENT = np.dtype([("data", "<u8"), ("call", "<u8"), ("result", "<i8"), ("second", "<i8")])
_READS, _WRITES = 0, 1


class KernelQueue:
    """Queue of calls in the kernel. Calls come from one thread at a time; ``make`` returns None where there is none."""

    def __init__(self, context: int, numbers: tuple[int, int, int, int]) -> None:
        self._context, self._numbers = context, numbers
        self._library = ctypes.CDLL(None, use_errno=True)

    @classmethod
    def make(cls) -> KernelQueue | None:
        numbers = _SYSTEM_CALLS.get(platform.machine())
        if sys.platform != "linux" or numbers is None or sys.byteorder != "little":
            return None
        context = ctypes.c_ulong(0)
        library = ctypes.CDLL(None, use_errno=True)
        # Refused by some sandboxes, and where fs.aio-max-nr is used up.
        if library.syscall(ctypes.c_long(numbers[0]), ctypes.c_long(QUEUE_CALLS), ctypes.byref(context)) != 0:
            return None
        return cls(context.value, numbers)

    def run(
        self, file: int, offsets: Int64Array, addresses: Int64Array, sizes: Int64Array, *, writes: bool, seconds: float
    ) -> Int64Array | None:
        """Make the calls, and wait for them.

        Args:
            file: descriptor, opened for direct I/O.
            offsets, addresses, sizes: int64 [n], in the file, in memory, and of each call.

        Returns:
            int64 [n]: bytes moved, or minus the number of the error, of each call; -EAGAIN (11) of calls that the
            kernel refused to queue. None: not all have ended within ``seconds``; they still use the memory.
        """
        count = len(offsets)
        calls = np.zeros(count, _CALL)
        calls["data"], calls["opcode"], calls["file"] = np.arange(count), _WRITES if writes else _READS, file
        calls["address"], calls["size"], calls["offset"] = addresses, sizes, offsets
        pointers = calls.ctypes.data + _CALL.itemsize * np.arange(count, dtype=np.int64)
        events, results = np.zeros(QUEUE_CALLS, _EVENT), np.full(count, -11, dtype=np.int64)
        end = time.monotonic() + seconds
        given = ended = 0
        while ended < count:
            if given < count and given - ended < QUEUE_CALLS:
                taken = self._submit(min(QUEUE_CALLS - (given - ended), count - given), pointers[given:])
                given += max(0, taken)
                if taken <= 0 and given == ended:
                    break
            some = self._wait(max(1, (given - ended) // 2), events)
            results[events["data"][:some].astype(np.int64)] = events["result"][:some]
            ended += some
            if ended < count and time.monotonic() > end:
                return None
        return results

    def close(self) -> None:
        """Waits for calls that have not ended."""
        self._library.syscall(ctypes.c_long(self._numbers[1]), ctypes.c_ulong(self._context))

    def _submit(self, count: int, pointers: Int64Array) -> int:
        """Return how many calls the kernel has taken; -1 for none."""
        return int(
            self._library.syscall(
                ctypes.c_long(self._numbers[3]), ctypes.c_ulong(self._context), ctypes.c_long(count),
                ctypes.c_void_p(pointers.ctypes.data),
            )
        )  # fmt: skip

    def _wait(self, least: int, events: npt.NDArray[np.void]) -> int:
        """Return how many calls ended: at least so many, or those of a second."""
        whole = int(_WAIT_SECONDS)
        until = (ctypes.c_long * 2)(whole, int((_WAIT_SECONDS - whole) * 1e9))
        ended = self._library.syscall(
            ctypes.c_long(self._numbers[2]), ctypes.c_ulong(self._context), ctypes.c_long(least),
            ctypes.c_long(len(events)), ctypes.c_void_p(events.ctypes.data), until,
        )  # fmt: skip
        return max(0, int(ended))


class BlockFile:
    """A new file of equal blocks after one page that marks it. One thread may read while another writes.

    Direct I/O where the file system has it, so that the page cache holds no second copy. Other processes are refused
    while it is open; a file that an ended run has left is emptied.

    Args:
        blocks: of ``block_bytes``, a multiple of ``PAGE_BYTES``; the file is sparse.
        threads: calls in flight at once where the kernel has no queue for them (``KernelQueue``), or the file system no
            direct I/O.
        deadline_seconds: of a batch.

    Raises:
        SlowMemoryError: the file cannot be made, is in use, or is something else.
    """

    def __init__(self, path: Path, blocks: int, block_bytes: int, *, threads: int, deadline_seconds: float) -> None:
        self.path, self.block_bytes = path, block_bytes
        self._deadline_seconds = deadline_seconds
        self._threads = threads
        self._late = ""
        try:
            self._file, direct = _open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT)
        except OSError as error:
            raise self._error("cannot be opened", error) from error
        try:
            self._begin(PAGE_BYTES + blocks * block_bytes)
        except OSError as error:
            os.close(self._file)
            raise self._error("cannot be made", error) from error
        except SlowMemoryError:
            os.close(self._file)
            raise
        self._reads, self._writes = _Lane(direct, threads), _Lane(direct, threads)

    def _begin(self, size: int) -> None:
        """Lock the file, and empty it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SlowMemoryError(
                f"{self.path}: is in use by another process", remedy="give each job a directory of its own"
            ) from None
        page = aligned_bytes(PAGE_BYTES)
        if os.fstat(self._file).st_size:
            os.preadv(self._file, [page.data], 0)
            if not page.tobytes().startswith(_MARK):
                raise SlowMemoryError(
                    f"{self.path}: exists, and is not what an ended run has left",
                    remedy="give another directory, or remove the file",
                )
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, size)
        page[:] = 0
        page[: len(_MARK)] = np.frombuffer(_MARK, dtype=np.uint8)
        self._call(page, 0, writes=True)

    def check(self) -> None:
        """Raise SlowMemoryError if the file is closed, was removed, or had a batch beyond its deadline."""
        if self._file < 0:
            raise SlowMemoryError(f"{self.path}: closed", remedy="make a new collection")
        if self._late:
            raise SlowMemoryError(self._late, remedy=_SLOW_DISK)
        if os.fstat(self._file).st_nlink == 0:
            raise SlowMemoryError(
                f"{self.path}: was removed while in use", remedy="start again from the checkpoint, and keep the file"
            )

    def read(self, blocks: Int64Array, out: UInt8Array) -> int:
        """Read uint8 [n, block_bytes] of ascending blocks into an aligned ``out``; return the number of calls."""
        return self.finish(self._start(blocks, out, writes=False))

    def start_read(self, blocks: Int64Array, out: UInt8Array) -> BlockBatch:
        """Begin ``read``, which ``finish`` ends; ``out`` is the reads' until then. Batches end in their order."""
        return self._start(blocks, out, writes=False)

    def write(self, blocks: Int64Array, data: UInt8Array) -> int:
        """Write uint8 [n, block_bytes], aligned, to ascending blocks; return the number of calls."""
        return self.finish(self._start(blocks, data, writes=True))

    def close(self) -> None:
        """Close the file and remove it; twice is fine."""
        if self._file >= 0:
            if os.fstat(self._file).st_nlink:  # else the file of that name is another's
                self.path.unlink(missing_ok=True)
            for lane in (self._reads, self._writes):
                lane.close(wait=not self._late)
            if not self._late:  # a late call must not find another file under its number
                os.close(self._file)
            self._file = -1

    def finish(self, batch: BlockBatch) -> int:
        """Wait for a batch within the deadline; return the number of its calls."""
        done, waiting = wait(batch.futures, self._deadline_seconds)
        late = bool(waiting) or not all(future.result() for future in done if future.exception() is None)
        if late:
            # Calls that are still on their way use the caller's buffer: no further batch may.
            self._late = f"{self.path}: {batch.blocks} blocks took more than {self._deadline_seconds:g} s"
        for future in done:
            future.result()
        if late:
            raise SlowMemoryError(self._late, remedy=_SLOW_DISK)
        return batch.calls

    def _start(self, blocks: Int64Array, data: UInt8Array, *, writes: bool) -> BlockBatch:
        firsts, counts = _runs(blocks, max(1, MAX_CALL_BYTES // self.block_bytes))
        starts = np.concatenate([[0], np.cumsum(counts)])
        lane = self._writes if writes else self._reads
        if lane.queue is not None:
            futures = [lane.pool.submit(self._queued, lane.queue, firsts, starts, counts, data, writes)]
        else:
            calls = list(zip(firsts.tolist(), starts[:-1].tolist(), counts.tolist(), strict=True))
            shares = [calls[number :: self._threads] for number in range(min(self._threads, len(calls)))]
            futures = [lane.pool.submit(self._one_by_one, share, data, writes) for share in shares]
        return BlockBatch(futures, len(blocks), len(firsts))

    def _one_by_one(self, calls: list[tuple[int, int, int]], data: UInt8Array, writes: bool) -> bool:
        """Make (first block, place in ``data``, blocks) calls, and return True: all have ended."""
        for block, start, count in calls:
            self._call(data[start : start + count].reshape(-1), PAGE_BYTES + block * self.block_bytes, writes=writes)
        return True

    def _queued(
        self,
        queue: KernelQueue,
        firsts: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
        data: UInt8Array,
        writes: bool,
    ) -> bool:
        """Make calls of ``counts`` blocks from ``firsts`` and return whether they ended before the deadline.

        A call that failed or moved less is made again alone, which goes on or finds the error's name.
        """
        if not data.flags.c_contiguous:
            raise AssertionError("blocks lie one after another in memory")
        offsets = PAGE_BYTES + firsts * self.block_bytes
        addresses, sizes = data.ctypes.data + starts[:-1] * self.block_bytes, counts * self.block_bytes
        moved = queue.run(self._file, offsets, addresses, sizes, writes=writes, seconds=self._deadline_seconds)
        if moved is None:
            return False
        again = np.flatnonzero(moved != sizes)
        calls = zip(firsts[again].tolist(), starts[:-1][again].tolist(), counts[again].tolist(), strict=True)
        return self._one_by_one(list(calls), data, writes)

    def _call(self, data: UInt8Array, offset: int, *, writes: bool) -> None:
        call, done, view = os.pwritev if writes else os.preadv, 0, data.data
        while done < len(view):
            try:
                moved = call(self._file, [view[done:]], offset + done)
            except OSError as error:
                raise self._error("cannot be written" if writes else "cannot be read", error) from error
            # Direct I/O goes on at a page alone; a part of one is the end of a file that was cut.
            moved -= moved % PAGE_BYTES
            if moved <= 0:
                raise SlowMemoryError(
                    f"{self.path}: ends within the block at byte {offset}",
                    remedy="the file was cut: start again from the checkpoint",
                )
            done += moved

    def _error(self, what: str, error: OSError) -> SlowMemoryError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return SlowMemoryError(
            f"{self.path}: {what}: {error.strerror}",
            remedy="make room on its disk and start again from the checkpoint" if full else "look at its disk",
        )


@dataclass(frozen=True)
class BlockBatch:
    """Calls under way."""

    futures: Sequence[Future[bool]]
    blocks: int
    calls: int


class _Lane:
    """The threads or the kernel's queue that make the calls of one direction."""

    def __init__(self, direct: bool, threads: int) -> None:
        self.queue = KernelQueue.make() if direct else None
        # With a queue one thread hands over: the deadline holds also where the kernel makes it wait.
        self.pool = ThreadPoolExecutor(1 if self.queue else threads, thread_name_prefix="flexd-slow-rows")

    def close(self, *, wait: bool) -> None:
        """End the threads; the queue too if its calls are waited for."""
        self.pool.shutdown(wait=wait, cancel_futures=True)
        if wait and self.queue is not None:
            self.queue.close()


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """Return a descriptor, and whether it has direct I/O."""
    if _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o600), False


def _runs(blocks: Int64Array, most: int) -> tuple[Int64Array, Int64Array]:
    """Return first block and length of each run of adjoining ascending blocks, no longer than ``most``."""
    if not len(blocks):
        return blocks, blocks
    joins = np.diff(blocks) == 1
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    # A long run is cut: every ``most``-th block of it begins another.
    within = places_of_runs(0, np.diff(starts, append=len(blocks)))
    starts = np.flatnonzero(within % most == 0)
    return blocks[starts], np.diff(starts, append=len(blocks))


class BlockRows(ColdRows):
    """Rows in the checksummed blocks of a file.

    The file holds nothing of worth beyond its process: a run begins with a new one (``BlockFile``), and its rows come
    from a checkpoint.

    Args:
        rows: number of slots.
        row_bytes: of a packed row.
        fresh: makes rows that were never written.
        per_block: rows of a full block.
        blocks: of the file.
        block_bytes: a multiple of ``PAGE_BYTES``.
        threads: calls in flight.
        deadline_seconds: of a batch of blocks.

    Raises:
        SlowMemoryError: as ``BlockFile``.
    """

    def __init__(
        self,
        path: Path,
        rows: int,
        row_bytes: int,
        fresh: FreshRows,
        per_block: int,
        blocks: int,
        block_bytes: int,
        *,
        threads: float = 32,
        deadline_seconds: float = 60.0,
    ) -> None:
        super().__init__(fresh)
        self._rows, self._row_bytes = rows, row_bytes
        self._per_block, self._blocks = per_block, blocks
        self._deadline_seconds = deadline_seconds
        self._file = BlockFile(path, blocks, block_bytes, threads=int(threads), deadline_seconds=deadline_seconds)
        self._sums = BlockSums(block_bytes)

    def _check_slots(self, slots: Int64Array) -> None:
        if len(slots) and not 0 <= slots.min() <= slots.max() < self._rows:
            raise SlowMemoryError(f"{self._file.path}: slots beyond its {self._rows} rows", remedy="report this")
