"""The simulator's bytes are those that real gloo ranks count on the same batches: to the byte, rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from flexd.core.keyspace import Homes, KeySpace, TableSpec
from flexd.core.placement import Delta, Placement, RankLayout
from flexd.embedding.bag_collection import EmbeddingBagCollection, EmbeddingBagTable
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import SGD, RowWiseAdagrad
from flexd.planner.model.prices import EXCHANGE_PHASES, SYNC_PHASES, Exchange, TrafficPhase
from flexd.simulate.accesses import StepPasses
from flexd.simulate.byte_counter import MIGRATION, BitWords, StepByteCounter, sent_bytes
from flexd.topology.cluster import INTER, INTRA
from tests.support.rank_pool import Ranks

IDS, SUMS, GRADIENTS = range(3)


def bytes_of_bags(
    keyspace: KeySpace,
    layout: RankLayout,
    bags: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
    exchange: Exchange,
) -> np.ndarray:
    """Return int64[ranks, 3, 2] bytes of one forward and backward pass, by link and without the sizes exchange.

    Args:
        bags: by rank the (int64[n] keys, lengths that sum to n) of each feature.
    """
    homes, local, world = Homes(keyspace, layout), layout.local_ranks, layout.world_size
    specs = [keyspace.tables[group.tables[0]] for group in keyspace.groups]
    features = [(rank, *feature) for rank, of_rank in enumerate(bags) for feature in of_rank]
    key = np.concatenate([np.empty(0, np.int64), *(keys for _, keys, _ in features)])
    source = np.repeat([rank for rank, _, _ in features], [len(keys) for _, keys, _ in features]).astype(np.int64)
    lengths = np.concatenate([np.empty(0, np.int64), *(each for _, _, each in features)])
    bag = np.repeat(np.arange(len(lengths)), lengths)
    vector = np.array([spec.row_bytes for spec in specs])[keyspace.group_of(key)]
    home = homes.home_rank(key)
    over_rail = home // local * local + source % local
    sent = np.zeros((world, 3, 2), dtype=np.int64)
    for target in (over_rail, home) if exchange is Exchange.CHAIN else (home,):
        # One vector comes back from each rank that has ids of the bag.
        first = np.zeros(len(key), dtype=np.bool_)
        first[np.unique(bag * world + target, return_index=True)[1]] = True
        away, far = source != target, (source // local != target // local).astype(np.int64)
        np.add.at(sent, (source[away], IDS, far[away]), 4)
        once = away & first
        np.add.at(sent, (target[once], SUMS, far[once]), vector[once])
        np.add.at(sent, (source[once], GRADIENTS, far[once]), vector[once])
        source = target
    return sent


def bytes_of_sizes(keyspace: KeySpace, layout: RankLayout, exchange: Exchange) -> np.ndarray:
    """Return int64[2] bytes that a rank sends in the sizes exchanges of a pass, by link."""
    between = layout.nodes - 1 if exchange is Exchange.CHAIN else layout.world_size - layout.local_ranks
    return 2 * len(keyspace.groups) * 8 * np.array([layout.local_ranks - 1, between])


TABLES = {
    "one group": (("item", 61, 8, "float32"), ("shop", 17, 8, "float32")),
    "two dims": (("item", 61, 8, "float32"), ("shop", 17, 5, "float32"), ("tiny", 3, 8, "float32")),
    "two dtypes": (("item", 61, 8, "float32"), ("shop", 17, 3, "float64")),
}


def keyspace_of(kind: str, optimizer: str) -> KeySpace:
    return KeySpace([TableSpec(name, rows, dim, dtype, optimizer) for name, rows, dim, dtype in TABLES[kind]])


def traffic_of(
    collection: EmbeddingCollection | EmbeddingBagCollection,
    features: Callable[[int, int], dict[str, Jagged]],
    chunks: list[Delta | None],
    micro_batches: int,
) -> list[dict[str, int]]:
    """Return the traffic of each step of training on features by step and micro-batch.

    Args:
        chunks: by step; each arrives before its step and is applied at the start of the next.
    """
    traffic = []
    for step, chunk in enumerate(chunks):
        if chunk is not None:
            collection.engine.inbox.offer(collection.engine.inbox._received_version + 1, chunk)
        before = collection.traffic.totals()
        for micro_batch in range(micro_batches):
            out = collection(features(step, micro_batch)).values()
            rows = [each.values if isinstance(each, Jagged) else each for each in out]
            torch.stack([values.double().sin().sum() for values in rows]).sum().backward()
        collection.optimizer.step()
        after = collection.traffic.totals()
        traffic.append({name: after[name] - before[name] for name in after})
    return traffic


def ids_of(kind: str, seed: int, step: int, rank: int, micro_batch: int = 0) -> dict[str, np.ndarray]:
    """Return skewed ids of every table, sometimes none."""
    rng = np.random.default_rng([seed, step, rank, micro_batch])
    return {
        name: (rng.zipf(1.3, int(rng.integers(0, 40))) - 1) % rows if rng.random() < 0.9 else np.empty(0, np.int64)
        for name, rows, _, _ in TABLES[kind]
    }


def keys_of(kind: str, optimizer: str, seed: int, step: int, world_size: int, micro_batch: int = 0) -> list[np.ndarray]:
    keyspace = keyspace_of(kind, optimizer)
    by_rank = [ids_of(kind, seed, step, rank, micro_batch) for rank in range(world_size)]
    return [
        np.concatenate([keyspace.keys(keyspace.index[name], rows) for name, rows in ids.items()]) for ids in by_rank
    ]


def record(
    rank: int,
    layout: RankLayout,
    kind: str,
    optimizer: str,
    exchange: str,
    seed: int,
    chunks: list[Delta | None],
    micro_batches: int = 1,
) -> list[dict[str, int]]:
    """Return the traffic of each step of training on ids."""
    collection = EmbeddingCollection(
        [EmbeddingTable(name, rows, dim, dtype=dtype) for name, rows, dim, dtype in TABLES[kind]],
        optimizer=SGD(lr=0.1) if optimizer == "sgd" else RowWiseAdagrad(lr=0.1),
        layout=layout, exchange=exchange.replace("every look-up", "direct"),
        replica_slots=[group.rows for group in keyspace_of(kind, optimizer).groups],
    )  # fmt: skip
    if exchange == "every look-up":
        collection.engine.router.request_every_look_up()

    def features(step: int, micro_batch: int) -> dict[str, Jagged]:
        return {
            name: Jagged(torch.from_numpy(ids), torch.tensor([len(ids)]))
            for name, ids in ids_of(kind, seed, step, rank, micro_batch).items()
        }

    return traffic_of(collection, features, chunks, micro_batches)


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
    ("nodes", "local_ranks", "kind", "optimizer", "exchange", "micro_batches"),
    [
        (2, 2, "two dims", "rowwise_adagrad", "chain", 1),
        (1, 4, "two dims", "sgd", "chain", 1),
        (4, 1, "two dtypes", "sgd", "chain", 1),
        (3, 1, "one group", "rowwise_adagrad", "chain", 1),
        (3, 2, "two dtypes", "sgd", "every look-up", 1),
        (2, 2, "two dtypes", "rowwise_adagrad", "chain", 2),
        (2, 2, "two dims", "sgd", "direct", 3),
        (2, 1, "one group", "sgd", "every look-up", 2),
        (3, 2, "two dtypes", "sgd", "chain", 1),
    ],
)
def test_bytes_equal_those_of_real_ranks(
    ranks: Ranks,
    nodes: int,
    local_ranks: int,
    kind: str,
    optimizer: str,
    exchange: str,
    micro_batches: int,
) -> None:
    layout, seed = RankLayout(nodes, local_ranks), nodes * 10 + local_ranks
    keyspace = keyspace_of(kind, optimizer)
    # Only the chain has replicas.
    chunks = _chunks(keyspace.total_rows, seed) if exchange == "chain" else [None] * STEPS
    said = ranks(layout.world_size).run(record, layout, kind, optimizer, exchange, seed, chunks, micro_batches)
    counter = StepByteCounter(keyspace, layout)
    placement, words = Placement.empty(), BitWords(keyspace, layout)
    replicated = 0
    for step in range(STEPS):
        collectives = []
        arrived = chunks[step - 1] if step else None
        if arrived is not None:
            collectives += counter.migration(arrived)
            placement = placement.apply(arrived)
            words.apply(arrived)
        passes = [keys_of(kind, optimizer, seed, step, layout.world_size, index) for index in range(micro_batches)]
        collectives += counter.step(
            StepPasses.of(passes, layout), placement, EXCHANGES[exchange], words, dedup=exchange != "every look-up"
        )
        sent = sent_bytes(collectives, layout.world_size)
        for rank in range(layout.world_size):
            counted = {name: value for name, value in said[rank][step].items() if name.endswith("_bytes")}
            simulated = {
                f"{name}_{link}_bytes": int(sent[rank, list(parts), at].sum())
                for name, parts in (
                    ("all_to_all", EXCHANGE_PHASES),
                    ("sync", SYNC_PHASES),
                    ("migration", (MIGRATION,)),
                )
                for link, at in (("intra", INTRA), ("inter", INTER))
            }
            assert simulated == counted, f"step {step}, rank {rank}"
            replicated += said[rank][step]["node_accesses"] + said[rank][step]["device_accesses"]
    assert (replicated > 0) == (exchange == "chain" and layout.world_size > 1)


def test_what_two_nodes_ask_of_one_home_makes_its_peak() -> None:
    layout = RankLayout(3, 1)
    keys = [np.array([0], dtype=np.int64), np.array([0, 3], dtype=np.int64), np.array([0], dtype=np.int64)]
    step = StepPasses.of([keys], layout)
    collectives = StepByteCounter(keyspace_of("one group", "sgd"), layout).step(step, Placement.empty(), Exchange.CHAIN)
    rows = next(one for one in collectives if one.phase is TrafficPhase.FORWARD_ROWS)
    # Rank 0 is home of both rows: it sends three of 32 bytes, nobody receives as many.
    assert rows.sent[:, 1].tolist() == [96, 0, 0]
    assert rows.peak.tolist() == [0, 96]


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

    def features(step: int, micro_batch: int) -> dict[str, Jagged]:
        return {
            name: Jagged(torch.from_numpy(ids), torch.from_numpy(lengths))
            for name, (ids, lengths) in bags_of(kind, seed, step, rank, micro_batch).items()
        }

    return traffic_of(collection, features, [None] * STEPS, micro_batches)


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
    ranks: Ranks,
    nodes: int,
    local_ranks: int,
    kind: str,
    summed: tuple[str, ...],
    exchange: str,
    micro_batches: int,
) -> None:
    layout, seed = RankLayout(nodes, local_ranks), nodes * 10 + local_ranks
    keyspace = keyspace_of(kind, "sgd")
    counted = ranks(layout.world_size).run(record_bags, layout, kind, exchange, seed, summed, micro_batches)
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
