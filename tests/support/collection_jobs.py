"""Jobs of ranks: small tables with skewed batches, evaluation, construction."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed import distributed_c10d

from flexd.core.errors import EmbeddingError, FlexdError, TopologyError
from flexd.core.layout import MOVED, RankLayout
from flexd.core.placement import Delta, Placement
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.connect import connect
from flexd.embedding.exchange import job_groups, process_groups
from flexd.embedding.exchange.fault_notice import FaultNotices
from flexd.embedding.jagged import Jagged
from flexd.embedding.prefetch.loop import prefetch

ROWS = {"item": 61, "odd": 23, "tiny": 3}
"""``tiny`` has fewer rows than a world of four ranks."""


def tables(dtype: str = "float64", names: tuple[str, ...] = tuple(ROWS)) -> list[EmbeddingTable]:
    dims = {"item": 8, "odd": 3, "tiny": 2}
    return [EmbeddingTable(name, ROWS[name], dims[name], dtype=dtype, init_scale=0.5) for name in names]


def everything() -> dict[str, Jagged]:
    """Return each row of each table once."""
    return {name: Jagged(torch.arange(rows), torch.tensor([rows])) for name, rows in ROWS.items()}


def some(seed: int, step: int, rank: int) -> dict[str, Jagged]:
    """Return skewed ids of every table, sometimes none."""
    rng = np.random.default_rng([seed, step, rank])
    out = {}
    for name, rows in ROWS.items():
        count = int(rng.integers(0, 40))
        ids = torch.from_numpy((rng.zipf(1.3, count) - 1) % rows)
        out[name] = Jagged(ids, torch.tensor([count]))
    return out


def loss_of(out: dict[str, Jagged]) -> torch.Tensor:
    return torch.stack([jagged.values.double().sin().sum() for jagged in out.values()]).sum()


def train_step(collection: EmbeddingCollection, features: dict[str, Jagged]) -> None:
    loss_of(collection(features)).backward()
    collection.optimizer.step()


def offer(collection: EmbeddingCollection, delta: Delta) -> None:
    collection.engine.inbox.offer(collection.engine.inbox._received_version + 1, delta)


def look_everything_up(collection: EmbeddingCollection) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return {name: jagged.values.numpy() for name, jagged in collection(everything()).items()}


def construct(rank: int, arguments: list[dict[str, Any]]) -> str:
    """Construct a collection on each rank with its own arguments; return the error."""
    keywords = {"tables": [EmbeddingTable("item", 64, 2)], "layout": RankLayout(2, 2)} | arguments[rank]
    try:
        EmbeddingCollection(**keywords)
    except (TopologyError, EmbeddingError) as error:
        return f"{type(error).__name__}: {error}"
    return "constructed"


def closed_groups(rank: int, layout: RankLayout) -> dict[str, Any]:
    """Count the process groups that collections and loops of ``prefetch`` make, and those that are left at the end."""
    made: list[str] = []
    new_subgroup = job_groups.new_subgroup

    def counted(ranks: Any, name: str, timeout: Any) -> Any:
        made.append(name.split("/")[2])
        return new_subgroup(ranks, name, timeout)

    def loop(collection: EmbeddingCollection, timeout_seconds: float) -> None:
        for features in prefetch(
            [some(0, step, rank) for step in range(3)], collection, timeout_seconds=timeout_seconds
        ):
            train_step(collection, features)

    out: dict[str, Any] = {}
    before = set(distributed_c10d._world.pg_map)
    with (
        mock.patch.object(job_groups, "new_subgroup", counted),
        mock.patch.object(job_groups, "_present", [job_groups.JobGroups()]),
    ):
        for name, exchange in (("first", "chain"), ("again", "direct")):
            made.clear()
            with EmbeddingCollection(tables(), layout=layout) as first, EmbeddingCollection(tables(), layout=layout):
                out[f"{name}: collections"] = list(made)
                loop(first, 50.0)
                loop(first, 51.0)
                of_loop = first.engine.hooks.exchanges[0][0]
                ahead = of_loop.node.group or of_loop.rail.group
                out["timeout"] = ahead._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                out[f"{name}: loops"] = list(made)
                with EmbeddingCollection(tables(), layout=layout, exchange=exchange) as third:
                    loop(third, 51.0)
                out[f"{name}: another collection"] = list(made)
            out[f"{name}: left"] = len(set(distributed_c10d._world.pg_map) - before)
        with EmbeddingCollection(tables(), layout=layout) as kept:
            with EmbeddingCollection(tables(), layout=layout):
                loop(kept, 50.0)
            loop(kept, 50.0)
            train_step(kept, some(0, 1, rank))
            out["kept"] = {name: kept.gather_table(name).numpy() for name in ROWS}
    try:
        kept(some(0, 1, rank))
    except EmbeddingError as error:
        out["closed"] = str(error)
    kept.close()
    return out


def late(rank: int, layout: RankLayout, missing: list[int], where: str, seconds: float) -> str:
    """Make or connect a collection on all ranks but the missing ones; return the error of this rank."""
    try:
        if where == "construct" and rank in missing:
            FaultNotices()  # instances are numbered alike on all ranks
        elif where == "construct":
            with mock.patch.object(process_groups, "_timeout", return_value=timedelta(seconds=seconds)):
                EmbeddingCollection(tables(), layout=layout)
        else:
            collection = EmbeddingCollection(tables(), layout=layout)
            collection._groups._timeout_seconds = seconds
            if rank not in missing and where == "connect":
                connect(collection, "127.0.0.1:1", job="job")
            elif rank not in missing:
                collection.close()
    except FlexdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def listed_by(layout: RankLayout, rank: int, placement: Placement) -> Placement:
    """Return the rows of a placement that a rank's directory lists."""
    keys, tiers = placement.keys, placement.tiers
    mine = (
        ((tiers == 1) | (tiers >= MOVED))
        & (keys % layout.local_ranks == layout.local_rank_of(rank))
        & (layout.nodes > 1)
    ) | ((tiers == 2) & (layout.world_size > 1))
    return Placement(keys[mine], tiers[mine], placement.version)


def random_placement(seed: int, rows: int = 50, moves_on: RankLayout | None = None) -> Placement:
    """Return a placement with copies of some rows; with ``moves_on`` a part of them are in other nodes instead."""
    rng = np.random.default_rng(seed)
    keys = rng.choice(sum(ROWS.values()), size=rows, replace=False).astype(np.int64)
    tiers = rng.integers(1, 3, size=rows).astype(np.uint8)
    if moves_on is not None and moves_on.nodes > 1:
        to = (moves_on.home_node(keys) + rng.integers(1, moves_on.nodes, size=rows)) % moves_on.nodes
        tiers = np.where(rng.random(rows) < 0.5, MOVED + to, tiers).astype(np.uint8)
    return Placement.of(keys, tiers)
