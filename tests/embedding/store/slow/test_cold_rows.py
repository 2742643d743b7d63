"""Every slow memory: rows come back as written, others as their seed makes them. Files: what is found out after a crash
or damage, and what a failing disk says. Logs: cleaning."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.slow.block_file import PAGE_BYTES, KernelQueue
from flexd.embedding.store.slow.cold_rows import ColdRows, HostRows
from flexd.embedding.store.slow.file_rows import FileRows, rows_per_block
from flexd.embedding.store.slow.log_rows import BlockSpace, LogRows
from tests.support.repository import child_environment

ROWS, WIDTH = 3_000, 524
SLOTS = torch.arange(0, ROWS, 7)
PER_BLOCK = 7
KINDS = {"file": FileRows, "log": LogRows}


def of(slots: torch.Tensor, number: int = 0, width: int = WIDTH) -> torch.Tensor:
    return ((slots[:, None] * 31 + number + torch.arange(width)) % 251).to(torch.uint8)


def zeros(slots: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(slots), WIDTH, dtype=torch.uint8)


def file_in(path: Path, rows: int = ROWS) -> FileRows:
    return FileRows(path, rows, WIDTH, zeros, threads=2, deadline_seconds=30.0)


def log_in(path: Path) -> LogRows:
    return LogRows(path, ROWS, WIDTH, zeros, threads=2, deadline_seconds=30.0)


@pytest.fixture(params=["host", "file", "file by threads", "log", "log by threads"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], ColdRows]]:
    made: list[ColdRows] = []
    kind, by_threads, _ = request.param.partition(" by threads")
    if by_threads:
        monkeypatch.setattr(KernelQueue, "make", lambda: None)

    def of_width(row_bytes: int) -> ColdRows:
        path = tmp_path / f"rows{len(made)}"
        fresh = partial(of, width=row_bytes)
        made.append(HostRows(ROWS, row_bytes, fresh) if kind == "host" else KINDS[kind](path, ROWS, row_bytes, fresh))
        return made[-1]

    yield of_width
    for slow in made:
        slow.close()
        slow.close()


def drawn(generator: np.random.Generator, count: int) -> torch.Tensor:
    return torch.from_numpy(generator.choice(ROWS, count, replace=False))


@pytest.mark.parametrize("row_bytes", [8, 68, 260, 4096, 5000])
def test_rows_come_back_as_written(make: Callable[[int], ColdRows], row_bytes: int) -> None:
    slow = make(row_bytes)
    whole = of(torch.arange(ROWS), width=row_bytes)
    generator = np.random.default_rng(row_bytes)
    for count in (1, 50, 700, ROWS, 0):
        slots = drawn(generator, count)
        assert torch.equal(slow.read(slots), whole[slots])
        slots = drawn(generator, count // 2)
        data = torch.from_numpy(generator.integers(0, 256, (len(slots), row_bytes), dtype=np.uint8))
        whole[slots] = data
        slow.write(slots, data)
    assert torch.equal(slow.read(torch.arange(ROWS).flip(0)), whole.flip(0))


def test_rows_beside_a_device_are_page_locked_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, which is copied to, and what a read returns, which is copied from without waiting."""
    empty, pinned = torch.empty, []

    def recorded(*shape: object, pin_memory: bool = False, **named: object) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*shape, **named)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", recorded)
    for wanted in (True, False):
        pinned.clear()
        slow = HostRows(ROWS, 24, partial(of, width=24), pinned=wanted)
        assert torch.equal(slow.read(torch.tensor([7, 3])), of(torch.tensor([7, 3]), width=24))
        assert pinned == [wanted, wanted]
        slow.close()


def test_traffic_counts_bytes(make: Callable[[int], ColdRows]) -> None:
    slow = make(100)
    slow.read(torch.tensor([1, 2]))
    assert slow.traffic.bytes_read == 0, "never written"
    slow.write(torch.tensor([1]), torch.zeros(1, 100, dtype=torch.uint8))
    before = slow.traffic.bytes_read
    slow.read(torch.tensor([1, 2, 1999]))
    traffic = slow.traffic
    moved = 100 if isinstance(slow, HostRows) else rows_per_block(100)[1]
    assert (traffic.bytes_read - before, traffic.bytes_written) == (moved, moved)
    assert traffic.seconds > 0
    assert slow.fast_nbytes > 0


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
    slow = file_in(path)
    assert path.stat().st_blocks * 512 < ROWS * WIDTH / 2
    assert not slow.read(SLOTS).any(), "made from the seed, not from the other run"
    with pytest.raises(SlowMemoryError, match="rows: is in use by another process - give each job a directory"):
        file_in(path)
    slow.close()
    assert list(tmp_path.iterdir()) == []
    path.write_text("letters")
    with pytest.raises(SlowMemoryError, match="rows: exists, and is not what an ended run has left - give another"):
        file_in(path)
    assert path.read_text() == "letters"
    with pytest.raises(SlowMemoryError, match="cannot be made: No such file"):
        file_in(tmp_path / "nowhere" / "rows")


def test_a_file_that_was_cut_or_removed(tmp_path: Path) -> None:
    slow = file_in(tmp_path / "rows")
    slow.write(SLOTS, of(SLOTS, 1))
    os.truncate(tmp_path / "rows", PAGE_BYTES * 100 + 100)
    with pytest.raises(SlowMemoryError, match="rows: ends within the block at byte"):
        slow.read(SLOTS)
    (tmp_path / "rows").unlink()
    with pytest.raises(SlowMemoryError, match="rows: was removed while in use - start again from the checkpoint"):
        slow.read(SLOTS)
    following = file_in(tmp_path / "rows")
    slow.close()
    assert not following.read(SLOTS).any(), "the file of another job stays"
    following.close()
    with pytest.raises(SlowMemoryError, match="closed"):
        slow.read(SLOTS)


@pytest.mark.parametrize("at", [3, 12, 1_000], ids=["checksum", "head", "rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_where_it_is_read(tmp_path: Path, kind: str, at: int) -> None:
    slow, slots = KINDS[kind](tmp_path / "rows", ROWS, WIDTH, zeros), torch.arange(4 * PER_BLOCK)
    slow.write(slots, torch.ones(len(slots), WIDTH, dtype=torch.uint8))
    with (tmp_path / "rows").open("r+b") as file:
        file.seek(PAGE_BYTES + PAGE_BYTES * 2 + at)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert (slow.read(slots[: 2 * PER_BLOCK]) == 1).all()
    with pytest.raises(SlowMemoryError, match="blocks are not what was written"):
        slow.read(slots[2 * PER_BLOCK : 3 * PER_BLOCK])
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


def test_a_call_that_moves_less_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelQueue, "make", lambda: None)
    slow, slots = file_in(tmp_path / "rows"), torch.arange(ROWS // 2)
    for name in ("preadv", "pwritev"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda file, given, at, call=call: call(file, [given[0][:PAGE_BYTES]], at))
    slow.write(slots, of(slots, 1))
    assert torch.equal(slow.read(slots), of(slots, 1))
    slow.close()


@pytest.mark.parametrize("fails", ["refused", "short"])
def test_calls_that_the_queue_does_not_do_are_made_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    slow = file_in(tmp_path / "rows")
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
    slow.write(SLOTS, of(SLOTS, 1))
    slow.write(torch.arange(ROWS // 2), torch.full((ROWS // 2, WIDTH), 9, dtype=torch.uint8))
    expected = of(SLOTS, 1)
    expected[ROWS // 2 > SLOTS] = 9
    assert torch.equal(slow.read(SLOTS), expected)
    slow.close()


def test_a_billion_rows_take_no_room_until_they_are_written(tmp_path: Path) -> None:
    slow = file_in(tmp_path / "rows", rows=10**9)
    assert (tmp_path / "rows").stat().st_blocks * 512 < 2**20
    assert slow.fast_nbytes < 48 * 2**20
    far = torch.tensor([10**9 - 1, 0, 5 * 10**8])
    slow.write(far, torch.full((3, WIDTH), 7, dtype=torch.uint8))
    assert (slow.read(far) == 7).all()
    assert not slow.read(far[:1] - 1).any()
    assert (tmp_path / "rows").stat().st_blocks * 512 < 2**20
    slow.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_named(small_disk: Path, kind: str) -> None:
    slow = KINDS[kind](small_disk / "rows", ROWS, WIDTH, zeros)
    with pytest.raises(SlowMemoryError, match=r"rows: cannot be written: No space left .* - make room on its disk"):
        slow.write(torch.arange(ROWS), torch.ones(ROWS, WIDTH, dtype=torch.uint8))
    slow.close()


@pytest.mark.parametrize("by", ["queue", "threads"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_disk_is_named_within_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, by: str
) -> None:
    if by == "threads":
        monkeypatch.setattr(KernelQueue, "make", lambda: None)
    slow = KINDS[kind](tmp_path / "rows", ROWS, WIDTH, zeros, threads=2, deadline_seconds=0.05)
    for owner, name in ((KernelQueue, "_submit"), (os, "pwritev")):  # no queue in some kernels
        call: Callable[..., int] = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, call=call: (time.sleep(0.2), call(*given))[1])
    with pytest.raises(SlowMemoryError, match=r"rows: \d+ blocks took more than 0.05 s - look at the disk"):
        slow.write(SLOTS, of(SLOTS, 1))
    monkeypatch.undo()
    with pytest.raises(SlowMemoryError, match="took more than"):  # the buffer is still in the hands of late calls
        slow.read(SLOTS)
    slow.close()


def test_the_emptiest_blocks_are_cleaned() -> None:
    space = BlockSpace(10, 8)
    space.allocate(np.array([8, 1, 7, 2, 8, 3, 1]))
    assert space.to_clean(1).tolist() == [1, 6], "two rows go into one block"
    assert space.to_clean(2).tolist() == [1, 3, 6]


@pytest.mark.parametrize("rows", [ROWS, 40, 5])
def test_rows_stay_while_a_log_is_written_many_times_over(tmp_path: Path, rows: int) -> None:
    """Writing reads no block before, and cleans few: a file of fixed places reads and writes one per row."""
    kinds = [of_file(tmp_path / kind, rows, WIDTH, zeros) for kind, of_file in KINDS.items()]
    generator, whole = np.random.default_rng(1), of(torch.arange(rows), 0)
    for each in kinds:
        each.write(torch.arange(rows), whole)
    before = [each.traffic.bytes_written for each in kinds]
    for number in range(30):
        slots = torch.from_numpy(np.unique(rows * generator.random(1 + rows // 15) ** 2).astype(np.int64)).unique()
        whole[slots] = of(slots, number)
        for each in kinds:
            each.write(slots, whole[slots])
        assert torch.equal(kinds[1].read(torch.arange(rows)), whole)
    if rows == ROWS:
        moved = [each.traffic.bytes_written - first for each, first in zip(kinds, before, strict=True)]
        assert moved[1] < 0.4 * moved[0], moved
        assert (tmp_path / "log").stat().st_size < 2.1 * ROWS / PER_BLOCK * PAGE_BYTES + 2 * PAGE_BYTES
    for each in kinds:
        each.close()


def test_a_block_of_other_rows_is_not_taken(tmp_path: Path) -> None:
    """As after a write that went to another place: the checksum is right, the rows are not."""
    slow, slots = log_in(tmp_path / "rows"), torch.arange(100)
    slow.write(slots, of(slots, 1))
    with (tmp_path / "rows").open("r+b") as file:
        file.seek(PAGE_BYTES)
        file.write(file.read(PAGE_BYTES))
    with pytest.raises(SlowMemoryError, match="blocks are not what was written"):
        slow.read(slots)
    slow.close()
