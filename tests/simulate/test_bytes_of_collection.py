"""The simulator's bytes are those that real gloo ranks count on the same batches: to the byte, rank by rank."""

from typing import Any

import numpy as np
import pytest
import torch

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Delta, Placement, RankLayout
from flexd.embedding.bag_collection import EmbeddingBagCollection, EmbeddingBagTable
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import SGD, RowWiseAdagrad
from flexd.planner.model.prices import EXCHANGE_PHASES, SYNC_PHASES, Exchange, TrafficPhase
from flexd.simulate.accesses import StepPasses
from flexd.simulate.byte_counter import AGREEMENT_NUMBERS, MIGRATION, BitWords, StepByteCounter, sent_bytes
from flexd.topology.cluster import INTER, INTRA
from tests.support.planner_cases import bytes_of_bags
from tests.support.rank_pool import Ranks


def bytes_of_sizes(keyspace: KeySpace, layout: RankLayout, exchange: Exchange) -> np.ndarray:
    """Return int64[2] bytes that a rank sends in the sizes exchanges of bags of a pass, by link; an agreement is in
    them."""
    between = layout.nodes - 1 if exchange is Exchange.CHAIN else layout.world_size - layout.local_ranks
    return (2 * len(keyspace.groups) + AGREEMENT_NUMBERS) * 8 * np.array([layout.local_ranks - 1, between])


TABLES = {
    "one group": (("item", 61, 8, "float32"), ("shop", 17, 8, "float32")),
    "two dims": (("item", 61, 8, "float32"), ("shop", 17, 5, "float32"), ("tiny", 3, 8, "float32")),
    "two dtypes": (("item", 61, 8, "float32"), ("shop", 17, 3, "float64")),
}


def keyspace_of(kind: str, optimizer: str) -> KeySpace:
    return KeySpace([TableSpec(name, rows, dim, dtype, optimizer) for name, rows, dim, dtype in TABLES[kind]])


def bags_of(kind: str, seed: int, step: int, rank: int, micro_batch: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return skewed ids and lengths of the bags of every table; some bags and some batches are empty."""
    rng = np.random.default_rng([seed, step, rank, micro_batch])
    found = {}
    for name, rows, _, _ in TABLES[kind]:
        lengths = rng.integers(0, 9, int(rng.integers(0, 6)))
        found[name] = (rng.zipf(1.3, int(lengths.sum())) - 1) % rows, lengths
    return found


def record(
    rank: int,
    layout: RankLayout,
    kind: str,
    optimizer: str,
    exchange: str,
    micro_batches: int,
    at_owner: tuple[str, ...],
    seed: int,
    chunks: list[Delta | None],
) -> list[dict[str, int]]:
    """Return the traffic of each step of training on bags; with tables pooled ``at_owner`` all are pooled.

    Args:
        chunks: by step; each arrives before its step and is applied at the start of the next.
    """
    more: dict[str, Any] = {"optimizer": SGD(lr=0.1) if optimizer == "sgd" else RowWiseAdagrad(lr=0.1)}
    more |= {"layout": layout, "exchange": exchange.replace("every look-up", "direct")}
    if at_owner:
        pooled = [
            EmbeddingBagTable(name, rows, dim, dtype=dtype, pooling_at="owner" if name in at_owner else "requester")
            for name, rows, dim, dtype in TABLES[kind]
        ]
        collection: Any = EmbeddingBagCollection(pooled, **more)
    else:
        tables = [EmbeddingTable(name, rows, dim, dtype=dtype) for name, rows, dim, dtype in TABLES[kind]]
        slots = [group.rows for group in keyspace_of(kind, optimizer).groups]
        collection = EmbeddingCollection(tables, replica_slots=slots, **more)
    if exchange == "every look-up":
        collection.engine.router.lookup.deduplicates = False
    traffic = []
    for step, chunk in enumerate(chunks):
        if chunk is not None:
            collection.engine.inbox.offer(collection.engine.inbox._received_version + 1, chunk)
        before = collection.traffic.totals()
        for micro_batch in range(micro_batches):
            bags = bags_of(kind, seed, step, rank, micro_batch).items()
            out = collection({name: Jagged(*map(torch.from_numpy, each)) for name, each in bags}).values()
            rows = [each.values if isinstance(each, Jagged) else each for each in out]
            torch.stack([values.double().sin().sum() for values in rows]).sum().backward()
        collection.optimizer.step()
        after = collection.traffic.totals()
        traffic.append({name: after[name] - before[name] for name in after})
    return traffic


STEPS = 5
EXCHANGES = {"chain": Exchange.CHAIN, "direct": Exchange.DIRECT_DEDUP, "every look-up": Exchange.DIRECT_DEDUP}


def _chunks(total_rows: int, seed: int) -> list[Delta | None]:
    """Rows to NODE and DEVICE, then some on to the other tiers and back; no chunk at the last steps."""
    rng = np.random.default_rng(seed)
    placement = Placement.empty()
    chunks: list[Delta | None] = []
    for _ in range(STEPS - 2):
        keys = np.sort(rng.choice(total_rows, total_rows // 2, replace=False)).astype(np.int64)
        old, new = placement.tiers_of(keys), rng.integers(0, 3, len(keys)).astype(np.uint8)
        changed = old != new
        chunks.append(Delta(keys[changed], old[changed], new[changed]))
        placement = placement.apply(chunks[-1])
    return [*chunks, None, None]


@pytest.mark.parametrize(
    ("layout", "kind", "optimizer", "exchange", "micro_batches", "at_owner"),
    [
        (RankLayout(2, 2), "two dims", "rowwise_adagrad", "chain", 1, ()),
        (RankLayout(1, 4), "two dims", "sgd", "chain", 1, ()),
        (RankLayout(4, 1), "two dtypes", "sgd", "chain", 1, ()),
        (RankLayout(3, 1), "one group", "rowwise_adagrad", "chain", 1, ()),
        (RankLayout(3, 2), "two dtypes", "sgd", "every look-up", 1, ()),
        (RankLayout(2, 2), "two dtypes", "rowwise_adagrad", "chain", 2, ()),
        (RankLayout(2, 2), "two dims", "sgd", "direct", 3, ()),
        (RankLayout(2, 1), "one group", "sgd", "every look-up", 2, ()),
        (RankLayout(3, 2), "two dtypes", "sgd", "chain", 1, ()),
        (RankLayout(2, 2), "two dtypes", "sgd", "chain", 3, ("item", "shop")),
        (RankLayout(1, 4), "two dims", "sgd", "chain", 1, ("shop",)),
        (RankLayout(3, 2), "two dims", "sgd", "chain", 2, ("item", "shop", "tiny")),
        (RankLayout(4, 1), "two dtypes", "sgd", "chain", 1, ("item",)),
        (RankLayout(2, 2), "two dims", "sgd", "direct", 2, ("item", "shop")),
    ],
    ids=str,
)
def test_bytes_equal_those_of_real_ranks(
    ranks: Ranks,
    layout: RankLayout,
    kind: str,
    optimizer: str,
    exchange: str,
    micro_batches: int,
    at_owner: tuple[str, ...],
) -> None:
    seed, world, how = layout.nodes * 10 + layout.local_ranks, layout.world_size, EXCHANGES[exchange]
    keyspace = keyspace_of(kind, optimizer)
    # Only the chain has replicas, of rows that are not pooled.
    copies = exchange == "chain" and not at_owner
    chunks = _chunks(keyspace.total_rows, seed) if copies else [None] * STEPS
    said = ranks(world).run(record, layout, kind, optimizer, exchange, micro_batches, at_owner, seed, chunks)
    counter, none = StepByteCounter(keyspace, layout), np.empty(0, np.int64)
    placement, words = Placement.empty(), BitWords(keyspace, layout)
    replicated = 0
    for step in range(STEPS):
        collectives, passes = [], []
        of_bags = np.zeros((world, 2), np.int64)
        arrived = chunks[step - 1] if step else None
        if arrived is not None:
            collectives += counter.migration(arrived)
            placement = placement.apply(arrived)
            words.apply(arrived)
        for micro_batch in range(micro_batches):
            by_rank = [
                {name: (keyspace.keys(keyspace.index[name], ids), lengths) for name, (ids, lengths) in bags.items()}
                for bags in (bags_of(kind, seed, step, rank, micro_batch) for rank in range(world))
            ]
            passes.append([np.concatenate([none, *(b[n][0] for n in b if n not in at_owner)]) for b in by_rank])
            if at_owner:
                bags = [[b[name] for name in at_owner] for b in by_rank]
                of_bags += bytes_of_bags(keyspace, layout, bags, how).sum(axis=1)
                of_bags += bytes_of_sizes(keyspace, layout, how)
        collectives += counter.step(
            StepPasses.of(passes, layout), placement, how, words, dedup=exchange != "every look-up"
        )
        sent = sent_bytes(collectives, world)
        sent[:, TrafficPhase.FORWARD_IDS] += of_bags
        for rank in range(world):
            counted = {name: value for name, value in said[rank][step].items() if name.endswith("_bytes")}
            kinds = {"all_to_all": EXCHANGE_PHASES, "sync": SYNC_PHASES, "migration": (MIGRATION,)}
            simulated = {
                f"{name}_{link}_bytes": int(sent[rank, list(parts), at].sum())
                for name, parts in kinds.items()
                for link, at in (("intra", INTRA), ("inter", INTER))
            }
            assert simulated == counted, f"step {step}, rank {rank}"
            replicated += said[rank][step]["node_accesses"] + said[rank][step]["device_accesses"]
    assert (replicated > 0) == copies


def test_what_two_nodes_ask_of_one_home_makes_its_peak() -> None:
    layout = RankLayout(3, 1)
    keys = [np.array([0], dtype=np.int64), np.array([0, 3], dtype=np.int64), np.array([0], dtype=np.int64)]
    step = StepPasses.of([keys], layout)
    collectives = StepByteCounter(keyspace_of("one group", "sgd"), layout).step(step, Placement.empty(), Exchange.CHAIN)
    rows = next(one for one in collectives if one.phase is TrafficPhase.FORWARD_ROWS)
    # Rank 0 is home of both rows: it sends three of 32 bytes, nobody receives as many.
    assert rows.sent[:, 1].tolist() == [96, 0, 0]
    assert rows.peak.tolist() == [0, 96]
