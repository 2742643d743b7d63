#!/usr/bin/env python3
"""One rank of tools/bench_prices.py: probes the links, and trains by turns as it is told over standard input."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_model_rank import DIM, ROWS, TIMEOUT, Settings, share
from cluster_ranks import answer_questions

from flexd.core.layout import Tier
from flexd.core.placement import Delta
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.exchange.process_groups import layout_from_environment
from flexd.embedding.jagged import Jagged
from flexd.topology.files import write_cluster
from flexd.topology.probe import ProbeOptions, probe
from flexd.topology.timing import ProbeGroups


class PricedRank:
    """Answers the questions of tools/bench_prices.py. Every one is collective."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._layout = layout_from_environment()
        self._rng = np.random.default_rng([2, dist.get_rank()])
        self._collection: EmbeddingCollection | None = None

    def answer(self, question: dict[str, Any]) -> Any:
        return getattr(self, question.pop("ask"))(**question)

    def probe(self, file: str) -> None:
        """Measure the links as ``flexd probe`` does, and write the topology file."""
        groups = ProbeGroups.create(self._layout, "cpu", TIMEOUT)
        options = ProbeOptions(max_bytes=self._settings.probe_bytes, budget_seconds=self._settings.probe_seconds)
        report = probe(groups, options)
        groups.close()
        if dist.get_rank() == 0:
            write_cluster(report.cluster(), Path(file))

    def begin(self, exchange: str, node_rows: int) -> None:
        """Make a collection whose hottest rows have a copy in every node."""
        self._collection = EmbeddingCollection(
            [EmbeddingTable("item", ROWS, DIM)], layout=self._layout, exchange=exchange, replica_slots=[ROWS],
            max_migration_bytes_per_step=2**30,
        )  # fmt: skip
        if node_rows:
            keys = np.sort(np.argsort(-share(self._settings), kind="stable")[:node_rows]).astype(np.int64)
            tiers = np.full(node_rows, Tier.NODE, np.uint8)
            self._collection.engine.inbox.offer(1, Delta(keys, np.zeros(node_rows, np.uint8), tiers))
        self.train(2)

    def train(self, steps: int) -> dict[str, Any]:
        """Train; return what a step report has."""
        collection, exact = self._collection, share(self._settings)
        assert collection is not None
        dist.barrier()
        collection.phases.drain()
        started = time.perf_counter()
        for _ in range(steps):
            ids = torch.from_numpy(self._rng.choice(ROWS, self._settings.accesses, p=exact))
            collection({"item": Jagged(ids, torch.tensor([len(ids)]))})["item"].values.sum().backward()
            collection.optimizer.step()
        seconds = time.perf_counter() - started
        phases, _ = collection.phases.drain()
        return {"steps": steps, "seconds": seconds, "phases": [asdict(phase) for phase in phases]}


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    answer_questions(PricedRank(Settings(**json.loads(sys.argv[1]))).answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
