"""The benchmark of rows on one rank: its parts run on today's directory."""

from __future__ import annotations

import torch
from bench_rows import CHUNK_ROWS, directory


def test_a_small_directory_is_measured() -> None:
    found = directory(20_000, torch.device("cpu"), 1)
    assert set(found) == {"plain", "mixed"}
    for figures in found.values():
        assert 0.9 * CHUNK_ROWS < figures["chunk rows"] <= CHUNK_ROWS
        assert 8 < figures["bytes per row"] < 60
        assert min(figures["find"], figures["chunk milliseconds"]) > 0
