"""Measure what the phase meter of the training step costs, and print a step by phase.

    python tools/bench_phases.py [--layout 2x2] [--batch 6400] [--steps 40]

Ranks are processes on this machine, over gloo without a limited link. The cost is the number of laps of a step
times the seconds of a lap and its context, over the step. Exit status 1 if it is 1 % or more.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flexd.control.protocol.report import StepPhase
from flexd.core.layout import RankLayout
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.exchange.phase_meter import PhaseMeter
from flexd.embedding.jagged import Jagged

ROWS, DIM = 200_000, 64


def seconds_of_a_phase(number: int = 20_000) -> float:
    """Return the seconds of entering and leaving a phase with a collective inside: four laps."""
    meter = PhaseMeter()
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(number):
            with meter.phase(StepPhase.ROWS):
                meter.begin_collective()
                meter.end_collective(leaves_node=True)
                meter.sent(1, 1)
        best = min(best, (time.perf_counter() - started) / number)
    return best


class CountingMeter(PhaseMeter):
    """Counts its laps."""

    laps = 0

    def _lap(self, bucket: int) -> None:
        self.laps += 1
        super()._lap(bucket)


def rank(number: int, layout: RankLayout, batch: int, steps: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=layout.world_size)
    collection = EmbeddingCollection([EmbeddingTable("item", ROWS, DIM)], layout=layout)
    meter = collection.traffic.phases = CountingMeter()
    rng = np.random.default_rng(number)
    times = []
    for step in range(steps + 3):
        if step == 3:
            meter.drain()
            meter.laps = 0
        ids = torch.from_numpy((rng.zipf(1.2, batch) - 1) % ROWS)
        started = time.perf_counter()
        collection({"item": Jagged(ids, torch.tensor([batch]))})["item"].values.sum().backward()
        collection.optimizer.step()
        times.append(time.perf_counter() - started)
    if number == 0:
        answers.put((float(np.median(times[3:])), meter.laps / steps, meter.drain()[0]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="2x2", help="nodes x local ranks")
    parser.add_argument("--batch", type=int, default=6400, help="look-ups of a rank and step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--port", type=int, default=29_871)
    given = parser.parse_args()
    layout = RankLayout(*(int(part) for part in given.layout.split("x")))
    context = mp.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=rank, args=(number, layout, given.batch, given.steps, given.port, answers))
        for number in range(layout.world_size)
    ]
    for process in processes:
        process.start()
    step, laps, phases = answers.get(timeout=300)
    for process in processes:
        process.join(60)
    lap = seconds_of_a_phase() / 4
    share = laps * lap / step
    print(f"{'phase':8} {'computed ms':>12} {'exposed ms':>11} {'intra KB':>9} {'inter KB':>9} {'collectives':>12}")
    for phase in phases:
        collectives = phase.intra_collectives + phase.inter_collectives
        print(
            f"{phase.phase:8} {1e3 * phase.computed_seconds / given.steps:12.3f} "
            f"{1e3 * phase.exposed_seconds / given.steps:11.3f} {phase.intra_bytes / given.steps / 1e3:9.1f} "
            f"{phase.inter_bytes / given.steps / 1e3:9.1f} {collectives / given.steps:12.1f}"
        )
    print(
        f"step {1e3 * step:.2f} ms (median of {given.steps}, {given.layout}, {given.batch} look-ups a rank); "
        f"{laps:.0f} laps of {1e6 * lap:.2f} us: {share:.3%} of the step"
    )
    return int(share >= 0.01)


if __name__ == "__main__":
    sys.exit(main())
