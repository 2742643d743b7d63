"""A file of slow rows: what is found out after a crash or damage, and what a failing disk says."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.slow.block_file import PAGE_BYTES
from flexd.embedding.store.slow.file_rows import FileRows

ROWS, WIDTH = 4_000, 260
SLOTS = torch.arange(0, ROWS, 7)


def zeros(slots: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(slots), WIDTH, dtype=torch.uint8)


def data(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (len(SLOTS), WIDTH), dtype=torch.uint8, generator=generator)


def rows_in(path: Path, epoch: int | None = None, identity: str = "items of seed 1", rows: int = ROWS) -> FileRows:
    return FileRows(path, rows, WIDTH, zeros, identity=identity, epoch=epoch, threads=2, deadline_seconds=30.0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file that was saved as of epoch 3 and closed."""
    path = tmp_path / "rows"
    slow = rows_in(path)
    slow.write(SLOTS, data(1))
    slow.save(3)
    slow.close()
    return path


def test_a_saved_file_is_opened_again_until_it_is_written(saved: Path) -> None:
    slow = rows_in(saved, epoch=3)
    assert torch.equal(slow.read(SLOTS), data(1))
    assert not slow.read(torch.tensor([1])).any()
    slow.close()
    slow = rows_in(saved, epoch=3)  # what was only read is as it was
    slow.write(SLOTS, data(2))
    slow.close()
    with pytest.raises(SlowMemoryError, match="was in use when its process ended - remove the file and start again"):
        rows_in(saved, epoch=3)


def test_what_does_not_fit_is_refused_by_name(saved: Path) -> None:
    with pytest.raises(SlowMemoryError, match="rows: exists, and is not what an ended run has left - give another"):
        rows_in(saved)
    with pytest.raises(SlowMemoryError, match="is of epoch 3, not 4"):
        rows_in(saved, epoch=4)
    with pytest.raises(SlowMemoryError, match="identity is 'items of seed 1', not 'items of seed 2'"):
        rows_in(saved, epoch=3, identity="items of seed 2")
    with pytest.raises(SlowMemoryError, match="rows is 4000, not 5000"):
        rows_in(saved, epoch=3, rows=5_000)
    with pytest.raises(SlowMemoryError, match="cannot be opened: No such file"):
        rows_in(saved.with_name("other"), epoch=3)


def test_damage_is_found_where_it_is_read(saved: Path) -> None:
    with saved.open("r+b") as file:
        file.seek(PAGE_BYTES + PAGE_BYTES * 2 + 1_000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    slow = rows_in(saved, epoch=3)
    per_block = (PAGE_BYTES - 16) // WIDTH
    assert torch.equal(slow.read(SLOTS[2 * per_block > SLOTS]), data(1)[2 * per_block > SLOTS])
    with pytest.raises(SlowMemoryError, match=f"1 of 1 blocks are not what was written, .* from slot {2 * per_block} "):
        slow.read(SLOTS[(2 * per_block <= SLOTS) & (3 * per_block > SLOTS)])
    slow.close()


@pytest.mark.parametrize("part", ["header", "blocks"])
def test_a_damaged_header_or_list_of_blocks_is_refused(saved: Path, part: str) -> None:
    path = saved if part == "header" else saved.with_name("rows.blocks")
    content = bytearray(path.read_bytes()[: 2**20])
    content[30] ^= 255
    with path.open("r+b") as file:
        file.write(content)
    with pytest.raises(SlowMemoryError, match="its header is damaged" if part == "header" else "is not what was writ"):
        rows_in(saved, epoch=3)
    path.unlink()
    with pytest.raises(SlowMemoryError, match="No such file"):
        rows_in(saved, epoch=3)


def test_a_file_that_was_cut_or_removed(saved: Path) -> None:
    slow = rows_in(saved, epoch=3)
    os.truncate(saved, PAGE_BYTES * 100 + 100)
    with pytest.raises(SlowMemoryError, match="rows: ends within the block at byte"):
        slow.read(SLOTS)
    saved.unlink()
    with pytest.raises(SlowMemoryError, match="rows: was removed while in use - start again from the checkpoint"):
        slow.read(SLOTS)
    slow.close()
    with pytest.raises(SlowMemoryError, match="closed"):
        slow.read(SLOTS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, without direct I/O in older kernels."""
    at = tmp_path / "disk"
    at.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", at], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield at
    subprocess.run(["umount", at], check=True)


def test_a_full_disk_is_named_and_keeps_what_was_written(small_disk: Path) -> None:
    slow = rows_in(small_disk / "rows")
    slow.write(SLOTS[:100], data(1)[:100])
    with pytest.raises(SlowMemoryError, match=r"rows: cannot be written: No space left .* - make room on its disk"):
        slow.write(SLOTS, data(2))
    assert torch.equal(slow.read(SLOTS[:1]), data(2)[:1]) or torch.equal(slow.read(SLOTS[:1]), data(1)[:1])
    slow.close()


def test_a_slow_disk_is_named_within_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = FileRows(tmp_path / "rows", ROWS, WIDTH, zeros, threads=2, deadline_seconds=0.05)
    write, slowly = os.pwritev, []

    def after_a_while(*arguments: object) -> int:
        slowly.append(True)
        time.sleep(0.2)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", after_a_while)
    with pytest.raises(SlowMemoryError, match=r"rows: \d+ blocks took more than 0.05 s - look at the disk"):
        slow.write(SLOTS, data(1))
    assert slowly
    monkeypatch.undo()
    with pytest.raises(SlowMemoryError, match="took more than"):  # the buffer is still in the hands of late calls
        slow.read(SLOTS)
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


def test_what_an_ended_run_left_is_replaced_and_a_running_one_is_not(tmp_path: Path) -> None:
    slow = rows_in(tmp_path / "rows")
    slow.write(SLOTS, data(1))
    with pytest.raises(SlowMemoryError, match="rows: is in use by another process - give each job a directory"):
        rows_in(tmp_path / "rows")
    slow.close()
    other = rows_in(tmp_path / "rows")
    assert not other.read(SLOTS).any()
    other.remove()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "rows").write_text("letters")
    with pytest.raises(SlowMemoryError, match="is not what an ended run has left"):
        rows_in(tmp_path / "rows")
    assert (tmp_path / "rows").read_text() == "letters"


def test_removing_keeps_what_is_saved(saved: Path) -> None:
    rows_in(saved, epoch=3).remove()
    assert saved.exists()
