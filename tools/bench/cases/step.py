"""A training step: beside TorchRec's on real ranks, what it launches, and its parts on one rank.

torchrec: flexd beside TorchRec's row-wise sharded EmbeddingCollection (fused FBGEMM kernel), in turns on the same ranks
and batches over loopback; ``make torchrec``. dispatch: launches and host waits (``sections.dispatch``). rows: look-ups
on one rank beside ``nn.Embedding`` (``sections.rows``). updates: updates by each optimizer beside torch's and FBGEMM's
(``sections.updates``).
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

import flexd
from flexd.core.layout import RankLayout
from tools.bench.harness import Outcome, Skipped, at_most, in_turns
from tools.bench.peers import torchrec_collection
from tools.bench.ranks import on_ranks
from tools.bench.sections import dispatch, rows, updates
from tools.bench.sections.rows import zipf_ids

ROWS, DIM, IDS = 200_000, 64, 25_600
TARGET = 1.3
Step = Callable[[torch.Tensor], None]


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="beside TorchRec")
    parser.add_argument("--device", default="cpu", help="of rows and updates")


def flexd_step(table: flexd.EmbeddingTable, world_size: int) -> Step:
    collection = flexd.EmbeddingCollection([table], layout=RankLayout(world_size, 1), optimizer=flexd.RowWiseAdagrad())

    def step(ids: torch.Tensor) -> None:
        values = collection({"item": flexd.Jagged(ids, torch.tensor([IDS]))})["item"].values
        values.backward(values.detach())
        collection.optimizer.step()

    return step


def torchrec_step(table: flexd.EmbeddingTable, world_size: int) -> Step:
    from torchrec import KeyedJaggedTensor

    module = torchrec_collection.sharded_collection(
        [table], sharding="row_wise", local_ranks=world_size, learning_rate=0.01, eps=1e-8
    )

    def step(ids: torch.Tensor) -> None:
        values = module(KeyedJaggedTensor(keys=["item"], values=ids, lengths=torch.tensor([IDS])))["item"].values()
        values.backward(values.detach())

    return step


def rank_medians(steps: int) -> dict[str, float]:
    """Return the median seconds of a step on this rank, of flexd and of TorchRec."""
    world_size = dist.get_world_size()
    ids = [zipf_ids(ROWS, IDS, torch.device("cpu"), [1, dist.get_rank(), number]) for number in range(6)]
    table = flexd.EmbeddingTable("item", ROWS, DIM)

    def timed(step: Step) -> Callable[[], float]:
        numbers = iter(range(10**9))

        def run() -> float:
            dist.barrier()
            started = time.perf_counter()
            step(ids[next(numbers) % len(ids)])
            return time.perf_counter() - started

        return run

    both = {"flexd": timed(flexd_step(table, world_size)), "torchrec": timed(torchrec_step(table, world_size))}
    return {name: float(np.median(seconds)) for name, seconds in in_turns(both, steps, warm_up=6).items()}


def beside_torchrec(options: Namespace) -> Outcome:
    if (reason := torchrec_collection.missing()) is not None:
        raise Skipped(reason)
    figures, checks = {}, []
    for world_size in options.ranks:
        medians = on_ranks(rank_medians, world_size, 1, 20 if options.quick else 100)[0]
        ratio = medians["flexd"] / medians["torchrec"]
        figures[f"{world_size} ranks"] = {f"{name}_ms": 1e3 * of for name, of in medians.items()} | {"ratio": ratio}
        checks.append(at_most(f"{world_size} ranks: step over TorchRec's", ratio, TARGET))
    return Outcome(figures, checks)


SECTIONS = {
    "torchrec": beside_torchrec,
    "dispatch": dispatch.section,
    "rows": rows.section,
    "updates": updates.section,
}
