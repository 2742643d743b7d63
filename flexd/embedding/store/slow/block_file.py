"""Blocks of a file, read and written in batches: sorted, adjoining ones in one call, several calls in flight."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SlowMemoryError

PAGE_BYTES = 4096
"""Unit of direct I/O: offsets, lengths and buffers are multiples of it."""
MAX_CALL_BYTES = 1 << 20
_MARK = b"flexd slow rows 1\n"
"""Begins the first page, so that no other file is taken for one of these."""
_SLOW_DISK = "look at the disk (iostat), or put the file on a faster one"
_DIRECT = getattr(os, "O_DIRECT", 0)

Int64Array = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def aligned_bytes(count: int) -> Bytes:
    """Return uint8 [count] at the start of a page; its pages are freed with it."""
    return np.frombuffer(mmap.mmap(-1, max(1, count)), dtype=np.uint8, count=count)


class BlockFile:
    """A new file of equal blocks after one page that marks it. Calls come from one thread at a time.

    Direct I/O where the file system has it, so that the page cache holds no second copy. Other processes are refused
    while it is open; a file that an ended run has left is emptied.

    Args:
        blocks: of ``block_bytes``, a multiple of ``PAGE_BYTES``; the file is sparse.
        threads: calls in flight at once.
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
            self._file = _open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT)
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

    def read(self, blocks: Int64Array, out: Bytes) -> int:
        """Read uint8 [n, block_bytes] of ascending blocks into an aligned ``out``; return the number of calls."""
        return self._batch(blocks, out, writes=False)

    def write(self, blocks: Int64Array, data: Bytes) -> int:
        """Write uint8 [n, block_bytes], aligned, to ascending blocks; return the number of calls."""
        return self._batch(blocks, data, writes=True)

    def close(self) -> None:
        """Close the file and remove it; twice is fine."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            self._pool.shutdown(wait=not self._late, cancel_futures=True)
            if not self._late:  # a late call must not find another file under its number
                os.close(self._file)
            self._file = -1

    def _batch(self, blocks: Int64Array, data: Bytes, *, writes: bool) -> int:
        firsts, counts = _runs(blocks, max(1, MAX_CALL_BYTES // self.block_bytes))
        starts = np.concatenate([[0], np.cumsum(counts)])
        calls = list(zip(firsts.tolist(), starts[:-1].tolist(), counts.tolist(), strict=True))
        shares = [calls[number :: self._threads] for number in range(min(self._threads, len(calls)))]

        def run(share: list[tuple[int, int, int]]) -> None:
            for block, start, count in share:
                offset = PAGE_BYTES + block * self.block_bytes
                self._call(data[start : start + count].reshape(-1), offset, writes=writes)

        futures: list[Future[None]] = [self._pool.submit(run, share) for share in shares]
        done, late = wait(futures, self._deadline_seconds)
        if late:
            # Calls that are still on their way use the caller's buffer: no further batch may.
            self._late = f"{self.path}: {len(blocks)} blocks took more than {self._deadline_seconds:g} s"
        for future in done:
            future.result()
        if late:
            raise SlowMemoryError(self._late, remedy=_SLOW_DISK)
        return len(calls)

    def _call(self, data: Bytes, offset: int, *, writes: bool) -> None:
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


def _open(path: Path, flags: int) -> int:
    if _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o600)


def _runs(blocks: Int64Array, most: int) -> tuple[Int64Array, Int64Array]:
    """Return first block and length of each run of adjoining ascending blocks, no longer than ``most``."""
    if not len(blocks):
        return blocks, blocks
    joins = np.diff(blocks) == 1
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    # A long run is cut: every ``most``-th block of it begins another.
    within = np.arange(len(blocks)) - np.repeat(starts, np.diff(np.append(starts, len(blocks))))
    starts = np.flatnonzero(within % most == 0)
    return blocks[starts], np.diff(np.append(starts, len(blocks)))
