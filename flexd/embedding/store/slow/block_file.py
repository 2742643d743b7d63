"""Blocks of a file, read and written in batches: sorted, adjoining ones in one call, several calls at once."""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexd.core.arrays import Int64Array, UInt8Array, UInt64Array, places_of_runs
from flexd.core.errors import SlowMemoryError

PAGE_BYTES = 4096
"""Unit of direct I/O: offsets, lengths and buffers are multiples of it."""
MAX_CALL_BYTES = 1 << 20
# Begins the first page, so that no other file is taken for one of these.
_MARK = b"flexd slow rows 1\n"
_SLOW_DISK = "look at the disk (iostat), or put the file on a faster one"
_GOLDEN = 0x9E3779B97F4A7C15


def aligned_bytes(count: int) -> UInt8Array:
    """Return uint8 [count] at the start of a page; its pages are freed with it."""
    return np.frombuffer(mmap.mmap(-1, max(1, count)), dtype=np.uint8, count=count)


# In flight at once: below the 256 that block devices take by default, so that handing over does not wait.
_QUEUE_CALLS = 128
# Numbers of io_setup, io_destroy, io_getevents and io_submit.
_SYSTEM_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
# struct iocb of linux/aio_abi.h.
_CALL = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("flags", "<i4"), ("opcode", "<u2"), ("priority", "<i2"), ("file", "<u4"),
        ("address", "<u8"), ("size", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("more", "<u8"),
    ]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("call", "<u8"), ("result", "<i8"), ("second", "<i8")])
_READS, _WRITES = 0, 1


class KernelQueue:
    """Queue of calls in the kernel (Linux AIO). Calls come from one thread at a time; ``make`` returns None where there
    is none.

    A pool of threads takes the interpreter's lock for every call, which makes a step with three thousand missed rows
    1.6 to 1.7 times as long on two processors (``python -m tools.bench memory --only ways``).
    """

    def __init__(self, context: int, numbers: tuple[int, int, int, int]) -> None:
        self._context, self._numbers = context, numbers
        self._library = ctypes.CDLL(None, use_errno=True)

    @classmethod
    def make(cls) -> "KernelQueue | None":
        numbers = _SYSTEM_CALLS.get(platform.machine())
        if sys.platform != "linux" or numbers is None or sys.byteorder != "little":
            return None
        context = ctypes.c_ulong(0)
        library = ctypes.CDLL(None, use_errno=True)
        # Refused by some sandboxes, and where fs.aio-max-nr is used up.
        if library.syscall(ctypes.c_long(numbers[0]), ctypes.c_long(_QUEUE_CALLS), ctypes.byref(context)) != 0:
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
        events, results = np.zeros(_QUEUE_CALLS, _EVENT), np.full(count, -11, dtype=np.int64)
        end = time.monotonic() + seconds
        given = ended = 0
        while ended < count:
            if given < count and given - ended < _QUEUE_CALLS:
                taken = self._submit(min(_QUEUE_CALLS - (given - ended), count - given), pointers[given:])
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
        until = (ctypes.c_long * 2)(1, 0)
        ended = self._library.syscall(
            ctypes.c_long(self._numbers[2]), ctypes.c_ulong(self._context), ctypes.c_long(least),
            ctypes.c_long(len(events)), ctypes.c_void_p(events.ctypes.data), until,
        )  # fmt: skip
        return max(0, int(ended))


class BlockFile:
    """A new file of equal blocks after one page that marks it. Calls come from one thread at a time.

    The first word of a block is its checksum: a multilinear hash of the others (Lemire, Kaser: Strongly universal
    string hashing is fast, 2014, section 3) with odd factors modulo 2^64, so that any one changed word changes it. That
    of a block of zeros, which is a hole, is not zero.

    Direct I/O where the file system has it, so that the page cache holds no second copy. Other processes are refused
    while it is open; a file that an ended run has left is emptied.

    Args:
        blocks: of ``block_bytes``, a multiple of ``PAGE_BYTES``; the file is sparse.
        threads: calls at once where the kernel has no queue for them, or the file system no direct I/O.
        deadline_seconds: of a batch.

    Raises:
        SlowMemoryError: the file cannot be made, is in use, or is something else.
    """

    def __init__(
        self, path: Path, blocks: int, block_bytes: int, *, threads: int = 32, deadline_seconds: float = 60.0
    ) -> None:
        self.path, self.block_bytes = path, block_bytes
        self._threads, self._deadline_seconds = threads, deadline_seconds
        # splitmix64's first round.
        mixed = np.arange(1, block_bytes // 8, dtype=np.uint64) * np.uint64(_GOLDEN)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        self._factors = (mixed ^ (mixed >> np.uint64(27))) | np.uint64(1)
        self._late = ""
        self._file = -1
        try:
            self._file, direct = _open(path)
            self._begin(PAGE_BYTES + blocks * block_bytes)
        except (OSError, SlowMemoryError) as error:
            if self._file >= 0:
                os.close(self._file)
            if isinstance(error, OSError):
                raise self._error("cannot be made", error) from error
            raise
        self._queue = KernelQueue.make() if direct else None
        # With a queue one thread hands over: the deadline holds also where the kernel makes it wait.
        self._pool = ThreadPoolExecutor(1 if self._queue else threads, thread_name_prefix="flexd-slow-rows")

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

    def read(self, blocks: Int64Array, out: UInt8Array) -> None:
        """Read uint8 [n, block_bytes] of ascending blocks into an aligned ``out``.

        Raises:
            SlowMemoryError: the file failed, or has other blocks than were written.
        """
        self._run(blocks, out, writes=False)
        words = out.view(np.uint64)
        wrong = np.flatnonzero(words[:, 0] != self._sums(words))
        if len(wrong):
            raise self.other_blocks(blocks[wrong])

    def write(self, blocks: Int64Array, data: UInt8Array) -> None:
        """Write uint8 [n, block_bytes], aligned, to ascending blocks, with their checksums.

        Raises:
            SlowMemoryError: the file failed.
        """
        words = data.view(np.uint64)
        words[:, 0] = self._sums(words)
        self._run(blocks, data, writes=True)

    def other_blocks(self, blocks: Int64Array) -> SlowMemoryError:
        return SlowMemoryError(
            f"{self.path}: {len(blocks)} blocks are not what was written, the first at byte "
            f"{PAGE_BYTES + int(blocks[0]) * self.block_bytes}",
            remedy="start again from the checkpoint, and look at the disk",
        )

    def close(self) -> None:
        """Close the file and remove it; twice is fine."""
        if self._file >= 0:
            if os.fstat(self._file).st_nlink:  # else the file of that name is another's
                self.path.unlink(missing_ok=True)
            self._pool.shutdown(wait=not self._late, cancel_futures=True)
            if not self._late:  # a late call must not find another file under its number
                if self._queue is not None:
                    self._queue.close()
                os.close(self._file)
            self._file = -1

    def _sums(self, words: UInt64Array) -> UInt64Array:
        """uint64 [n, words of a block] -> uint64 [n] checksums."""
        sums: UInt64Array = words[:, 1:] @ self._factors
        return sums + np.uint64(_GOLDEN)

    def check(self) -> None:
        """Raise SlowMemoryError if the file is closed, was removed, or had a batch beyond its deadline."""
        if self._file < 0:
            raise SlowMemoryError(f"{self.path}: closed", remedy="make a new collection")
        if os.fstat(self._file).st_nlink == 0:
            raise SlowMemoryError(
                f"{self.path}: was removed while in use", remedy="start again from the checkpoint, and keep the file"
            )
        if self._late:
            raise SlowMemoryError(self._late, remedy=_SLOW_DISK)

    def _run(self, blocks: Int64Array, data: UInt8Array, *, writes: bool) -> None:
        self.check()
        firsts, counts = _runs(blocks, max(1, MAX_CALL_BYTES // self.block_bytes))
        starts = np.cumsum(counts) - counts
        if self._queue is not None:
            futures = [self._pool.submit(self._make_queued, self._queue, firsts, starts, counts, data, writes)]
        else:
            calls = list(zip(firsts.tolist(), starts.tolist(), counts.tolist(), strict=True))
            shares = [calls[number :: self._threads] for number in range(min(self._threads, len(calls)))]
            futures = [self._pool.submit(self._make_calls, share, data, writes) for share in shares]
        done, waiting = wait(futures, self._deadline_seconds)
        if waiting or not all(future.result() for future in done if future.exception() is None):
            # Late calls still use the caller's buffer: no further batch may.
            self._late = f"{self.path}: {len(blocks)} blocks took more than {self._deadline_seconds:g} s"
        for future in done:
            future.result()
        if self._late:
            raise SlowMemoryError(self._late, remedy=_SLOW_DISK)

    def _make_calls(self, calls: list[tuple[int, int, int]], data: UInt8Array, writes: bool) -> bool:
        """Make calls of (first block, place in ``data``, blocks), and return True: all have ended."""
        for block, start, count in calls:
            self._call(data[start : start + count].reshape(-1), PAGE_BYTES + block * self.block_bytes, writes=writes)
        return True

    def _make_queued(
        self, queue: KernelQueue, firsts: Int64Array, starts: Int64Array, counts: Int64Array, data: UInt8Array,
        writes: bool,
    ) -> bool:  # fmt: skip
        """Make calls of ``counts`` blocks from ``firsts``, and return whether they ended before the deadline.

        A call that failed or moved less is made again alone, which goes on or finds the error's name.
        """
        if not data.flags.c_contiguous:
            raise AssertionError("blocks lie one after another in memory")
        offsets = PAGE_BYTES + firsts * self.block_bytes
        addresses, sizes = data.ctypes.data + starts * self.block_bytes, counts * self.block_bytes
        moved = queue.run(self._file, offsets, addresses, sizes, writes=writes, seconds=self._deadline_seconds)
        if moved is None:
            return False
        again = np.flatnonzero(moved != sizes)
        calls = zip(firsts[again].tolist(), starts[again].tolist(), counts[again].tolist(), strict=True)
        return self._make_calls(list(calls), data, writes)

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


def _open(path: Path) -> tuple[int, bool]:
    """Return a descriptor, and whether it has direct I/O."""
    flags, direct = os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, flags | direct, 0o600), direct != 0
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o600), False


def _runs(blocks: Int64Array, most: int) -> tuple[Int64Array, Int64Array]:
    """Return first block and length of each run of adjoining ascending blocks, no longer than ``most``."""
    if not len(blocks):
        return blocks, blocks
    starts = np.flatnonzero(np.concatenate([[True], np.diff(blocks) != 1]))
    # A long run is cut: every ``most``-th block of it begins another.
    starts = np.flatnonzero(places_of_runs(0, np.diff(starts, append=len(blocks))) % most == 0)
    return blocks[starts], np.diff(starts, append=len(blocks))
