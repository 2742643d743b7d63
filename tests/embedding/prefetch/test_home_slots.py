"""Every home learns of its rows that any rank's batch looks up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexd.core.keyspace import DimGroup
from flexd.core.layout import RankLayout
from flexd.embedding.features import FeatureKeys
from flexd.embedding.prefetch.home_slots import HomeSlots
from flexd.embedding.store.store import make_stores

CPU = torch.device("cpu")
GROUPS = [DimGroup(2, "float32", "sgd", 0, 70, (0,)), DimGroup(3, "float32", "sgd", 70, 81, (1,))]


class World:
    """All ranks of an exchange, in threads of one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=30)
        self._sent: list[Any] = [None] * size

    def of(self, rank: int) -> Any:
        def all_to_all(send: torch.Tensor, counts: list[int], received: list[int]) -> torch.Tensor:
            self._sent[rank] = torch.split(send, counts)
            self._barrier.wait()
            parts = [of_peer[rank] for of_peer in self._sent]
            self._barrier.wait()
            assert [len(part) for part in parts] == received
            return torch.cat(parts)

        return SimpleNamespace(size=self.size, all_to_all=all_to_all)


@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_homes_learn_their_rows(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    layout, world = RankLayout(1, ranks), World(ranks)
    stores = [make_stores(GROUPS, layout, rank, [0, 0], CPU) for rank in range(ranks)]
    batches: list[FeatureKeys | None] = []
    wanted: set[int] = set()
    for rank in range(ranks):
        first, second = rng.integers(0, 70, 9), rng.integers(70, 81, 0 if rank == 1 else 4)
        if rank == 2:
            batches.append(None)
            continue
        wanted |= {*first.tolist(), *second.tolist()}
        keys = torch.from_numpy(np.concatenate([first, second]))
        batches.append(FeatureKeys([], keys, None, [len(first), len(second)]))
    with ThreadPoolExecutor(ranks) as threads:
        found = list(
            threads.map(lambda rank: HomeSlots(stores[rank], world.of(rank)).exchange(batches[rank]), range(ranks))
        )
    for of_rank, stores_of_rank in zip(found, stores, strict=True):
        for store, slots in zip(stores_of_rank, of_rank, strict=True):
            keys_of_rank = store.home_addresses().tolist()
            assert slots.tolist() == [slot for slot, key in enumerate(keys_of_rank) if key in wanted]
