"""The disk's own limit: random direct reads of whole blocks of one file, as many at once as given."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path

import numpy as np

from flexd.embedding.store.slow.block_file import PAGE_BYTES, aligned_bytes
from flexd.embedding.store.slow.kernel_queue import QUEUE_CALLS, KernelQueue

_READS = 4_096
"""Of a turn; their places are drawn before the clock starts."""


def disk_limits(path: Path, block_bytes: int, seconds: float, blocks: int) -> dict[str, float]:
    """Return reads a second, and processor microseconds a read, with 1 and 32 threads and with the kernel's queue.

    Args:
        blocks: the first ones of the file are read.
    """
    file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    figures: dict[str, float] = {}
    try:
        for name, threads in (("1 in flight", 1), ("32 in flight", 32), (f"{QUEUE_CALLS} queued", 0)):
            queue = None if threads else KernelQueue.make()
            if not threads and queue is None:
                continue
            generator, done, took = np.random.default_rng(threads), 0, 0.0
            processor = _processor_seconds()
            while took < seconds:
                offsets = PAGE_BYTES + generator.integers(0, blocks, _READS) * block_bytes
                began = time.perf_counter()
                if queue is None:
                    done += _read_by_threads(file, offsets, block_bytes, threads, began + seconds - took)
                else:
                    buffer = aligned_bytes(_READS * block_bytes)
                    places = buffer.ctypes.data + np.arange(_READS) * block_bytes
                    sizes = np.full(_READS, block_bytes)
                    moved = queue.run(file, offsets, places, sizes, writes=False, seconds=60.0)
                    if moved is None or (moved != block_bytes).any():
                        raise OSError(f"{path}: reads that did not end, or moved less")
                    done += _READS
                took += time.perf_counter() - began
            figures[f"reads a second, {name}"] = done / took
            figures[f"processor microseconds a read, {name}"] = (_processor_seconds() - processor) / done * 1e6
            if queue is not None:
                queue.close()
    finally:
        os.close(file)
    return figures


def _read_by_threads(file: int, offsets: np.ndarray, block_bytes: int, threads: int, end: float) -> int:
    shares, done = [offsets[at::threads].tolist() for at in range(threads)], [0] * threads

    def run(number: int) -> None:
        buffer = aligned_bytes(block_bytes)
        for offset in shares[number]:
            if time.perf_counter() > end:
                break
            if os.preadv(file, [buffer.data], offset) != block_bytes:
                raise OSError("a short read")
            done[number] += 1

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
