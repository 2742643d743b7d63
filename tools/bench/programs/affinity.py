"""One rank of ``cases.affinity``: trains the same global batches with the chain and with loaders that deal samples.

The last way also with rows in the nodes that homes learnt from the batches before name.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import flexd
from flexd.affinity import NodeSampler
from flexd.core.placement import Placement, RankLayout
from flexd.embedding.features import Jagged
from flexd.planner.affinity.outlook import rule_nodes
from flexd.planner.affinity.partition import learn_homes
from flexd.planner.affinity.window import RowCosts, SampleRows
from flexd.planner.moves import rehomed_placement
from tools.bench.ranks import serve

DENSE = 14
"""Float32 features of a sample beside its ids, a label and a number: 64 bytes with its length."""
DIM = 64
WAYS = ("chain", "ahead", "loader", "moved_loader")
_FIRST_STEPS = 2
"""Left out of step times."""
Batch = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """``path``: a pickled ``Work`` by name."""

    path: str
    nodes: int = 2
    local_ranks: int = 2


@dataclass(frozen=True)
class Work:
    """Samples, in the order of the global batches.

    Attributes:
        offsets, rows: of each sample, as ``SampleRows``.
        table_rows: rows of the table.
        moved: rows that live in other nodes, in the ways that move them.
    """

    offsets: np.ndarray
    rows: np.ndarray
    table_rows: int
    layout: RankLayout
    per_rank: int
    moved: Placement

    @staticmethod
    def of(samples: SampleRows, layout: RankLayout, per_rank: int, batches: int, window: int) -> Work:
        """Take global batches from the middle of the samples on; homes are learnt on up to ``window`` before it."""
        size = layout.world_size * per_rank
        first = len(samples) // size // 2 * size
        before = np.arange(max(0, first - window * size), first)
        seen = samples.select(before).compact()
        ones = np.ones(len(seen.keys), dtype=np.float32)
        batch, costs = (before - before[0]) // size, RowCosts(ones, np.float32(1e-3) * ones, ones)
        homes = learn_homes(seen, batch, rule_nodes(seen.keys, layout), layout.nodes, costs)
        chosen = samples.select(np.arange(first, min(len(samples) // size * size, first + batches * size)))
        return Work(
            chosen.offsets, samples.keys[chosen.rows], int(samples.keys.max()) + 1, layout, per_rank,
            rehomed_placement(homes, layout),
        )  # fmt: skip

    @property
    def batches(self) -> int:
        return (len(self.offsets) - 1) // (self.layout.world_size * self.per_rank)

    def features(self, chosen: np.ndarray) -> dict[str, Jagged]:
        lengths = self.offsets[chosen + 1] - self.offsets[chosen]
        ids = [self.rows[self.offsets[at] : self.offsets[at + 1]] for at in chosen]
        values = np.concatenate([np.empty(0, dtype=np.int64), *ids])
        return {"item": Jagged(torch.from_numpy(values.astype(np.int32)), torch.from_numpy(lengths.astype(np.int32)))}

    def batch(self, chosen: np.ndarray) -> Batch:
        dense = torch.cos(torch.from_numpy(chosen).unsqueeze(1) * torch.arange(1, DENSE + 1)).float()
        return {"features": self.features(chosen), "dense": dense}

    def read_by(self, rank: int) -> Iterator[np.ndarray]:
        """Yield the samples of a rank: each global batch is read by the ranks in turn."""
        size = self.layout.world_size * self.per_rank
        for number in range(self.batches):
            yield np.arange(number * size, (number + 1) * size)[rank :: self.layout.world_size]


def move(collection: flexd.EmbeddingCollection, moved: Placement) -> int:
    """Collective. Move the rows as the daemon does; return the bytes that this sends between nodes by this rank."""
    before = collection.traffic.totals()
    inbox = collection.engine.inbox
    for number, chunk in enumerate(Placement.empty().delta_to(moved).chunks(4_000)):
        inbox.offer(number + 1, chunk)
        for _ in range(2):  # to agree on it, and to apply it
            with torch.no_grad():
                collection({})
    assert collection.engine.migrator.rehomed_rows == len(moved)
    return inter_bytes(collection, before)


def inter_bytes(collection: flexd.EmbeddingCollection, before: dict[str, int]) -> int:
    after = collection.traffic.totals()
    return sum(after[name] - before[name] for name in after if name.endswith("inter_bytes"))


class Rank:
    def __init__(self, job: Job) -> None:
        self._works: dict[str, Work] = pickle.loads(Path(job.path).read_bytes())  # noqa: S301

    def train(self, work: str, way: str) -> dict[str, Any]:
        return train(self._works[work], way)


def train(work: Work, way: str) -> dict[str, Any]:
    """Return the bytes that this rank sent to other nodes, the mean losses and the median seconds of a step."""
    table = flexd.EmbeddingTable("item", work.table_rows, DIM, init_scale=0.1)
    slots = int(work.layout.replica_slots_used(work.moved.keys, work.moved.tiers).max(initial=0))
    collection = flexd.EmbeddingCollection(
        [table],
        layout=work.layout,
        optimizer=flexd.Adagrad(0.05),
        replica_slots=[slots],
        exchange="chain",
    )
    moving = move(collection, work.moved) if way == "moved_loader" and len(work.moved) else 0
    indices: Any = work.read_by(dist.get_rank())
    if way.endswith("loader"):
        everything = work.features(np.arange(len(work.offsets) - 1))
        indices = NodeSampler(everything, collection, work.per_rank, shuffle=False)
    loop: Any = (work.batch(np.asarray(chosen)) for chosen in indices)
    if way != "chain":
        loop = flexd.prefetch(loop, collection, features=lambda batch: batch["features"], ahead=1)
    before, losses, seconds = collection.traffic.totals(), [], [time.perf_counter()]
    for batch in loop:
        rows = collection(batch["features"])["item"]
        sample = torch.arange(len(rows.lengths)).repeat_interleave(rows.lengths)
        sums = rows.values.new_zeros(len(rows.lengths), DIM).index_add(0, sample, rows.values)
        loss = (sums.mean(1) - batch["dense"].mean(1)).square().mean()
        loss.backward()
        collection.optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter())
    sent = inter_bytes(collection, before)
    collection.close()
    step = float(np.median(np.diff(seconds)[_FIRST_STEPS:]))
    return {"bytes": sent, "losses": losses, "moving": moving, "step_seconds": step}


if __name__ == "__main__":
    serve(lambda: Rank(Job(**json.loads(sys.argv[1]))))
