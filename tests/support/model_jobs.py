"""Jobs of ranks: training with a known distribution of accesses, for the bytes of the cost model and of the ranks."""

from __future__ import annotations

import numpy as np
import torch

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Delta, Placement
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.jagged import Jagged
from flexd.sketch.profile import Profile, TableProfile

TABLES = {"item": (3000, 32, 2000), "shop": (500, 8, 600)}
"""(rows, dim, accesses of a rank in a step) by table."""


def keyspace() -> KeySpace:
    return KeySpace([TableSpec(name, rows, dim) for name, (rows, dim, _) in TABLES.items()])


def share_of(name: str) -> np.ndarray:
    """Return the float64 [rows] probability of each row, with popular rows anywhere in the table."""
    rows = TABLES[name][0]
    share = np.arange(1, rows + 1) ** -1.1
    return np.random.default_rng(len(name) + rows).permutation(share / share.sum())


def exact_profile(layout: RankLayout) -> Profile:
    """Return a profile that lists every row with its true share."""
    nothing = np.empty(0)
    return Profile(
        tuple(
            TableProfile(
                table=name,
                rows=rows,
                weight=1e6,
                accesses_per_step=float(accesses * layout.world_size),
                hot_rows=np.arange(rows),
                hot_share=share_of(name),
                hot_lower=share_of(name),
                hot_upper=share_of(name),
                bin_share=nothing,
                bin_rows=nothing,
                distinct_rows=float(rows),
                coverage=1.0,
            )
            for name, (rows, _, accesses) in TABLES.items()
        )
    )


def placement(device: int, node: int) -> Placement:
    """Return a placement of the most popular rows of each table at DEVICE and of the next at NODE."""
    keys, tiers, space = [], [], keyspace()
    for table, name in enumerate(TABLES):
        hot = np.argsort(-share_of(name), kind="stable")[: device + node]
        keys.append(space.keys(table, hot))
        tiers.append(np.repeat(np.array([Tier.DEVICE, Tier.NODE], np.uint8), [device, node]))
    return Placement.of(np.concatenate(keys), np.concatenate(tiers), 0)


def bytes_per_step(
    rank: int, layout: RankLayout, exchange: str, device: int, node: int, steps: int
) -> dict[str, float]:
    """Return the bytes that this rank sends in a step, by kind and link: the mean over ``steps`` with the placement."""
    collection = EmbeddingCollection(
        [EmbeddingTable(name, rows, dim) for name, (rows, dim, _) in TABLES.items()],
        layout=layout, exchange=exchange, replica_slots=[group.rows for group in keyspace().groups],
    )  # fmt: skip
    target = placement(device, node)
    if len(target):
        collection.engine.inbox.offer(1, Delta(target.keys, np.zeros(len(target), np.uint8), target.tiers))
    rng = np.random.default_rng([7, rank])
    before: dict[str, int] = {}
    for step in range(steps + 2):
        if step == 2:
            assert collection.placement_version == (1 if len(target) else 0)
            before = collection.traffic.totals()
        features = {
            name: Jagged(torch.from_numpy(rng.choice(rows, accesses, p=share_of(name))), torch.tensor([accesses]))
            for name, (rows, _, accesses) in TABLES.items()
        }
        torch.stack([jagged.values.sum() for jagged in collection(features).values()]).sum().backward()
        collection.optimizer.step()
    return {name: (value - before[name]) / steps for name, value in collection.traffic.totals().items()}
