"""Blocks of a file, read and written in batches: sorted, adjoining ones in one call, several calls at once."""

import errno
import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

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


class BlockFile:
    """A new file of equal blocks after one page that marks it. Calls come from one thread at a time.

    The first word of a block is its checksum: a multilinear hash of the others (Lemire, Kaser: Strongly universal
    string hashing is fast, 2014, section 3) with odd factors modulo 2^64, so that any one changed word changes it. That
    of a block of zeros, which is a hole, is not zero.

    Direct I/O where the file system has it, so that the page cache holds no second copy. Other processes are refused
    while it is open; a file that an ended run has left is emptied.

    Args:
        blocks: of ``block_bytes``, a multiple of ``PAGE_BYTES``; the file is sparse.
        threads: calls at once.
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
            self._file = _open(path)
            self._begin(PAGE_BYTES + blocks * block_bytes)
        except (OSError, SlowMemoryError) as error:
            if self._file >= 0:
                os.close(self._file)
            if isinstance(error, OSError):
                raise self._error("cannot be made", error) from error
            raise
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="flexd-slow-rows")

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
        calls = list(zip(firsts.tolist(), (np.cumsum(counts) - counts).tolist(), counts.tolist(), strict=True))
        shares = [calls[number :: self._threads] for number in range(min(self._threads, len(calls)))]
        futures = [self._pool.submit(self._make_calls, share, data, writes) for share in shares]
        done, waiting = wait(futures, self._deadline_seconds)
        if waiting:
            # Late calls still use the caller's buffer: no further batch may.
            self._late = f"{self.path}: {len(blocks)} blocks took more than {self._deadline_seconds:g} s"
            raise SlowMemoryError(self._late, remedy=_SLOW_DISK)
        for future in done:
            future.result()

    def _make_calls(self, calls: list[tuple[int, int, int]], data: UInt8Array, writes: bool) -> None:
        """Make calls of (first block, place in ``data``, blocks)."""
        for block, start, count in calls:
            self._call(data[start : start + count].reshape(-1), PAGE_BYTES + block * self.block_bytes, writes=writes)

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


def _open(path: Path) -> int:
    flags, direct = os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, flags | direct, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o600)


def _runs(blocks: Int64Array, most: int) -> tuple[Int64Array, Int64Array]:
    """Return first block and length of each run of adjoining ascending blocks, no longer than ``most``."""
    if not len(blocks):
        return blocks, blocks
    starts = np.flatnonzero(np.concatenate([[True], np.diff(blocks) != 1]))
    # A long run is cut: every ``most``-th block of it begins another.
    starts = np.flatnonzero(places_of_runs(0, np.diff(starts, append=len(blocks))) % most == 0)
    return blocks[starts], np.diff(starts, append=len(blocks))
