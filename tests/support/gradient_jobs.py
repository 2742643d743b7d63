"""Jobs of ranks: clipping and scaling; and the same on one process with plain tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.jagged import Jagged
from flexd.embedding.row_optimizers import SGD
from tests.support.collection_jobs import ROWS, loss_of, offer, some, tables

STEPS = 4
START_SCALE = 2.0**10


@dataclass(frozen=True)
class Clipping:
    layout: RankLayout
    max_norm: float = 1.5
    norm_type: float = 2.0
    passes: int = 1
    early: bool = False
    """The norm is computed after the first pass, too."""
    scaled: bool = False
    """Training uses a GradScaler, and the loss of the last rank overflows in step 1."""
    tiers: dict[int, int] = field(default_factory=lambda: {key: 1 + key % 2 for key in range(0, 87, 3)})

    @property
    def delta(self) -> Delta:
        keys = np.array(sorted(self.tiers), dtype=np.int64)
        return Delta(keys, np.zeros(len(keys), np.uint8), np.array([self.tiers[int(k)] for k in keys], np.uint8))


def factor_of(case: Clipping, step: int, rank: int) -> float:
    """Return the factor of a rank's loss: some steps are clipped and some not."""
    overflows = case.scaled and step == 1 and rank == case.layout.world_size - 1
    return math.inf if overflows else 10.0 ** (step - 2)


def dense_parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([0.7, -0.2], dtype=torch.float64))


def loss(out: dict[str, Jagged], dense: torch.Tensor) -> torch.Tensor:
    return loss_of(out) * dense[0] + dense[1] ** 2


def train(rank: int, case: Clipping) -> dict[str, Any]:
    collection = EmbeddingCollection(tables(), optimizer=SGD(0.1), layout=case.layout, replica_slots=[61, 23, 3])
    offer(collection, case.delta)
    with torch.no_grad():
        collection(some(9, 9, rank))
    dense = dense_parameter()
    dense_optimizer = torch.optim.SGD([dense], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=START_SCALE, growth_interval=2, enabled=case.scaled)
    norms, scales, equal = [], [], True
    for step in range(STEPS):
        dense_optimizer.zero_grad()
        for at in range(case.passes):
            out = collection(some(at, step, rank))
            scaler.scale(loss(out, dense) * factor_of(case, step, rank)).backward()
            if case.early and at == 0:
                norms.append(float(collection.clip_grad_norm_(math.inf)))
        if case.layout.world_size > 1:
            dist.all_reduce(dense.grad)
        assert dense.grad is not None
        dense.grad /= case.layout.world_size
        for optimizer in (collection.optimizer, dense_optimizer):
            scaler.unscale_(optimizer)
        norms.append(float(collection.clip_grad_norm_(case.max_norm, case.norm_type, also=[dense])))
        for optimizer in (collection.optimizer, dense_optimizer):
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        equal &= collection.replicas_bit_equal()
    return {
        "norms": norms, "scales": scales, "equal": equal, "dense": dense.detach().numpy(), "steps": collection.steps,
        "replicas": sum(len(store.directory) for store in collection.engine.stores),
        "tables": {name: collection.gather_table(name).numpy() for name in ROWS},
    }  # fmt: skip


def train_alone(case: Clipping) -> dict[str, Any]:
    start = EmbeddingCollection(tables(), layout=RankLayout(1, 1))
    plain = {name: nn.Embedding.from_pretrained(start.initial_table(name), freeze=False) for name in ROWS}
    dense = dense_parameter()
    parameters = [dense, *(table.weight for table in plain.values())]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=START_SCALE, growth_interval=2, enabled=case.scaled)
    norms, scales = [], []
    world_size = case.layout.world_size
    for step in range(STEPS):
        optimizer.zero_grad()
        for at in range(case.passes):
            for rank in range(world_size):
                out = {n: Jagged(plain[n](j.values), j.lengths) for n, j in some(at, step, rank).items()}
                scaler.scale(loss(out, dense) * factor_of(case, step, rank) / world_size).backward()
            if case.early and at == 0:
                norms.append(float(torch.nn.utils.get_total_norm([t.weight.grad for t in plain.values()])))
        scaler.unscale_(optimizer)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, case.max_norm, case.norm_type)))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {
        "norms": norms, "scales": scales, "dense": dense.detach().numpy(),
        "tables": {name: table.weight.detach().numpy() for name, table in plain.items()},
    }  # fmt: skip


def overflow_in_the_sum(rank: int, layout: RankLayout) -> tuple[list[float], int, bool]:
    """Train on gradients that are finite on each rank and overflow in the sum; then on finite ones."""
    collection = EmbeddingCollection(
        [EmbeddingTable("item", 9, 2, dtype="float16")], optimizer=SGD(1e-3), layout=layout, average_gradients=False
    )
    before = collection.gather_table("item")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for size in (10_000.0, 5.0):
        out = collection({"item": Jagged(torch.tensor([4]), torch.tensor([1]))})["item"].values
        scaler.scale(out.float().sum() * size).backward()
        scaler.step(collection.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    moved = (before - collection.gather_table("item")).float()
    right = bool((moved[4] - 1e-3 * 5.0 * layout.world_size).abs().max() < 1e-3) and not moved[[0, 1, 2, 3, 5]].any()
    return scales, collection.steps, right
