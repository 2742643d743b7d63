"""A log of cold rows: cleaning, and writing behind."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.slow import log_rows
from flexd.embedding.store.slow.block_file import PAGE_BYTES, BlockFile
from flexd.embedding.store.slow.file_rows import FileRows
from flexd.embedding.store.slow.log_rows import BlockSpace, LogRows, log_rows_per_block
from tests.support.cold_rows import wait_for_writes

ROWS, WIDTH = 3_000, 524
PER_BLOCK = log_rows_per_block(WIDTH)[0]


def zeros(slots: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(slots), WIDTH, dtype=torch.uint8)


def of(slots: torch.Tensor, number: int) -> torch.Tensor:
    return ((slots[:, None] * 7 + number + torch.arange(WIDTH)) % 251).to(torch.uint8)


def rows_in(path: Path, **more: Any) -> LogRows:
    return LogRows(path, ROWS, WIDTH, zeros, **({"threads": 2, "deadline_seconds": 30.0} | more))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 60), st.data())
def test_space_is_what_a_dict_of_rows_says(per_block: int, rows: int, data: st.DataObject) -> None:
    """Rows move as ``LogRows`` moves them; no row is lost, and there is always room."""
    space = BlockSpace(2 * -(-rows // per_block) + 1, per_block)
    block_of: dict[int, int] = {}

    def append(chosen: list[int]) -> None:
        counts = [min(per_block, len(chosen) - first) for first in range(0, len(chosen), per_block)]
        blocks = space.allocate(np.array(counts, dtype=np.int64))
        assert not set(blocks.tolist()) & set(block_of.values())
        assert (np.diff(blocks) > 0).all()
        for at, row in enumerate(chosen):
            block_of[row] = int(blocks[at // per_block])

    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
        space.drop(np.array([block_of.pop(row) for row in chosen if row in block_of], dtype=np.int64))
        missing = -(-len(chosen) // per_block) - space.free
        if missing > 0:
            cleaned = set(space.to_clean(missing).tolist())
            moved = [row for row, block in block_of.items() if block in cleaned]
            space.drop(np.array([block_of.pop(row) for row in moved], dtype=np.int64))
            append(moved)
            assert space.free >= -(-len(chosen) // per_block), "cleaning frees what is asked for"
        append(chosen)
        assert space.free == len(space._valid) - len(set(block_of.values()))


def test_the_emptiest_blocks_are_cleaned() -> None:
    space = BlockSpace(10, 8)
    space.allocate(np.array([8, 1, 7, 2, 8, 3, 1]))
    assert space.to_clean(1).tolist() == [1, 6], "two rows go into one block"
    assert space.to_clean(2).tolist() == [1, 3, 6]


def test_rows_stay_while_a_log_is_written_many_times_over(tmp_path: Path) -> None:
    """Writing reads no block before, and cleans few: a file of fixed places reads and writes one per row."""
    slow, fixed = rows_in(tmp_path / "log"), FileRows(tmp_path / "fixed", ROWS, WIDTH, zeros)
    generator, whole = np.random.default_rng(1), of(torch.arange(ROWS), 0)
    for each in (slow, fixed):
        each.write(torch.arange(ROWS), whole)
    before = [each.traffic.bytes_read + each.traffic.bytes_written for each in (slow, fixed)]
    for number in range(30):
        slots = torch.from_numpy(np.unique(ROWS * generator.random(200) ** 2).astype(np.int64)).unique()
        whole[slots] = of(slots, number)
        for each in (slow, fixed):
            each.write(slots, whole[slots])
    wait_for_writes(slow)
    assert torch.equal(slow.read(torch.arange(ROWS)), whole)
    moved = [each.traffic.bytes_read + each.traffic.bytes_written for each in (slow, fixed)]
    moved = [after - first for after, first in zip(moved, before, strict=True)]
    assert moved[0] < 0.4 * moved[1], moved
    assert (tmp_path / "log").stat().st_size < 2.1 * ROWS / PER_BLOCK * PAGE_BYTES + 2 * PAGE_BYTES
    for each in (slow, fixed):
        each.close()


def test_rows_on_their_way_are_read_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, slots, go = rows_in(tmp_path / "rows"), torch.arange(0, ROWS, 3), threading.Event()
    write: Callable[..., int] = BlockFile.write

    def later(file: BlockFile, *arguments: Any) -> int:
        assert go.wait(30)
        return write(file, *arguments)

    monkeypatch.setattr(BlockFile, "write", later)
    slow.write(slots, of(slots, 1))
    slow.write(slots[:50], of(slots[:50], 2))
    assert torch.equal(slow.read(slots), torch.cat([of(slots[:50], 2), of(slots[50:], 1)]))
    assert slow.traffic.bytes_read == 0
    go.set()
    wait_for_writes(slow)
    assert torch.equal(slow.read(slots), torch.cat([of(slots[:50], 2), of(slots[50:], 1)]))
    assert slow.traffic.bytes_read > 0
    slow.close()


def test_a_block_of_other_rows_is_not_taken(tmp_path: Path) -> None:
    """As after a write that went to another place: the checksum is right, the rows are not."""
    slow, slots = rows_in(tmp_path / "rows"), torch.arange(100)
    slow.write(slots, of(slots, 1))
    wait_for_writes(slow)
    with (tmp_path / "rows").open("r+b") as file:
        file.seek(PAGE_BYTES)
        block = file.read(PAGE_BYTES)
        file.write(block)
    with pytest.raises(SlowMemoryError, match="blocks are not what was written"):
        slow.read(slots)
    slow.close()


def test_of_two_writes_of_a_block_on_their_way_the_newer_is_read(tmp_path: Path) -> None:
    log = LogRows(tmp_path / "rows", 100, 500, lambda slots: torch.zeros(len(slots), 500, dtype=torch.uint8))
    try:
        for value, staged in enumerate(log._staged, start=1):
            staged.blocks, staged.written = np.array([3]), Future()
            staged.buffer[0] = value
        fetch = log._start_fetch(np.array([3]), log._buffers[0])
        assert fetch.batch is None, "nothing is read from the file"
        assert log._end_fetch(deque([fetch]))[0, 0] == 2
    finally:
        for staged in log._staged:
            staged.written = None
        log.close()


def test_the_next_blocks_are_read_while_those_before_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_rows, "_READ_BYTES", 8 * PAGE_BYTES)
    slow, slots, under_way, most = rows_in(tmp_path / "rows"), torch.arange(ROWS), [0], [0]
    start, finish = BlockFile.start_read, BlockFile.finish

    def started(file: BlockFile, *arguments: Any) -> Any:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        return start(file, *arguments)

    def finished(file: BlockFile, batch: Any) -> int:
        under_way[0] -= 1
        return finish(file, batch)

    slow.write(slots, of(slots, 1))
    wait_for_writes(slow)
    monkeypatch.setattr(BlockFile, "start_read", started)
    monkeypatch.setattr(BlockFile, "finish", finished)
    assert torch.equal(slow.read(slots.flip(0)), of(slots.flip(0), 1))
    assert (under_way, most) == ([0], [2])
    with (tmp_path / "rows").open("r+b") as file:
        file.seek(PAGE_BYTES * 3 + 100)
        file.write(b"damaged")
    with pytest.raises(SlowMemoryError, match="blocks are not what was written"):
        slow.read(slots)
    later = slots[20 * PER_BLOCK :]
    assert torch.equal(slow.read(later), of(later, 1)), "nothing is read into the buffers behind an error"
    slow.close()
