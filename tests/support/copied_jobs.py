"""A table whose rows all have copies on every rank: by its home rule, and listed by chunks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch

import flexd
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from tests.support.collection_jobs import offer
from tools.bench.sections.dispatch import Counting

ROWS, OTHER_ROWS = 61, 40


def measured(rank: int, layout: RankLayout, exchange: str, by_rule: bool) -> dict[str, Any]:
    """Train with a copied table beside a spread one; return what a step costs and both tables after it."""
    with mock.patch("flexd.embedding.devices.in_host_memory", return_value=False):
        tables = flexd.EmbeddingCollection(
            [
                flexd.EmbeddingTable("city", ROWS, 8, homes="every rank" if by_rule else "all"),
                flexd.EmbeddingTable("item", OTHER_ROWS, 8),
            ],
            layout=layout, exchange=exchange, optimizer=flexd.Adagrad(lr=0.1), replica_slots=[0 if by_rule else ROWS],
        )  # fmt: skip
        if not by_rule:
            offer(
                tables, Placement.empty().delta_to(Placement.of(np.arange(ROWS), np.full(ROWS, Tier.DEVICE, np.uint8)))
            )
        train(tables, range(4))  # agrees on the chunk, applies it and copies the rows
        tables.traffic.reset()
        counting = Counting()
        with counting, counting.host_reads():
            train(tables, range(4, 8))
        directory = tables.engine.migrator._directory
        found = {
            "traffic": tables.traffic.totals(), "launches": counting.launches, "waits": counting.waits,
            "uploads": counting.uploads, "listed": len(directory), "directory_bytes": directory.nbytes,
        }  # fmt: skip
        equal = tables.replicas_bit_equal()
        whole = {name: tables.gather_table(name).numpy() for name in ("city", "item")}
        tables.close()
    return {"costs": found, "tables": whole, "bit_equal": equal}


def train(tables: flexd.EmbeddingCollection, steps: range) -> None:
    for step in steps:
        rng = np.random.default_rng([step, tables.rank])
        ids = {
            name: torch.from_numpy(rng.integers(0, rows, 9)) for name, rows in (("city", ROWS), ("item", OTHER_ROWS))
        }
        out = tables({name: flexd.Jagged(of, torch.tensor([len(of)])) for name, of in ids.items()})
        torch.stack([part.values.sin().sum() for part in out.values()]).sum().backward()
        tables.optimizer.step()
