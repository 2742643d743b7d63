"""A read-only table of 10^8 x 64 int8 rows that two ranks load from one file, beside a plain read of the file.

The file is written first and leaves the page cache before each reading. Free memory is written before each, too: where
a virtual machine's host has taken it back, its first use costs more than to read a file into it. Plain: one process
reads the file from the beginning to the end, in as large pieces. Three readings each, in turn; medians. Checks: the
load takes at most 1.3 times as long as the plain read, and a rank's memory grows by at most 1.1 of its share of the
file; rows are those of the file.
"""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch

from tools.bench.harness import Outcome, at_most, check, peak_resident_bytes, reset_peak, resident_bytes
from tools.bench.ranks import on_ranks

RANKS, DIM, WIDTH, TIMES_THE_DISK, SHARES = 2, 64, 68, 1.3, 1.1
_BLOCK_ROWS = 10**6


def write(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    table = np.lib.format.open_memmap(path, "w+", np.int8, (rows, WIDTH))
    for first in range(0, rows, _BLOCK_ROWS):
        block = table[first : first + _BLOCK_ROWS]
        block[:, :DIM] = np.frombuffer(rng.bytes(block.shape[0] * DIM), np.int8).reshape(-1, DIM)
        block[:, DIM:] = np.full((len(block), 1), 0.01, np.float32).view(np.int8)
    table.flush()


def forget(path: Path) -> None:
    """Let the file leave the page cache, and write memory for it and for its rows."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    np.empty(min(3 * path.stat().st_size, int(0.8 * free)), np.uint8).fill(1)


def plain_seconds(path: Path) -> float:
    from flexd.embedding.checkpoint.table_rows import MAX_WINDOW_BYTES

    forget(path)
    buffer, began = bytearray(MAX_WINDOW_BYTES), time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - began


def load(path: str, rows: int) -> tuple[float, float, bool]:
    """Return seconds until all ranks have their rows, by how much memory grew, and whether some are those of the
    file."""
    import torch.distributed as dist

    from flexd import EmbeddingCollection, EmbeddingTable, RankLayout

    torch.set_num_threads(1)
    before = resident_bytes()
    items = EmbeddingTable("items", rows, DIM, dtype="int8", trainable=False)
    with EmbeddingCollection([items], layout=RankLayout(1, RANKS)) as collection:
        reset_peak()
        dist.barrier()
        began = time.perf_counter()
        collection.load_file("items", path)
        dist.barrier()
        seconds = time.perf_counter() - began
        grew = peak_resident_bytes() - before
        ids = torch.randint(0, rows, (1000,), generator=torch.Generator().manual_seed(dist.get_rank()))
        found = collection({"items": ids})["items"].values
    stored = np.load(path, mmap_mode="r")[ids.numpy(), :DIM]
    return seconds, float(grew), bool(torch.equal(found, torch.from_numpy(stored) * torch.tensor(0.01)))


def section(options: Namespace) -> Outcome:
    rows = 10**6 if options.quick else 10**8
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        path = Path(directory) / "items.npy"
        write(path, rows)
        plain, loads, grew, equal = [], [], [], True
        for _ in range(1 if options.quick else 3):
            plain.append(plain_seconds(path))
            forget(path)
            of_ranks = on_ranks(load, 1, RANKS, str(path), rows)
            loads.append(max(seconds for seconds, *_ in of_ranks))
            grew.append(max(more for _, more, _ in of_ranks))
            equal = equal and all(same for *_, same in of_ranks)
        share = path.stat().st_size / RANKS
    figures = {
        "file_bytes": share * RANKS, "plain_read_seconds": float(np.median(plain)),
        "load_seconds": float(np.median(loads)), "memory_of_share": max(grew) / share,
        "load_of_plain_read": float(np.median(loads) / np.median(plain)),
    }  # fmt: skip
    checks = [check("rows equal to the file's", equal, "1", equal)]
    if not options.quick:
        checks += [
            at_most("load, of a plain read", figures["load_of_plain_read"], TIMES_THE_DISK),
            at_most("memory, of a rank's share", figures["memory_of_share"], SHARES),
        ]
    return Outcome(figures, checks)
