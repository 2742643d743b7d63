"""Tables of every sharding type train as one process does, with copies, sums, tiered storage and the prefetch
pipeline."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import flexd
from flexd.core.placement import Delta, RankLayout
from flexd.embedding.checkpoint import table_rows
from tests.support.exactness import loss_of
from tests.support.rank_pool import Ranks, error_of

Rules = tuple[str, str, str]


SHAPES = (("item", 61, 8), ("shop", 17, 8), ("city", 23, 5))


def collection(layout: RankLayout, rules: Rules, seed: int = 0, fast: int | None = None) -> flexd.EmbeddingCollection:
    tables = [
        flexd.EmbeddingTable(name, rows, dim, dtype="float64", init_scale=0.5, sharding=rule)
        for (name, rows, dim), rule in zip(SHAPES, rules, strict=True)
    ]
    return flexd.EmbeddingCollection(
        tables, optimizer=flexd.Adagrad(lr=0.1), layout=layout, seed=seed, fast_memory_bytes=fast
    )  # fmt: skip


def train(tables: flexd.EmbeddingCollection, first_step: int, steps: int) -> None:
    for step in range(first_step, first_step + steps):
        rng = np.random.default_rng([step, tables.rank])
        ids = {name: torch.from_numpy(rng.integers(0, rows, 9)) for name, rows, _ in SHAPES}
        out = tables({name: flexd.Jagged(of, torch.tensor([len(of)])) for name, of in ids.items()})
        loss_of({name: part.values for name, part in out.items()}).backward()
        tables.optimizer.step()


def whole(tables: flexd.EmbeddingCollection) -> dict[str, np.ndarray]:
    return {name: tables.gather_table(name).numpy() for name, _, _ in SHAPES}


def save(rank: int, layout: RankLayout, rules: Rules, directory: str, window_bytes: int) -> dict[str, Any]:
    """Train, save in both forms, train on; return the tables before and after. The second save of the series has the
    rows that changed since the first alone."""
    tables = collection(layout, rules, fast=2_000)
    with mock.patch.object(table_rows, "MAX_WINDOW_BYTES", window_bytes):
        series = flexd.CheckpointSeries(tables, Path(directory, "series"))
        series.save()
        train(tables, 0, 2)
        series.save()
        series.close()
        dcp.save({"tables": flexd.ShardedState(tables)}, checkpoint_id=Path(directory, "whole"))
    saved = whole(tables)
    train(tables, 2, 2)
    return {"saved": saved, "after": whole(tables)}


def load(rank: int, layout: RankLayout, rules: Rules, directory: str, form: str, window_bytes: int) -> dict[str, Any]:
    """Load what ``save`` saved into tables of other rules, and train on."""
    tables, received, call = collection(layout, rules, seed=5), [0], dist.all_to_all_single

    def recorded(into: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        received.append(into.nbytes)
        return call(into, *args, **kwargs)

    with (
        mock.patch.object(table_rows, "MAX_WINDOW_BYTES", window_bytes),
        mock.patch.object(dist, "all_to_all_single", recorded),
    ):
        if form == "series":
            flexd.CheckpointSeries(tables, Path(directory, "series")).load()
        else:
            dcp.load({"tables": flexd.ShardedState(tables)}, checkpoint_id=Path(directory, "whole"))
    loaded = whole(tables)
    train(tables, 2, 2)
    return {"saved": loaded, "after": whole(tables), "received": max(received)}


def copied(rank: int, layout: RankLayout, exchange: str) -> dict[str, Any]:
    """Train a table that every rank has copies of, and offer a chunk of its rows."""
    tables = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 61, 8, sharding="data_parallel")],
        layout=layout,
        exchange=exchange,
        replica_slots=[5],
    )
    for step in range(4):
        ids = torch.from_numpy(np.random.default_rng([step, rank]).integers(0, 61, 9))
        tables({"item": flexd.Jagged(ids, torch.tensor([9]))})["item"].values.square().sum().backward()
        tables.optimizer.step()
    refused = error_of(tables.engine.inbox.offer, 1, Delta(np.array([3]), np.zeros(1, np.uint8), np.ones(1, np.uint8)))
    return {
        "home_accesses": tables.traffic.home_accesses, "device_accesses": tables.traffic.device_accesses,
        "bit_equal": tables.replicas_bit_equal(), "listed": len(tables.engine.migrator.placement()[0]),
        "refused": refused, "slots": tables.replica_slots[0],
    }  # fmt: skip


PAIRS = RankLayout(2, 2)


@pytest.mark.parametrize("exchange", ["chain", "direct"])
def test_a_table_copied_to_every_rank_is_read_without_a_request(ranks: Ranks, exchange: str) -> None:
    """Its rows are where a chunk cannot move them, and a listing for the daemon leaves them out."""
    for result in ranks(4).run(copied, PAIRS, exchange):
        assert "not at the tier" in result.pop("refused")
        assert result == {"home_accesses": 0, "device_accesses": 4 * 9, "bit_equal": True, "listed": 0, "slots": 5}


@pytest.mark.parametrize("form", ["series", "whole"])
@pytest.mark.parametrize("window_bytes", [300, 2**20])
def test_checkpoints_load_into_any_other_rules_and_number_of_ranks(
    ranks: Ranks, tmp_path: Path, form: str, window_bytes: int
) -> None:
    """In windows of a few rows, saved in blocks by all ranks, or whole by an owner."""
    saved = ranks(4).run(save, PAIRS, ("table_row_wise:1", "row_wise", "table_wise:2"), str(tmp_path), window_bytes)[0]
    jobs = [
        (PAIRS, ("table_wise:1", "table_row_wise:0", "row_wise")),
        (RankLayout(1, 2), ("row_wise", "table_wise:1", "table_row_wise:0")),
    ]
    for layout, others in jobs:
        for result in ranks(layout.world_size).run(load, layout, others, str(tmp_path), form, window_bytes):
            # Also where all ranks send the rows of a table to one.
            assert result["received"] <= 2 * window_bytes
            for name, table in saved["saved"].items():
                np.testing.assert_array_equal(result["saved"][name], table)
                if layout == PAIRS:  # the same batches: the state of the optimizer was loaded too
                    np.testing.assert_allclose(result["after"][name], saved["after"][name], rtol=0, atol=1e-12)
