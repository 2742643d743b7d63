"""Trains the same global batches with the chain and with a loader that deals; counts the bytes.

The latter also with rows in the nodes that homes learnt from the batches before name."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cluster import Cluster, wait

import flexd
from flexd.affinity import NodeSampler
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.demo.ports import free_ports
from flexd.embedding.jagged import Jagged
from flexd.planner.affinity.partition import learn_homes
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.planner.affinity.traffic import rule_nodes
from flexd.planner.moves import moved_placement

DENSE = 14
"""Float32 features of a sample beside its ids, a label and a number: 64 bytes with its length."""
DIM = 64
_FIRST_STEPS = 2
"""Left out of step times."""
_SECONDS = 300.0
Batch = dict[str, Any]


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
        window = samples.select(before).compact()
        homes = learn_homes(window, (before - before[0]) // size, rule_nodes(window.keys, layout), layout.nodes)
        chosen = samples.select(np.arange(first, min(len(samples) // size * size, first + batches * size)))
        return Work(
            chosen.offsets, samples.keys[chosen.rows], int(samples.keys.max()) + 1, layout, per_rank,
            moved_placement(homes, layout),
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
        number = torch.from_numpy(np.asarray(chosen))
        dense = torch.cos(number.unsqueeze(1) * torch.arange(1, DENSE + 1)).float()
        return {"features": self.features(np.asarray(chosen)), "dense": dense, "number": number.to(torch.int32)}

    def read_by(self, rank: int) -> Iterator[np.ndarray]:
        """Yield the samples of a rank: each global batch is read by the ranks in turn."""
        size = self.layout.world_size * self.per_rank
        for number in range(self.batches):
            yield np.arange(number * size, (number + 1) * size)[rank :: self.layout.world_size]


WAYS = ("chain", "loader", "moved_loader")


def move(collection: flexd.EmbeddingCollection, moved: Placement) -> int:
    """Collective. Move the rows as the daemon does; return the bytes that this sends between nodes by this rank."""
    before = collection.traffic.totals()
    inbox = collection.engine.inbox
    for number, chunk in enumerate(Placement.empty().delta_to(moved).chunks(4_000)):
        inbox.offer(number + 1, chunk)
        for _ in range(2):  # to agree on it, and to apply it
            with torch.no_grad():
                collection({})
    assert collection.engine.migrator.moved_rows == len(moved)
    return inter_bytes(collection, before)


def inter_bytes(collection: flexd.EmbeddingCollection, before: dict[str, int]) -> int:
    after = collection.traffic.totals()
    return sum(after[name] - before[name] for name in after if name.endswith("inter_bytes"))


def train(rank: int, work: Work, way: str) -> dict[str, Any]:
    """Train; return the bytes this rank sent to other nodes and the mean losses."""
    table = flexd.EmbeddingTable("item", work.table_rows, DIM, init_scale=0.1)
    slots = int(work.layout.replica_slots_used(work.moved.keys, work.moved.tiers).max(initial=0))
    collection = flexd.EmbeddingCollection(
        [table], layout=work.layout, optimizer=flexd.Adagrad(0.05), replica_slots=[slots]
    )
    moving = move(collection, work.moved) if way.startswith("moved") else 0
    if way.endswith("loader"):
        everything = work.features(np.arange(len(work.offsets) - 1))
        indices: Any = NodeSampler(everything, collection, work.per_rank, shuffle=False)
    else:
        indices = work.read_by(rank)
    loader: Any = (work.batch(np.asarray(chosen)) for chosen in indices)
    loop = loader
    if way != "chain":
        loop = flexd.prefetch(
            loader,
            collection,
            features=lambda batch: batch["features"],
        )
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


def _rank(rank: int, directory: Path, address: str) -> None:
    """Train all work in all ways; rank 0 leaves what each rank found."""
    works: list[Work] = pickle.loads((directory / "works").read_bytes())  # noqa: S301
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=works[0].layout.world_size, timeout=timedelta(seconds=120)
    )
    mine = [_train_all(rank, work) for work in works]
    gathered: list[Any] = [None] * works[0].layout.world_size
    dist.all_gather_object(gathered, mine)
    if rank == 0:
        (directory / "found").write_bytes(pickle.dumps(gathered))
    dist.destroy_process_group()


def _train_all(rank: int, work: Work) -> dict[str, dict[str, Any]]:
    mine = {way: train(rank, work, way) for way in WAYS if len(work.moved) or not way.startswith("moved")}
    # Where no row moves they are the trainings without moves.
    return mine if len(work.moved) else mine | {"moved_loader": mine["loader"]}


def run(works: Sequence[Work], rate_mbit: float | None = None) -> list[dict[str, Any]]:
    """Train on ranks of one job, and return the figures of each work.

    Args:
        works: of one layout.
        rate_mbit: of each node's link on an emulated cluster; None: no link is limited, and no step time is returned.

    Raises:
        ClusterError: no cluster can be emulated here, or a rank failed.
    """
    layout = works[0].layout
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "works").write_bytes(pickle.dumps(list(works)))
        if rate_mbit is None:
            mp.spawn(_rank, (directory, f"tcp://127.0.0.1:{free_ports(1)[0]}"), nprocs=layout.world_size)
        else:
            with Cluster(layout.nodes, layout.local_ranks, rate_mbit=rate_mbit, burst_kib=64, mtu=9000) as cluster:
                wait(cluster.start([sys.executable, __file__, name]), _SECONDS * len(works))
        by_rank = pickle.loads((directory / "found").read_bytes())  # noqa: S301
    return [
        figures_of(work, [of_rank[number] for of_rank in by_rank], timed=rate_mbit is not None)
        for number, work in enumerate(works)
    ]


def figures_of(work: Work, by_rank: Sequence[dict[str, dict[str, Any]]], *, timed: bool) -> dict[str, Any]:
    """Return bytes between nodes over the chain's, and the largest difference of a global loss.

    ``loader`` and ``moved_loader`` are over the chain without prefetch. ``moving_bytes`` are sent once, when rows move,
    and counted in none of them.
    """
    steps = {way: max(of_rank[way]["step_seconds"] for of_rank in by_rank) for way in WAYS}
    sent = {way: sum(of_rank[way]["bytes"] for of_rank in by_rank) for way in WAYS}
    losses = {way: np.mean([of_rank[way]["losses"] for of_rank in by_rank], axis=0) for way in WAYS}
    return {
        "batches": work.batches,
        "step_ms": {} if not timed else {way: 1e3 * seconds for way, seconds in steps.items()},
        "chain_bytes": sent["chain"],
        **{way: sent[way] / max(1, sent["chain"]) for way in WAYS[1:]},
        "loss_difference": max(float(np.abs(losses[way] / losses["chain"] - 1).max()) for way in WAYS[1:]),
        "moved_rows": len(work.moved),
        "moving_bytes": sum(of_rank["moved_loader"]["moving"] for of_rank in by_rank),
    }


if __name__ == "__main__":
    _rank(int(os.environ["RANK"]), Path(sys.argv[1]), "env://")
