"""Files of cold rows: what is found out after a crash or damage, and what a failing disk says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.slow.block_file import PAGE_BYTES, KernelQueue
from flexd.embedding.store.slow.file_rows import FileRows, rows_per_block
from flexd.embedding.store.slow.log_rows import LogRows, log_rows_per_block
from tests.support.cold_rows import wait_for_writes
from tests.support.repository import child_environment

ROWS, WIDTH = 4_000, 260
SLOTS = torch.arange(0, ROWS, 7)


def zeros(slots: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(slots), WIDTH, dtype=torch.uint8)


def data(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (len(SLOTS), WIDTH), dtype=torch.uint8, generator=generator)


KINDS = {"file": (FileRows, rows_per_block(WIDTH)[0]), "log": (LogRows, log_rows_per_block(WIDTH)[0])}
"""And rows of a block."""


def write(slow: FileRows | LogRows, slots: torch.Tensor, packed: torch.Tensor) -> None:
    """Write rows, and wait until they are in the file."""
    slow.write(slots, packed)
    wait_for_writes(slow)


def rows_in(path: Path, rows: int = ROWS) -> FileRows:
    return FileRows(path, rows, WIDTH, zeros, threads=2, deadline_seconds=30.0)


def test_what_an_ended_run_left_is_replaced_and_a_running_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write = f"""
import os, sys
from pathlib import Path
import torch
from flexd.embedding.store.slow.file_rows import FileRows
slow = FileRows(Path(sys.argv[1]), {ROWS}, {WIDTH}, None)
slow.write(torch.arange({ROWS}), torch.ones({ROWS}, {WIDTH}, dtype=torch.uint8))
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", write, str(path)], check=True, env=child_environment(), timeout=60)
    assert path.stat().st_blocks * 512 > ROWS * WIDTH
    slow = rows_in(path)
    assert path.stat().st_blocks * 512 < ROWS * WIDTH / 2
    assert not slow.read(SLOTS).any(), "made from the seed, not from the other run"
    with pytest.raises(SlowMemoryError, match="rows: is in use by another process - give each job a directory"):
        rows_in(path)
    slow.close()
    assert list(tmp_path.iterdir()) == []
    path.write_text("letters")
    with pytest.raises(SlowMemoryError, match="rows: exists, and is not what an ended run has left - give another"):
        rows_in(path)
    assert path.read_text() == "letters"
    with pytest.raises(SlowMemoryError, match="cannot be opened: No such file"):
        rows_in(tmp_path / "nowhere" / "rows")


def test_a_file_that_was_cut_or_removed(tmp_path: Path) -> None:
    slow = rows_in(tmp_path / "rows")
    slow.write(SLOTS, data(1))
    os.truncate(tmp_path / "rows", PAGE_BYTES * 100 + 100)
    with pytest.raises(SlowMemoryError, match="rows: ends within the block at byte"):
        slow.read(SLOTS)
    (tmp_path / "rows").unlink()
    with pytest.raises(SlowMemoryError, match="rows: was removed while in use - start again from the checkpoint"):
        slow.read(SLOTS)
    following = rows_in(tmp_path / "rows")
    slow.close()
    assert not following.read(SLOTS).any(), "the file of another job stays"
    following.close()
    with pytest.raises(SlowMemoryError, match="closed"):
        slow.read(SLOTS)


@pytest.mark.parametrize("at", [3, 12, 1_000], ids=["checksum", "head", "rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_where_it_is_read(tmp_path: Path, kind: str, at: int) -> None:
    of_file, per_block = KINDS[kind]
    slow, slots = of_file(tmp_path / "rows", ROWS, WIDTH, zeros), torch.arange(4 * per_block)
    write(slow, slots, torch.ones(len(slots), WIDTH, dtype=torch.uint8))
    with (tmp_path / "rows").open("r+b") as file:
        file.seek(PAGE_BYTES + PAGE_BYTES * 2 + at)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert (slow.read(slots[: 2 * per_block]) == 1).all()
    with pytest.raises(SlowMemoryError, match="blocks are not what was written"):
        slow.read(slots[2 * per_block : 3 * per_block])
    slow.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, without direct I/O in older kernels."""
    at = tmp_path / "disk"
    at.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", at], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield at
    subprocess.run(["umount", at], check=True)


@pytest.mark.parametrize("fails", ["refused", "short"])
def test_calls_that_the_queue_does_not_do_are_made_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    slow = rows_in(tmp_path / "rows")
    run: Callable[..., Any] = KernelQueue.run

    def some(queue: KernelQueue, file: int, offsets: Any, addresses: Any, sizes: Any, **named: Any) -> Any:
        if fails == "refused":
            return np.full(len(offsets), -11)
        half = sizes // 2 // PAGE_BYTES * PAGE_BYTES
        half[::2] = sizes[::2]
        moved = run(queue, file, offsets, addresses, np.maximum(half, PAGE_BYTES), **named)
        moved[moved != sizes] -= 1  # a call that moved less goes on from its start
        return moved

    monkeypatch.setattr(KernelQueue, "run", some)
    slow.write(SLOTS, data(1))
    slow.write(torch.arange(ROWS // 2), torch.full((ROWS // 2, WIDTH), 9, dtype=torch.uint8))
    expected = data(1)
    expected[ROWS // 2 > SLOTS] = 9
    assert torch.equal(slow.read(SLOTS), expected)
    slow.close()


def test_a_billion_rows_take_no_room_until_they_are_written(tmp_path: Path) -> None:
    slow = rows_in(tmp_path / "rows", rows=10**9)
    assert (tmp_path / "rows").stat().st_blocks * 512 < 2**20
    assert slow.fast_nbytes < 32 * 2**20
    far = torch.tensor([10**9 - 1, 0, 5 * 10**8])
    slow.write(far, torch.full((3, WIDTH), 7, dtype=torch.uint8))
    assert (slow.read(far) == 7).all()
    assert not slow.read(far[:1] - 1).any()
    assert (tmp_path / "rows").stat().st_blocks * 512 < 2**20
    slow.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_named(small_disk: Path, kind: str) -> None:
    slow = KINDS[kind][0](small_disk / "rows", ROWS, WIDTH, zeros)
    with pytest.raises(SlowMemoryError, match=r"rows: cannot be written: No space left .* - make room on its disk"):
        write(slow, torch.arange(ROWS), torch.ones(ROWS, WIDTH, dtype=torch.uint8))
    slow.close()


@pytest.mark.parametrize("by", ["queue", "threads"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_disk_is_named_within_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, by: str
) -> None:
    if by == "threads":
        monkeypatch.setattr(KernelQueue, "make", lambda: None)
    slow = KINDS[kind][0](tmp_path / "rows", ROWS, WIDTH, zeros, threads=2, deadline_seconds=0.05)
    for owner, name in ((KernelQueue, "_submit"), (os, "pwritev")):  # no queue in some kernels
        call: Callable[..., int] = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, call=call: (time.sleep(0.2), call(*given))[1])
    with pytest.raises(SlowMemoryError, match=r"rows: \d+ blocks took more than 0.05 s - look at the disk"):
        write(slow, SLOTS, data(1))
    monkeypatch.undo()
    with pytest.raises(SlowMemoryError, match="took more than"):  # the buffer is still in the hands of late calls
        slow.read(SLOTS)
    slow.close()
