"""Bytes that gloo's collectives send, by the interface counters, over the bytes that flexd counts.

Headers and acknowledgements come on top; nothing may be missing.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flexd.core.layout import RankLayout
from flexd.embedding.exchange.collectives import Peers, Traffic
from tools.bench.harness import Outcome, check
from tools.bench.ranks import serve, training_ranks

START_SECONDS = 240.0
COLLECTIVES = ("all_to_all", "all_reduce", "all_gather")


@dataclass(frozen=True)
class Job:
    nodes: int = 2
    local_ranks: int = 2


class Rank:
    def __init__(self) -> None:
        self._world, self._traffic = dist.get_world_size(), Traffic()
        layout = RankLayout(self._world, 1)  # every byte counts as one between nodes
        self._peers = Peers(dist.group.WORLD, list(range(self._world)), dist.get_rank(), layout, self._traffic)

    def run(self, collective: str, size: int) -> int:
        """Return the bytes that this rank counts."""
        flat, before = torch.ones(size // 4), self._traffic.all_to_all_inter_bytes
        part = len(flat) // self._world
        if collective == "all_to_all":
            self._peers.all_to_all(flat, [part] * self._world, [part] * self._world)
        elif collective == "all_reduce":
            self._peers.all_reduce(flat)
        else:
            self._peers.all_gather(flat[:part])
        return self._traffic.all_to_all_inter_bytes - before


def section(options: Namespace) -> Outcome:
    figures, checks = {}, []
    with training_ranks("tools.bench.sections.wire", Job()) as (cluster, ranks):
        for collective in COLLECTIVES:
            for size in [8_000_000] if options.quick else [800_000, 8_000_000, 64_000_000]:
                # Connections are made here; of the first, ranks start.
                ranks.ask({"ask": "run", "collective": collective, "size": size}, START_SECONDS)
                before = cluster.sent()
                counted = sum(ranks.ask({"ask": "run", "collective": collective, "size": size}, 60))
                sent = cluster.sent() - before
                ratio = (sent.inter + sent.intra) / counted
                figures[f"{collective}_{size}_wire_per_counted"] = ratio
                checks.append(check(f"{collective}_{size}", ratio, "1.00 to 1.05", 1.0 <= ratio <= 1.05))
    return Outcome(figures, checks)


if __name__ == "__main__":
    serve(Rank)
