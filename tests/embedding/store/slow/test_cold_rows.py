"""Every slow memory's promise: rows come back as written, others as their seed makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from flexd.embedding.store.slow.block_file import KernelQueue
from flexd.embedding.store.slow.cold_rows import ColdRows, HostRows
from flexd.embedding.store.slow.file_rows import FileRows, rows_per_block
from flexd.embedding.store.slow.log_rows import LogRows
from tests.support.cold_rows import wait_for_writes

ROWS = 2_000


def fresh(row_bytes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows of bytes that depend on the slot alone."""

    def make(slots: torch.Tensor) -> torch.Tensor:
        return ((slots[:, None] * 31 + torch.arange(row_bytes)) % 251).to(torch.uint8)

    return make


@pytest.fixture(params=["host", "file", "file by threads", "log", "log by threads"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], ColdRows]]:
    made: list[ColdRows] = []
    if "by threads" in request.param:
        monkeypatch.setattr(KernelQueue, "make", lambda: None)

    def of_width(row_bytes: int) -> ColdRows:
        path = tmp_path / f"rows{len(made)}"
        slow: ColdRows
        if request.param == "host":
            slow = HostRows(ROWS, row_bytes, fresh(row_bytes))
        elif "log" in request.param:
            slow = LogRows(path, ROWS, row_bytes, fresh(row_bytes), threads=4)
        else:
            slow = FileRows(path, ROWS, row_bytes, fresh(row_bytes), threads=4)
        made.append(slow)
        return slow

    yield of_width
    for slow in made:
        slow.close()
        slow.close()


def drawn(generator: np.random.Generator, count: int) -> torch.Tensor:
    return torch.from_numpy(generator.choice(ROWS, count, replace=False))


@pytest.mark.parametrize("row_bytes", [8, 68, 260, 4096, 5000])
def test_rows_come_back_as_written(make: Callable[[int], ColdRows], row_bytes: int) -> None:
    slow = make(row_bytes)
    whole = fresh(row_bytes)(torch.arange(ROWS))
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
        slow = HostRows(ROWS, 24, fresh(24), pinned=wanted)
        assert torch.equal(slow.read(torch.tensor([7, 3])), fresh(24)(torch.tensor([7, 3])))
        assert pinned == [wanted, wanted]
        slow.close()


def test_traffic_counts_bytes_and_calls(make: Callable[[int], ColdRows]) -> None:
    slow = make(100)
    slow.read(torch.tensor([1, 2]))
    assert slow.traffic.bytes_read == 0, "never written"
    slow.write(torch.tensor([1]), torch.zeros(1, 100, dtype=torch.uint8))
    wait_for_writes(slow)
    before = slow.traffic.bytes_read
    slow.read(torch.tensor([1, 2, 1999]))
    traffic = slow.traffic
    moved = 100 if isinstance(slow, HostRows) else rows_per_block(100)[1]
    assert (traffic.bytes_read - before, traffic.bytes_written) == (moved, moved)
    assert traffic.seconds > 0
    assert traffic.operations > 0
    assert slow.fast_nbytes > 0
