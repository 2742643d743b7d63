"""Rows that live in other nodes than their homes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import flexd
from flexd.core.placement import REHOMED, Placement, RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.jagged import Jagged
from tests.support import prefetch_pipeline_jobs
from tests.support.collection_jobs import offer
from tests.support.exactness import Scenario
from tests.support.prefetch_pipeline_jobs import Loop
from tests.support.rank_pool import RankPool
from tools.bench.sections.dispatch import Counting

LAYOUT = RankLayout(2, 1)
ROWS = 40


def made() -> EmbeddingCollection:
    tables = [flexd.EmbeddingTable(name, ROWS, 4, dtype="float64", init_scale=0.5) for name in ("item", "shop")]
    return EmbeddingCollection(
        tables, layout=LAYOUT, optimizer=flexd.Adagrad(lr=0.5), replica_slots=[2 * ROWS], average_gradients=False
    )


def move_to_the_other_node(collection: EmbeddingCollection, keys: np.ndarray) -> None:
    tiers = (REHOMED + 1 - LAYOUT.home_node(keys)).astype(np.uint8)
    delta = Placement.empty().delta_to(Placement.of(keys, tiers))
    stored = 4 * 8 + 4 * 8  # values and Adagrad's state
    assert collection.engine.migrator.copied_bytes(delta) == len(keys) * stored, "what paces chunks counts moves"
    offer(collection, delta)
    for _ in range(2):  # to agree on the chunk, and to apply it
        look_up(collection)
    assert collection.engine.migrator.rehomed_rows == len(keys)


def look_up(collection: EmbeddingCollection) -> dict[str, Any]:
    every = Jagged(torch.arange(ROWS), torch.tensor([ROWS]))
    with torch.no_grad():
        return {name: part.values.numpy() for name, part in collection({"item": every, "shop": every}).items()}


def whole_tables(collection: EmbeddingCollection) -> dict[str, Any]:
    return {name: collection.gather_table(name).numpy() for name in ("item", "shop")}


def train(collection: EmbeddingCollection) -> None:
    every = Jagged(torch.arange(ROWS), torch.tensor([ROWS]))
    sum((rows.values.sin()).sum() for rows in collection({"item": every, "shop": every}).values()).backward()
    collection.optimizer.step()


def load(rank: int) -> list[dict[str, Any]]:
    """Return all tables after training with re-homed rows, after rows of one table were set, after a state was loaded,
    and after a look-up that follows."""
    collection = made()
    kept = collection.state_dict()
    found = [whole_tables(collection)]
    move_to_the_other_node(collection, np.arange(0, 2 * ROWS, 3))
    train(collection)
    collection.set_rows("shop", 0, torch.zeros(ROWS, 4, dtype=torch.float64))
    found.append(whole_tables(collection))
    train(collection)
    found.append(whole_tables(collection))
    collection.load_state_dict(kept)
    found.append(whole_tables(collection))
    found.append(look_up(collection))
    collection.close()
    return found


def launches_and_waits(rank: int, moves: bool) -> tuple[int, int]:
    """Return what a step launches on an accelerator, and how often the host waits."""
    with mock.patch("flexd.embedding.devices.in_host_memory", return_value=False):
        collection = made()
        if moves:
            move_to_the_other_node(collection, np.arange(0, 2 * ROWS, 3))
        for _ in range(2):
            train(collection)
        counting = Counting()
        with counting, counting.host_reads():
            train(collection)
        collection.close()
    return counting.launches.total(), counting.waits.total()


Ranks = Callable[[int], RankPool]
TRAINING = Scenario(2, 2, "adam", moved=True, replica_fraction=1.0, two_dims=True, passes=3)


@pytest.mark.parametrize(
    "loop",
    [
        Loop(ahead=True, read_every=2, max_norm=0.05),
        Loop(ahead=False, save_every=3),
        Loop(ahead=True, save_every=2, evaluate_every=2),
    ],
    ids=["gathered and clipped", "saved and loaded", "saved and loaded ahead"],
)
def test_rehomed_rows_are_read_clipped_saved_and_loaded_as_all_others(ranks: Ranks, loop: Loop) -> None:
    """Losses hold what is read: norms, tables and evaluations too."""
    scenario = replace(TRAINING, passes=1)
    pool = ranks(4)
    moved = pool.run(prefetch_pipeline_jobs.train, scenario, loop)
    still = pool.run(prefetch_pipeline_jobs.train, replace(scenario, moved=False, replica_fraction=0.0), loop)
    for one, other in zip(moved, still, strict=True):
        assert one["most_moved"] > 5
        assert other["most_moved"] == 0
        np.testing.assert_allclose(one["losses"], other["losses"], rtol=0, atol=1e-9)
        for name, table in other["tables"].items():
            np.testing.assert_allclose(one["tables"][name], table, rtol=0, atol=1e-9)


def test_what_is_loaded_replaces_rehomed_rows_and_no_others(ranks: Ranks) -> None:
    for first, set_rows, trained, loaded, looked_up in ranks(2).run(load):
        assert not set_rows["shop"].any()
        assert not np.equal(set_rows["item"], first["item"]).any(), "re-homed rows keep what they learnt"
        assert not np.equal(trained["item"], set_rows["item"]).any()
        for name, table in first.items():
            np.testing.assert_array_equal(loaded[name], table)
            np.testing.assert_array_equal(looked_up[name], table)


def test_the_host_waits_for_nothing_more_where_rows_have_moved(ranks: Ranks) -> None:
    pool = ranks(2)
    for still, moved in zip(pool.run(launches_and_waits, False), pool.run(launches_and_waits, True), strict=True):
        assert moved[1] == still[1]
        assert still[0] < moved[0] <= still[0] + 2 * 22, "22 kernels a station, whatever the tables"
