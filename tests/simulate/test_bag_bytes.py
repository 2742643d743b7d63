"""Bytes of bags as tests count them are those that real gloo ranks count: to the byte, rank by rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.embedding.bag_collection import EmbeddingBagCollection, EmbeddingBagTable
from flexd.embedding.jagged import Jagged
from flexd.embedding.row_optimizers import SGD
from flexd.planner.model.row_bytes import EXCHANGE_PHASES, Exchange
from flexd.simulate.byte_counter import StepByteCounter, sent_bytes
from flexd.simulate.step_keys import StepPasses
from flexd.topology.cluster import INTER, INTRA
from tests.support.bag_bytes import bytes_of_bags, bytes_of_sizes
from tests.support.rank_pool import RankPool
from tests.support.simulate_jobs import TABLES, keyspace_of


def bags_of(
    kind: str, seed: int, step: int, rank: int, micro_batch: int = 0
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return skewed ids and lengths of the bags of every table; some bags and some batches are empty."""
    rng = np.random.default_rng([seed, step, rank, micro_batch])
    found = {}
    for name, rows, _, _ in TABLES[kind]:
        lengths = rng.integers(0, 9, int(rng.integers(0, 6)))
        found[name] = (rng.zipf(1.3, int(lengths.sum())) - 1) % rows, lengths
    return found


def record_bags(
    rank: int,
    layout: RankLayout,
    kind: str,
    exchange: str,
    seed: int,
    summed: tuple[str, ...],
    steps: int,
    micro_batches: int,
) -> list[dict[str, int]]:
    """Return the traffic of each step of training on bags; the tables ``summed`` be pooled at the owner."""
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagTable(name, rows, dim, dtype=dtype, pooling_at="owner" if name in summed else "requester")
            for name, rows, dim, dtype in TABLES[kind]
        ],
        optimizer=SGD(lr=0.1),
        layout=layout,
        exchange=exchange,
    )
    traffic = []
    for step in range(steps):
        before = collection.traffic.totals()
        for micro_batch in range(micro_batches):
            features = {
                name: Jagged(torch.from_numpy(ids), torch.from_numpy(lengths))
                for name, (ids, lengths) in bags_of(kind, seed, step, rank, micro_batch).items()
            }
            out = collection(features)
            torch.stack([sums.double().sin().sum() for sums in out.values()]).sum().backward()
        collection.optimizer.step()
        after = collection.traffic.totals()
        traffic.append({name: after[name] - before[name] for name in after})
    return traffic


STEPS = 4
EXCHANGES = {"chain": Exchange.CHAIN, "direct": Exchange.DIRECT_DEDUP}


@pytest.mark.parametrize(
    ("nodes", "local_ranks", "kind", "summed", "exchange", "micro_batches"),
    [
        (2, 2, "two dtypes", ("item", "shop"), "chain", 3),
        (1, 4, "two dims", ("shop",), "chain", 1),
        (3, 2, "two dims", ("item", "shop", "tiny"), "chain", 2),
        (4, 1, "two dtypes", ("item",), "chain", 1),
        (2, 2, "two dims", ("item", "shop"), "direct", 2),
    ],
)
def test_bytes_of_sums_equal_those_of_real_ranks(
    ranks: Callable[[int], RankPool],
    nodes: int,
    local_ranks: int,
    kind: str,
    summed: tuple[str, ...],
    exchange: str,
    micro_batches: int,
) -> None:
    layout, seed = RankLayout(nodes, local_ranks), nodes * 10 + local_ranks
    keyspace = keyspace_of(kind, "sgd")
    counted = ranks(layout.world_size).run(record_bags, layout, kind, exchange, seed, summed, STEPS, micro_batches)
    of_rows = StepByteCounter(keyspace, layout)
    for step in range(STEPS):
        keys = []
        of_bags = np.zeros((layout.world_size, 2), np.int64)
        for micro_batch in range(micro_batches):
            by_rank = [bags_of(kind, seed, step, rank, micro_batch) for rank in range(layout.world_size)]
            in_keys = [
                {name: (keyspace.keys(keyspace.index[name], ids), lengths) for name, (ids, lengths) in one.items()}
                for one in by_rank
            ]
            none = np.empty(0, np.int64)
            keys.append([np.concatenate([none, *(b[n][0] for n in b if n not in summed)]) for b in in_keys])
            bags = [[b[n] for n in b if n in summed] for b in in_keys]
            of_bags += bytes_of_bags(keyspace, layout, bags, EXCHANGES[exchange]).sum(axis=1)
            of_bags += bytes_of_sizes(keyspace, layout, EXCHANGES[exchange])
        collectives = of_rows.step(StepPasses.of(keys, layout), Placement.empty(), EXCHANGES[exchange])
        sent = sent_bytes(collectives, layout.world_size)
        for rank in range(layout.world_size):
            simulated = [
                int(sent[rank, list(EXCHANGE_PHASES), link].sum() + of_bags[rank, link]) for link in (INTRA, INTER)
            ]
            real = [counted[rank][step][f"all_to_all_{link}_bytes"] for link in ("intra", "inter")]
            assert simulated == real, f"step {step}, rank {rank}"
            assert sum(value for name, value in counted[rank][step].items() if name.endswith("bytes")) == sum(real)
