"""One training rank of the demo: ``python -m flexd.demo.rank SETUP.json RANK``.

It sends its accesses to the daemon id by id over a log, or counted by a tap. Progress goes to standard output, one JSON
object per step; the full record to ``rank-R.npz`` in the run's directory.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import flexd
from flexd.demo.link import EmulatedLink, limit_collectives, rank_bytes_per_second
from flexd.demo.setup import JOB, LEARNING_RATE, ExchangeStrategy, RunSetup
from flexd.demo.training import ADAGRAD_EPS, batches_of, dense_of, features_of, loss_of, tables_of
from flexd.stream.batches import Batch, Batches

EXCHANGES = {ExchangeStrategy.ROW_WISE: "direct", ExchangeStrategy.DEFAULT: "auto"}
"""Of strategies that do not use the two-hop chain."""


def publisher_of(setup: RunSetup, rank: int) -> flexd.Publisher:
    """Return the publisher of every id, to the broker or else the file log of the run."""
    if setup.options.kafka:
        from flexd.stream.kafka.sink import KafkaSink

        return flexd.Publisher(KafkaSink(setup.options.kafka, setup.topic), source_rank=rank)
    from flexd.stream.file_log.log import FileLogSink

    return flexd.Publisher(FileLogSink(setup.stream, f"rank-{rank}"), source_rank=rank)


TRAFFIC = (
    "all_to_all_intra_bytes", "all_to_all_inter_bytes", "sync_intra_bytes", "sync_inter_bytes",
    "migration_intra_bytes", "migration_inter_bytes", "home_accesses", "node_accesses", "device_accesses",
)  # fmt: skip


def train(setup: RunSetup, rank: int) -> dict[str, Any]:
    """Train all steps; return the record of this rank, by name."""
    options, cluster = setup.options, setup.options.cluster
    micro_batches, row_wise = options.batches.micro_batches, setup.strategy is ExchangeStrategy.ROW_WISE
    batches = batches_of(setup)
    names = batches.trace.table_names
    planned = setup.strategy is ExchangeStrategy.PLANS
    collection = flexd.EmbeddingCollection(
        tables_of(setup, batches),
        optimizer=flexd.RowWiseAdagrad(lr=LEARNING_RATE, eps=ADAGRAD_EPS),
        layout=flexd.RankLayout(cluster.nodes, cluster.local_ranks),
        exchange=EXCHANGES.get(setup.strategy, "chain"),
        seed=options.seed,
    )
    if row_wise:
        collection.engine.router.lookup.deduplicates = False
    link = EmulatedLink(rank_bytes_per_second(cluster)) if cluster.has_link else None
    if link is not None:
        limit_collectives(link)
    dense = dense_of(setup)
    model: torch.nn.Module = DistributedDataParallel(dense) if cluster.world_size > 1 else dense
    dense_optimizer = torch.optim.SGD(dense.parameters(), lr=LEARNING_RATE)
    tap = publisher = connection = None
    event_time = [0.0]
    if planned:
        if options.tap:
            # Event time jumps through the trace, so intervals are short.
            tap = flexd.Tap(
                collection, interval_steps=4, max_bytes=64 * 2**20, clock=lambda: event_time[0]
            )  # fmt: skip
        else:
            publisher = publisher_of(setup, rank)
        with _unlimited(link):
            connection = flexd.connect(collection, setup.control, job=JOB, tap=tap)
    record: dict[str, list[Any]] = defaultdict(list)
    loader: Iterable[_Loaded] = _loaded(batches, rank)
    if setup.strategy is ExchangeStrategy.DEFAULT:
        loader = flexd.prefetch(
            _loaded(batches, rank), collection, features=lambda loaded: loaded[1],
            passes_per_step=micro_batches,
        )  # fmt: skip
    loaded = iter(loader)
    for step in range(setup.steps):
        started = time.perf_counter()
        before = collection.traffic.totals()
        dense_optimizer.zero_grad()
        losses = []
        for micro_batch in range(micro_batches):
            batch, features = next(loaded)
            event_time[0] = batch.seconds
            if publisher is not None:
                at = step * micro_batches + micro_batch
                for name, ids in features.items():
                    publisher.publish(name, ids.values, ids.lengths, event_time_seconds=batch.seconds, step=at)
            out = collection(features)
            loss = loss_of(model, batch, {name: rows.values for name, rows in out.items()}, names)
            (loss / micro_batches).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        dense_optimizer.step()
        collection.optimizer.step()
        seconds = time.perf_counter() - started
        after = collection.traffic.totals()
        record["loss"].append(sum(losses) / micro_batches)
        record["version"].append(collection.placement_version)
        record["seconds"].append(seconds)
        if planned and (step % 5 == 0 or step == setup.steps - 1):
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
        final = {
            f"table/{name}": collection.gather_table(name).numpy() for name in collection.keyspace.index
        }  # collective
    final |= {f"dense/{name}": value.numpy() for name, value in dense.state_dict().items()}
    return {
        **{name: np.array(values) for name, values in record.items()},
        "publisher_dropped": np.array(dropped),
        "tuning": np.array(str(collection.tuning())),
        **(final if rank == 0 else {}),
    }


_Loaded = tuple[Batch, dict[str, flexd.Jagged]]


def _loaded(batches: Batches, rank: int) -> Iterator[_Loaded]:
    for step in range(batches.steps):
        for micro_batch in range(batches.options.micro_batches):
            batch = batches.batch(step, rank, micro_batch)
            yield batch, features_of(batch, batches.trace.table_names)


def _unlimited(link: EmulatedLink | None) -> Any:
    return nullcontext() if link is None else link.unlimited()


def main() -> int:
    setup, rank = RunSetup.load(Path(sys.argv[1])), int(sys.argv[2])
    world_size = setup.options.cluster.world_size
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world_size > 1:
        store = TCPStore("127.0.0.1", setup.store_port, world_size, is_master=rank == 0, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    record = train(setup, rank)
    np.savez(setup.directory / f"rank-{rank}.npz", **record)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
