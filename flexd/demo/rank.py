"""One training rank of the demo: ``python -m flexd.demo.rank SETUP.json RANK``.

It sends its accesses to the daemon id by id over a log, or counted by a tap. Progress goes to standard output, one JSON
object per step; the full record to ``rank-R.npz`` in the run's directory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import flexd
from flexd.demo.link import EmulatedLink, limit_collectives, rank_bytes_per_second
from flexd.demo.models import NextItem, right_aligned
from flexd.stream.batches import Batch, Batches
from flexd.stream.sample_kinds import SampleKind, SampleLengths
from flexd.stream.trace import load_trace

TAP_STEPS = 4
"""Steps between two deliveries of a tap's counts: event time jumps through the trace, so intervals are short."""


def publisher_of(setup: RunSetup, rank: int) -> flexd.Publisher:
    """Return the publisher of every id, to the broker or else the file log of the run."""
    if setup.kafka:
        from flexd.stream.kafka.sink import KafkaSink

        return flexd.Publisher(KafkaSink(setup.kafka, setup.topic), source_rank=rank)
    from flexd.stream.file_log.log import FileLogSink

    return flexd.Publisher(FileLogSink(Path(setup.file_log), f"rank-{rank}"), source_rank=rank)


ADAGRAD_EPS = 1e-4
"""Row-wise Adagrad divides a row's first gradient by its own size; gradients that cancel to rounding noise would become
a full step. This eps keeps the noise small, so that runs can be compared."""

TRAFFIC = (
    "all_to_all_intra_bytes", "all_to_all_inter_bytes", "sync_intra_bytes", "sync_inter_bytes",
    "migration_intra_bytes", "migration_inter_bytes", "home_accesses", "node_accesses", "device_accesses",
)  # fmt: skip


class Strategy(StrEnum):
    """How a run exchanges rows: ``PLANS`` beside a daemon, the others without one."""

    ROW_WISE = "row_wise"
    CHAIN = "chain"
    PREFETCH_PIPELINE = "prefetch_pipeline"
    PLANS = "plans"


PEERS = (Strategy.ROW_WISE, Strategy.CHAIN, Strategy.PREFETCH_PIPELINE)
"""Trained one after the other on the same batches where the link is emulated."""


@dataclass(frozen=True)
class RunSetup:
    """Settings that the runner gives every rank, as JSON. ``link_mbit``: of a node in each direction; 0: no limit."""

    trace: str
    job: str
    nodes: int
    local_ranks: int
    steps: int
    batch_size: int
    history: int
    samples: str
    lengths: str
    dim: int
    dtype: str
    learning_rate: float
    dense_learning_rate: float
    replica_budget: float
    seed: int
    store_port: int
    control: str
    directory: str
    file_log: str
    kafka: str | None
    tap: bool
    topic: str
    check_every: int
    micro_batches: int = 1
    link_mbit: float = 0.0
    strategy: str = Strategy.PLANS.value

    @property
    def world_size(self) -> int:
        return self.nodes * self.local_ranks

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> RunSetup:
        return RunSetup(**json.loads(path.read_text()))

    def batches(self) -> Batches:
        return Batches(
            load_trace(Path(self.trace)),
            world_size=self.world_size,
            batch_size=self.batch_size,
            steps=self.steps,
            history=self.history,
            kind=SampleKind(self.samples),
            lengths=SampleLengths(self.lengths),
            micro_batches=self.micro_batches,
        )

    def tables(self, batches: Batches) -> list[flexd.EmbeddingTable]:
        trace = batches.trace
        return [
            flexd.EmbeddingTable(name, int(rows), self.dim, dtype=self.dtype, init_scale=self.dim**-0.5)
            for name, rows in zip(trace.table_names, trace.table_rows, strict=True)
        ]

    def dense(self) -> torch.nn.Module:
        torch.manual_seed(self.seed)
        return NextItem(self.dim, self.history).to(getattr(torch, self.dtype))


def features_of(batch: Batch, names: tuple[str, ...]) -> dict[str, flexd.Jagged]:
    return {
        name: flexd.Jagged(torch.from_numpy(ids), torch.from_numpy(lengths))
        for name, ids, lengths in zip(names, batch.ids, batch.lengths, strict=True)
        if len(ids)
    }


def loss_of(model: torch.nn.Module, batch: Batch, rows: list[torch.Tensor], history: int) -> torch.Tensor:
    """Return the loss for each table's rows (in table order, tables without rows left out)."""
    sequences, mask = right_aligned(
        torch.cat(rows), torch.from_numpy(batch.order), torch.from_numpy(batch.sequence_lengths), history + 1
    )
    loss: torch.Tensor = model(sequences, mask)
    return loss


def train(setup: RunSetup, rank: int) -> dict[str, Any]:
    """Train all steps; return the record of this rank, by name."""
    batches = setup.batches()
    names = batches.trace.table_names
    planned = setup.strategy == Strategy.PLANS
    collection = flexd.EmbeddingCollection(
        setup.tables(batches),
        optimizer=flexd.RowWiseAdagrad(lr=setup.learning_rate, eps=ADAGRAD_EPS),
        layout=flexd.RankLayout(setup.nodes, setup.local_ranks),
        replica_fraction=setup.replica_budget if planned else 0.0,
        exchange="direct" if setup.strategy == Strategy.ROW_WISE else "chain",
        seed=setup.seed,
    )
    if setup.strategy == Strategy.ROW_WISE:
        collection.engine.router.request_every_look_up()
    link = None
    if setup.link_mbit and setup.nodes > 1:
        link = EmulatedLink(rank_bytes_per_second(setup.link_mbit, setup.local_ranks))
        limit_collectives(link)
    dense = setup.dense()
    model: torch.nn.Module = DistributedDataParallel(dense) if setup.world_size > 1 else dense
    dense_optimizer = torch.optim.SGD(dense.parameters(), lr=setup.dense_learning_rate)
    tap = publisher = connection = None
    event_time = [0.0]
    if planned:
        if setup.tap:
            tap = flexd.Tap(
                collection, interval_steps=TAP_STEPS, max_bytes=64 * 2**20, clock=lambda: event_time[0]
            )  # fmt: skip
        else:
            publisher = publisher_of(setup, rank)
        with _unlimited(link):
            connection = flexd.connect(collection, setup.control, job=setup.job, tap=tap)
    record: dict[str, list[Any]] = {
        name: [] for name in ("loss", "version", "seconds", "apply_seconds", "bit_equal", *TRAFFIC)
    }
    loader: Iterable[_Loaded] = _loaded(setup, batches, rank)
    if setup.strategy == Strategy.PREFETCH_PIPELINE:
        loader = flexd.prefetch(
            _loaded(setup, batches, rank), collection, features=lambda loaded: loaded[1],
            passes_per_step=setup.micro_batches,
        )  # fmt: skip
    loaded = iter(loader)
    for step in range(setup.steps):
        started = time.perf_counter()
        before, applied_before = collection.traffic.totals(), collection.engine.apply_seconds
        dense_optimizer.zero_grad()
        losses = []
        for micro_batch in range(setup.micro_batches):
            batch, features = next(loaded)
            event_time[0] = batch.seconds
            if publisher is not None:
                at = step * setup.micro_batches + micro_batch
                for name, ids in features.items():
                    publisher.publish(name, ids.values, ids.lengths, event_time_seconds=batch.seconds, step=at)
            out = collection(features)
            loss = loss_of(model, batch, [out[name].values for name in names if name in out], setup.history)
            (loss / setup.micro_batches).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        dense_optimizer.step()
        collection.optimizer.step()
        seconds = time.perf_counter() - started
        after = collection.traffic.totals()
        record["loss"].append(sum(losses) / setup.micro_batches)
        record["version"].append(collection.placement_version)
        record["seconds"].append(seconds)
        record["apply_seconds"].append(collection.engine.apply_seconds - applied_before)
        if planned and (step % setup.check_every == 0 or step == setup.steps - 1):
            with _unlimited(link):
                record["bit_equal"].append(collection.replicas_bit_equal())
        for name in TRAFFIC:
            record[name].append(after[name] - before[name])
        progress = {"step": step, "loss": record["loss"][-1], "version": collection.placement_version}
        print(json.dumps(progress), flush=True)
    next(loaded, None)  # the prefetch pipeline ends its last step
    dropped = 0 if tap is None else tap.counters.dropped
    if publisher is not None:
        publisher.close(5.0)
        counters = publisher.counters()
        dropped = counters.dropped_queue_full + counters.dropped_sink + counters.dropped_invalid
    if connection is not None:
        connection.close(5.0)
    with _unlimited(link):
        final = {f"table/{name}": collection.gather_table(name).numpy() for name in names}  # collective
    final |= {f"dense/{name}": value.numpy() for name, value in dense.state_dict().items()}
    return {
        **{name: np.array(values) for name, values in record.items()},
        "publisher_dropped": np.array(dropped),
        **(final if rank == 0 else {}),
    }


_Loaded = tuple[Batch, dict[str, flexd.Jagged]]


def _loaded(setup: RunSetup, batches: Batches, rank: int) -> Iterator[_Loaded]:
    for step in range(setup.steps):
        for micro_batch in range(setup.micro_batches):
            batch = batches.batch(step, rank, micro_batch)
            yield batch, features_of(batch, batches.trace.table_names)


def _unlimited(link: EmulatedLink | None) -> Any:
    return nullcontext() if link is None else link.unlimited()


def main() -> int:
    setup, rank = RunSetup.load(Path(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if setup.world_size > 1:
        store = TCPStore(
            "127.0.0.1", setup.store_port, setup.world_size, is_master=rank == 0, timeout=timedelta(seconds=60)
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=setup.world_size, timeout=timedelta(seconds=120)
        )
    record = train(setup, rank)
    np.savez(Path(setup.directory) / f"rank-{rank}.npz", **record)
    if setup.world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
