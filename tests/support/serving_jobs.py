"""Jobs of ranks: tables exported for serving."""

from __future__ import annotations

from typing import Any

import torch

import flexd
from flexd.core.layout import RankLayout
from tests.support.checkpoint_jobs import train_steps
from tests.support.series_jobs import made


def export(rank: int, layout: RankLayout, optimizer: str, more: dict[str, Any]) -> dict[str, Any]:
    """Train, then return of every table the whole one, its blocks, and what each rank keeps."""
    collection = made(layout, optimizer, 1, **more)
    train_steps(collection, 0, 2)
    result: dict[str, Any] = {}
    for name in collection.keyspace.index:
        largest, parts = 0, []
        for first, block in flexd.table_blocks(collection, name, 5):
            assert first == sum(len(part) for part in parts)
            largest = max(largest, len(block))
            parts.append(block)
        kept = flexd.export_table(collection, name, rank=1, block_rows=7)
        narrow = flexd.export_table(collection, name, int8=True, rank=None, block_rows=7)
        assert narrow is not None
        assert (kept is None) == (rank != 1)
        result[name] = {
            "whole": collection.gather_table(name).numpy(),
            "blocks": torch.cat(parts).numpy(),
            "largest": largest,
            "kept": None if kept is None else kept.rows.numpy(),
            "numbers": narrow.rows.numpy(),
            "scales": None if narrow.scales is None else narrow.scales.numpy(),
        }
    collection.close()
    return result
