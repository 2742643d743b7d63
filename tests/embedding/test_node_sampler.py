"""A loader that deals: the same global batches, equal numbers per rank, fewer bytes; dealing never costs more and is
near the best on small batches."""

from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.embedding.features import Jagged
from flexd.embedding.node_sampler import BatchPrices, BatchRows, deal_batch
from tests.support.rank_pool import Ranks


def samples_of_groups(samples: int) -> dict[str, Jagged]:
    """Make samples of one of 8 groups of rows."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 8, samples)
    lengths = rng.integers(1, 5, samples)
    ids = np.repeat(group, lengths) * 20 + rng.integers(0, 20, lengths.sum())
    return {"item": Jagged(torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32)))}


def sampled(rank: int, layout: RankLayout, batch_size: int, epochs: int) -> dict[str, Any]:
    """Return the indices that this rank reads in each epoch, and the bytes a step sends dealt and undealt."""
    everything = samples_of_groups(200)
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 160, 32)], layout=layout)
    sampler = flexd.affinity.NodeSampler(everything, collection, batch_size, seed=3)
    indices = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        indices.append(list(sampler))
    ids = torch.split(everything["item"].values, everything["item"].lengths.tolist())
    size = batch_size * layout.world_size
    order = np.random.default_rng([3, 0]).permutation(200)
    undealt = [order[at * size : (at + 1) * size][rank :: layout.world_size].tolist() for at in range(len(sampler))]
    sent = []
    for batches in (undealt, indices[0]):
        before = collection.traffic.totals()["all_to_all_inter_bytes"]
        for chosen in batches:
            values = torch.cat([ids[at] for at in chosen])
            collection({"item": Jagged(values, torch.tensor([len(values)]))})["item"].values.sum().backward()
            collection.optimizer.step()
        sent.append(collection.traffic.totals()["all_to_all_inter_bytes"] - before)
    return {"indices": indices, "undealt": undealt, "length": len(sampler), "sent": sent}


def test_ranks_read_the_same_global_batches_and_send_less(ranks: Ranks) -> None:
    results = ranks(4).run(sampled, RankLayout(2, 2), 12, 2)
    assert [of_rank["length"] for of_rank in results] == [4] * 4
    for epoch in range(2):
        for number in range(4):
            batch = [of_rank["indices"][epoch][number] for of_rank in results]
            assert [len(of_rank) for of_rank in batch] == [12] * 4
            assert len(set(chain(*batch))) == 48
    dealt_first = sorted(chain(*(of_rank["indices"][0][0] for of_rank in results)))
    assert sorted(chain(*(of_rank["undealt"][0] for of_rank in results))) == dealt_first
    assert results[0]["indices"][0] != results[0]["indices"][1]
    undealt, dealt = (sum(of_rank["sent"][at] for of_rank in results) for at in range(2))
    assert dealt < 0.8 * undealt


@pytest.mark.parametrize(
    ("values", "lengths", "size", "says"),
    [([1, 2], [1, 1], 0, "batches of 0"), ([1, 99], [1, 1], 1, "out of range")],
)
def test_wrong_arguments_are_refused(values: list[int], lengths: list[int], size: int, says: str) -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 5, 4)], layout=RankLayout(1, 1))
    features = {"item": Jagged(torch.tensor(values), torch.tensor(lengths))}
    with pytest.raises(EmbeddingError, match=says):
        flexd.affinity.NodeSampler(features, collection, size)


def batch_of(seed: int, nodes: int, groups: int, samples: int, rows: int) -> BatchRows:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 1 + min(5, rows), samples)
    ids = np.concatenate([np.empty(0, dtype=np.int64), *(rng.choice(rows, n, replace=False) for n in lengths)])
    ids = ids.astype(np.int64)
    return BatchRows(
        offsets=np.concatenate([[0], np.cumsum(lengths)]), rows=ids, row_bytes=10 + ids % 3, homes=ids * 7 % nodes,
        node=rng.integers(0, nodes, samples), group=rng.integers(0, groups, samples),
    )  # fmt: skip


def counted(batch: BatchRows, to: np.ndarray) -> int:
    """Count the bytes of rows that cross one by one."""
    needed = set()
    for sample, node in enumerate(to):
        for at in range(batch.offsets[sample], batch.offsets[sample + 1]):
            if batch.homes[at] != node:
                needed.add((int(batch.rows[at]), int(node), int(batch.row_bytes[at])))
    return sum(each for _, _, each in needed)


@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 5),
    groups=st.integers(1, 3),
    samples=st.integers(0, 40),
    rows=st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_every_node_and_group_keeps_its_number_of_samples_and_no_dealing_costs_more(
    seed: int, nodes: int, groups: int, samples: int, rows: int
) -> None:
    batch = batch_of(seed, nodes, groups, samples, rows)
    dealt = deal_batch(batch, nodes)
    for group in range(groups):
        before, after = (np.bincount(of[batch.group == group], minlength=nodes) for of in (batch.node, dealt))
        np.testing.assert_array_equal(after, before)
    assert counted(batch, dealt) <= counted(batch, batch.node)
    np.testing.assert_array_equal(deal_batch(batch, nodes), dealt)


def test_small_batches_are_dealt_nearly_as_well_as_the_best_of_all_ways() -> None:
    """Exhaustive over the halves of eight samples. The samples as read cost 1.1 to 1.9 times the best."""
    over = []
    for seed in range(20):
        batch = batch_of(seed, 2, 1, 8, 12)
        batch = BatchRows(**{**vars(batch), "node": np.arange(8) % 2})
        halves = [np.isin(np.arange(8), half).astype(np.int64) for half in combinations(range(8), 4)]
        over.append(counted(batch, deal_batch(batch, 2)) / max(1, min(counted(batch, to) for to in halves)))
    assert np.mean(over) < 1.06
    assert max(over) < 1.25


@given(
    seed=st.integers(0, 10_000), nodes=st.integers(1, 5), samples=st.integers(0, 40), rows=st.integers(1, 60),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_loss_is_what_moving_one_sample_adds_to_what_crosses(seed: int, nodes: int, samples: int, rows: int) -> None:
    batch = batch_of(seed, nodes, 1, samples, rows)
    to = np.random.default_rng(seed).integers(0, nodes, samples)
    prices = BatchPrices.of(batch, nodes)
    now = counted(batch, to)
    assert prices.bytes_of(to) == now
    losses = prices.losses(to, 0.0)
    for sample in range(samples):
        for node in np.flatnonzero(np.arange(nodes) != to[sample]):
            moved = to.copy()
            moved[sample] = node
            assert losses[node, sample] == 64 * (counted(batch, moved) - now)


def test_with_a_share_more_samples_of_a_node_make_a_row_cheaper() -> None:
    """Three samples of a row at home in node 0 are in nodes 1, 1 and 2; what one more costs falls by half each time."""
    batch = BatchRows(
        offsets=np.arange(4), rows=np.zeros(3, dtype=np.int64), row_bytes=np.full(3, 100),
        homes=np.zeros(3, dtype=np.int64), node=np.array([1, 1, 2]), group=np.zeros(3, dtype=np.int64),
    )  # fmt: skip
    losses = BatchPrices.of(batch, 3).losses(batch.node, 0.5)
    np.testing.assert_array_equal(losses[0, :3], [-3200, -3200, -6400])
    assert losses[2, 0] == 3200 - 3200  # the second of node 1, and there
    assert losses[1, 2] == 1600 - 6400


@pytest.mark.parametrize("row_bytes", [100, 1 << 24, 1 << 30])
@pytest.mark.parametrize("step", [1, 1 << 40, 1 << 58])
def test_dealing_does_not_depend_on_how_large_rows_and_their_numbers_are(row_bytes: int, step: int) -> None:
    group = np.random.default_rng(1).permutation(np.arange(32) % 2)
    batch = BatchRows(
        offsets=np.arange(33) * 5, rows=step * (group[:, None] * 10 + np.arange(5)).reshape(-1),
        row_bytes=np.full(160, row_bytes), homes=np.repeat(group, 5), node=np.arange(32) % 2,
        group=np.zeros(32, dtype=np.int64),
    )  # fmt: skip
    np.testing.assert_array_equal(deal_batch(batch, 2), group)
    assert BatchPrices.of(batch, 2).bytes_of(batch.node) == 10 * row_bytes
