"""Ranks whose tables have ids that are rows, or unbounded ids; questions of ``sections.ids_cost``.

A rank looks up so many ids a step, Zipf-popular (1.05), of which one in twenty is new. In the fixed table new ids have
rows of their own too, one after another.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import flexd
from tools.bench.ranks import serve
from tools.bench.workloads import zipf_batches

FIXED, UNBOUNDED = "ids are rows", "unbounded ids"
RUNS = tuple(f"{name}{way}" for name in (FIXED, UNBOUNDED) for way in ("", ", prefetch"))
NEW_SHARE, SKEW = 0.05, 1.05


@dataclass(frozen=True)
class IdsSetting:
    """A job: ``known`` ids are looked up again and again, new ones have rows among ``spare`` more.

    Attributes:
        dense: multiplications of a matrix of 512 x 512 in a step of a loop of ``flexd.prefetch``.
    """

    nodes: int = 2
    local_ranks: int = 2
    look_ups: int = 25_600
    known: int = 200_000
    spare: int = 200_000
    dim: int = 64
    dense: int = 16


class Rank:
    """Every method is collective."""

    def __init__(self, setting: IdsSetting) -> None:
        self._setting, self._dense = setting, torch.rand(512, 512)
        self._runs: dict[str, tuple[flexd.EmbeddingCollection, Iterator[Any], int]] = {}
        lengths = torch.tensor([setting.look_ups])
        for name in RUNS:
            is_fixed = name.startswith(FIXED)
            more: dict[str, Any] = {} if is_fixed else {"ids": "unbounded"}
            table = flexd.EmbeddingTable("item", setting.known + setting.spare, setting.dim, **more)
            collection = flexd.EmbeddingCollection(
                [table],
                layout=flexd.RankLayout(setting.nodes, setting.local_ranks),
                optimizer=flexd.RowWiseAdagrad(),
                exchange="chain",
            )
            given = ({"item": flexd.Jagged(ids, lengths)} for ids in self._batches(is_fixed))
            ahead = "prefetch" in name
            loop = iter(flexd.prefetch(given, collection)) if ahead else given
            self._runs[name] = collection, loop, setting.dense * ahead

    def _batches(self, is_fixed: bool) -> Iterator[torch.Tensor]:
        setting, rank, size = self._setting, dist.get_rank(), dist.get_world_size()
        rng, news = np.random.default_rng(rank), round(setting.look_ups * NEW_SHARE)
        for step, ids in enumerate(zipf_batches(setting.known, setting.look_ups, SKEW, rank)):
            came = (step * size + rank) * news + np.arange(news)
            ids[rng.choice(setting.look_ups, news, replace=False)] = setting.known + (
                came % setting.spare if is_fixed else came
            )
            yield torch.from_numpy(ids)

    def train(self, which: str, steps: int) -> list[float]:
        """Return the seconds of each step."""
        collection, loop, dense = self._runs[which]
        seconds = []
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            values = collection(next(loop))["item"].values
            for _ in range(dense):
                self._dense @ self._dense
            values.backward(values.detach())
            collection.optimizer.step()
            seconds.append(time.perf_counter() - began)
        return seconds


if __name__ == "__main__":
    serve(lambda: Rank(IdsSetting(**json.loads(sys.argv[1]))))
