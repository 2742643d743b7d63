"""A training step: beside its peers on real ranks, and what it launches.

peers: flexd with and without a tap, and without the message by which ranks agree that all push (a rank that does not is
named at once), TorchRec's row-wise sharded EmbeddingCollection (FBGEMM's fused kernel; ``make
torchrec``) and ``nn.Embedding`` on each rank alone, in turns on the same ranks and batches over loopback; beside them
the time of the fewest bytes of a step at the rate of a copy on the device, and flexd's step by phase. dispatch:
launches and host waits (``sections.dispatch``).
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import flexd
from flexd.core.placement import RankLayout
from flexd.core.step_phases import StepPhase
from flexd.embedding import engine
from tools.bench.harness import Outcome, at_most, in_turns
from tools.bench.peers import torchrec_collection
from tools.bench.ranks import on_ranks
from tools.bench.sections import dispatch
from tools.bench.workloads import zipf_batches

DIM, WARM_UP, SKEW = 64, 6, 1.05
ROWS, IDS = {"cpu": 200_000, "cuda": 5_000_000}, {"cpu": 25_600, "cuda": 204_800}
TARGET = 1.3
Step = Callable[[torch.Tensor], None]


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="of peers; of cuda at most the GPUs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of all but dispatch")


def device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, all kernels that it launches included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def flexd_steps(table: flexd.EmbeddingTable, lengths: torch.Tensor) -> tuple[Any, dict[str, Step]]:
    """Collective. Return a collection, and its step without and with a tap."""
    collection = flexd.EmbeddingCollection(
        [table], layout=RankLayout(1, dist.get_world_size()), optimizer=flexd.RowWiseAdagrad(), device=lengths.device
    )
    flexd.Tap(collection, interval_seconds=1e9)

    def step(ids: torch.Tensor, hook: Any) -> None:
        collection.after_lookup = hook
        values = collection({"item": flexd.Jagged(ids, lengths)})["item"].values
        values.backward(values.detach())
        collection.optimizer.step()

    counted = collection.after_lookup

    def without_message(ids: torch.Tensor) -> None:
        with mock.patch.object(engine, "agree_on_sending", return_value=None):
            step(ids, None)

    return collection, {
        "flexd": lambda ids: step(ids, None),
        "flexd with a tap": lambda ids: step(ids, counted),
        "flexd without the message before a push": without_message,
    }


def torchrec_step(table: flexd.EmbeddingTable, lengths: torch.Tensor) -> Step:
    """Collective. Return the step of a row-wise sharded table with FBGEMM's fused row-wise Adagrad."""
    from torchrec import KeyedJaggedTensor

    module = torchrec_collection.sharded_collection(
        [table], sharding="row_wise", local_ranks=dist.get_world_size(), learning_rate=0.01, eps=1e-8,
        device=lengths.device,
    )  # fmt: skip

    def step(ids: torch.Tensor) -> None:
        values = module(KeyedJaggedTensor(keys=["item"], values=ids, lengths=lengths))["item"].values()
        values.backward(values.detach())

    return step


def embedding_step(table: flexd.EmbeddingTable, device: torch.device) -> Step:
    plain = torch.nn.Embedding(table.rows, table.dim, sparse=True, device=device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)

    def step(ids: torch.Tensor) -> None:
        values = plain(ids)
        values.backward(values.detach())
        optimizer.step()
        optimizer.zero_grad()

    return step


def limit_seconds(ids: torch.Tensor) -> float:
    """Return the time of the fewest bytes of a step at the rate of a copy on the device.

    Rows are read and written for each id, their gradients read; each distinct row is read and written once more.
    """
    source = torch.empty(2**24, device=ids.device)
    target = torch.empty_like(source)
    seconds = min(device_seconds(lambda: target.copy_(source), ids.device) for _ in range(5))
    return (3 * len(ids) + 2 * len(ids.unique())) * 4 * DIM * seconds / (2 * source.nbytes)


def measured_on_rank(kind: str, steps: int) -> dict[str, Any]:
    """Return the median milliseconds of a step on this rank, by what runs it, and flexd's by phase."""
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    drawn = zipf_batches(ROWS[kind], IDS[kind], SKEW, dist.get_rank())
    ids = [torch.from_numpy(next(drawn)).to(device) for _ in range(6)]
    table, lengths = flexd.EmbeddingTable("item", ROWS[kind], DIM), torch.tensor([IDS[kind]], device=device)
    collection, found = flexd_steps(table, lengths)
    found["nn.Embedding, sparse SGD, this rank alone"] = embedding_step(table, device)
    if torchrec_collection.missing() is None:
        try:
            peer = torchrec_step(table, lengths)
            peer(ids[0])
            found["torchrec"] = peer
        except NotImplementedError as error:  # its CPU build has no CUDA kernels
            print(f"not run: TorchRec: {error}")

    def timed(step: Step) -> Callable[[], float]:
        numbers = iter(range(10**9))

        def run() -> float:
            dist.barrier()
            return device_seconds(lambda: step(ids[next(numbers) % len(ids)]), device)

        return run

    turns = in_turns({name: timed(step) for name, step in found.items()}, steps, warm_up=WARM_UP)
    figures: dict[str, Any] = {f"{name}_ms": 1e3 * float(np.median(seconds)) for name, seconds in turns.items()}
    of_flexd = 3 * (steps + WARM_UP)
    figures["phase_ms"] = {
        str(phase.phase): 1e3 * phase.computed_seconds / of_flexd
        for phase in collection.phases.drain()[0]
        if phase.phase != StepPhase.DENSE  # the others' steps are in it
    }
    figures["bytes at the rate of a copy_ms"] = 1e3 * limit_seconds(ids[0])
    return figures


def peers(options: Namespace) -> Outcome:
    figures, checks = {}, []
    if (reason := torchrec_collection.missing()) is not None:
        print(f"not run: TorchRec: {reason}")
    for ranks in options.ranks:
        steps = 20 if options.quick else 100
        found = on_ranks(measured_on_rank, 1, ranks, options.device, steps, cuda=options.device == "cuda")[0]
        figures[f"{ranks} ranks"] = found
        if "torchrec_ms" in found:
            found["ratio"] = found["flexd_ms"] / found["torchrec_ms"]
            checks.append(at_most(f"{ranks} ranks: step over TorchRec's", found["ratio"], TARGET))
    return Outcome(figures, checks)


SECTIONS = {"peers": peers, "dispatch": dispatch.section}
