"""Jobs of ranks: ``state_dict`` of the home rows of a rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.row_optimizers import RowWiseAdagrad
from tests.support.collection_jobs import ROWS, look_everything_up, loss_of, offer, some, tables, train_step


def save_and_load(rank: int, layout: RankLayout, first: Delta, second: Delta, pending: bool) -> dict[str, Any]:
    """Train, save, load into a collection with other values and another placement, and continue with both."""

    def make(seed: int, delta: Delta) -> EmbeddingCollection:
        made = EmbeddingCollection(
            tables(), optimizer=RowWiseAdagrad(lr=0.1), layout=layout, replica_slots=[40, 23, 3], seed=seed
        )
        offer(made, delta)
        for step in range(3):
            train_step(made, some(seed, step, rank))
        return made

    old, new = make(1, first), make(2, second)
    saved = old.state_dict()
    pending_loss = loss_of(new(some(5, 0, rank))) if pending else None
    new.load_state_dict(saved)
    looked_up, expected = look_everything_up(new), look_everything_up(old)
    equal = [new.replicas_bit_equal()]
    if pending_loss is not None:
        pending_loss.backward()
        new.optimizer.step()
        equal.append(new.replicas_bit_equal())
    for step in range(3):
        for collection in (old, new):
            train_step(collection, some(3, step, rank))
        equal.append(new.replicas_bit_equal())
    tier = new.engine.migrator.placement()[1]
    return {
        "lookups_right": all(np.array_equal(looked_up[name], expected[name]) for name in ROWS),
        "bit_equal": equal, "replicas": len(tier),
        "difference": max(
            float((old.gather_table(name) - new.gather_table(name)).abs().max()) for name in ROWS
        ),
    }  # fmt: skip
