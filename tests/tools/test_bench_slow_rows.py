"""Blocks and calls a row of slow rows in a file."""

from __future__ import annotations

from pathlib import Path

from bench_slow_rows import run


def test_a_log_moves_fewer_blocks_than_rows_at_fixed_places(tmp_path: Path) -> None:
    log, fixed = (run(name, "evenly", 2_000, 200, 5, tmp_path) for name in ("log", "fixed places"))
    assert 1 / 7 <= log["blocks written a row"] < 0.3
    assert 0.9 < log["blocks read a row"] < 1.3, "the row that comes, and a part of cleaning"
    assert 1.2 < fixed["blocks read a row"] <= 2, "the row that comes, and the block of the one that goes"
    assert 0.6 < fixed["blocks written a row"] <= 1
    assert log["fast bytes a row of the table"] > 4
    assert list(tmp_path.iterdir()) == []
