"""The training of a chaos run: what a rank does, and the same losses from plain tables in one process.

Popular rows change all the time, so that there is always something to migrate; the loss keeps pulling every row to
another place, so that no step is without effect.
"""

import faulthandler
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import flexd
from flexd.stream.kafka.sink import KafkaSink
from tests.e2e.chaos.chaos_misuse import WEIGHTS, MisusingTrainer, misuse_of

JOB = "chaos"
TABLES = {"item": (4_000, 8, 160), "shop": (500, 5, 40), "tag": (300, 3, 30)}
"""rows, dim, look-ups of a rank in a step."""
_BAG_IDS = {"tag": 6}
"""Ids of each bag of the tables that are added up by bag, at the owner of the rows."""
LAYOUT = flexd.RankLayout(2, 2)
WORLD = LAYOUT.world_size
SECONDS_A_STEP = 0.05
"""Of event time."""
FIRST_SECOND = 1.7e9
RANK_SECONDS = 60.0
"""Timeout of the ranks' process group: no wait of a step is longer."""
CHECKPOINT_STEPS = 100
_STEPS_A_PHASE = 30
"""After so many steps other rows are popular."""
_LEARNING_RATE, _EPSILON = 0.05, 1e-4
_REPLICA_SLOTS = 200, 25, 15


def specs() -> list[flexd.EmbeddingTable]:
    return [
        flexd.EmbeddingBagTable(name, rows, dim, dtype="float64", init_scale=0.5, pooling_at="owner")
        if name in _BAG_IDS
        else flexd.EmbeddingTable(name, rows, dim, dtype="float64", init_scale=0.5)
        for name, (rows, dim, _) in TABLES.items()
    ]


def batch(seed: int, step: int, rank: int) -> dict[str, np.ndarray]:
    """int64 row ids of each table."""
    rng = np.random.default_rng([seed, step, rank])
    phase = step // _STEPS_A_PHASE
    return {name: ((rng.zipf(1.3, count) % rows) * 7 + phase * 611) % rows for name, (rows, _, count) in TABLES.items()}


def features(seed: int, step: int, rank: int) -> dict[str, flexd.Jagged]:
    """Return the batch in new tensors."""
    return {
        name: flexd.Jagged(torch.from_numpy(rows), torch.full((len(rows) // size,), size))
        for name, rows in batch(seed, step, rank).items()
        for size in (_BAG_IDS.get(name, len(rows)),)
    }


def weights(seed: int, step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return a factor for each id of a bag, where a step has them."""
    rng = np.random.default_rng([seed, step, rank, 2])
    return {name: torch.from_numpy(rng.uniform(0.5, 1.5, TABLES[name][2])) for name in _BAG_IDS}


def loss_of(rows: dict[str, torch.Tensor], seed: int, step: int, rank: int) -> torch.Tensor:
    """Pulls every row looked up to a place of its own."""
    rng = np.random.default_rng([seed, step, rank, 1])
    parts = [(values - torch.from_numpy(rng.normal(size=values.shape))).square().sum() for values in rows.values()]
    return torch.stack(parts).sum() * 0.01


class Reference:
    """``nn.Embedding``-like tables and row-wise Adagrad over all ranks' batches, step by step."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        start = flexd.EmbeddingBagCollection(specs(), layout=flexd.RankLayout(1, 1), seed=seed)
        self.tables = {name: start.initial_table(name).clone().requires_grad_() for name in TABLES}
        self._sums = {name: torch.zeros(rows, 1, dtype=torch.float64) for name, (rows, _, _) in TABLES.items()}
        self.losses: list[list[float]] = []
        """By step, then rank."""

    def loss(self, step: int, rank: int) -> float:
        while len(self.losses) <= step:
            self._step(len(self.losses))
        return self.losses[step][rank]

    def _step(self, step: int) -> None:
        losses = []
        for rank in range(WORLD):
            loss = loss_of(self._rows(step, rank), self._seed, step, rank)
            (loss / WORLD).backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        self.losses.append(losses)
        with torch.no_grad():
            for name, table in self.tables.items():
                sums = self._sums[name].add_(table.grad.square().mean(dim=1, keepdim=True))
                table.sub_(_LEARNING_RATE * table.grad / (sums.sqrt() + _EPSILON))
                table.grad = None

    def _rows(self, step: int, rank: int) -> dict[str, torch.Tensor]:
        weighted = misuse_of(self._seed, step)[0] == WEIGHTS
        found = {}
        for name, ids in batch(self._seed, step, rank).items():
            found[name] = self.tables[name][torch.from_numpy(ids)]
            if name in _BAG_IDS:
                if weighted:
                    found[name] = found[name] * weights(self._seed, step, rank)[name].unsqueeze(1)
                found[name] = found[name].unflatten(0, (-1, _BAG_IDS[name])).sum(1)
        return found


def rank(
    directory: str, rank: int, attempt: str, store_port: int, control: str, secret_file: str, bootstrap: str,
    topic: str, checkpoint: str | None, seed: int, step_seconds: float,
) -> None:  # fmt: skip
    """One training rank until the file ``stop`` is there, with a line a step in ``ATTEMPT-RANK.jsonl``."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    here = Path(directory)
    store = TCPStore("127.0.0.1", store_port, WORLD, is_master=rank == 0, timeout=timedelta(seconds=RANK_SECONDS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=RANK_SECONDS))
    collection = flexd.EmbeddingBagCollection(
        specs(), optimizer=flexd.RowWiseAdagrad(lr=_LEARNING_RATE, eps=_EPSILON), layout=LAYOUT,
        replica_slots=_REPLICA_SLOTS, seed=seed,
    )  # fmt: skip
    first = 0
    if checkpoint is not None:
        dcp.load({"tables": flexd.ShardedState(collection)}, checkpoint_id=checkpoint)
        first = int(checkpoint.rpartition("-")[2])
    publisher = flexd.Publisher(KafkaSink(bootstrap, topic), source_rank=rank)
    connection = flexd.connect(
        collection, control, job=JOB, attempt=attempt, secret_file=secret_file, timeout_seconds=3.0
    )
    trainer = MisusingTrainer(
        collection, seed, lambda step: features(seed, step, rank), lambda step: weights(seed, step, rank),
        lambda found, step: loss_of(_plain(found), seed, step, rank),
    )  # fmt: skip
    with (here / f"{attempt}-{rank}.jsonl").open("w") as records, closing(trainer.train(first)) as steps:
        for step in itertools.count(first):
            if not (here / "hold").exists():
                for name, rows in batch(seed, step, rank).items():
                    publisher.publish(name, rows, event_time_seconds=FIRST_SECOND + step * SECONDS_A_STEP)
            record = _step(collection, steps, step)
            record["agent"] = connection.agent.state
            records.write(json.dumps(record) + "\n")
            records.flush()
            stop = torch.tensor([int((here / "stop").exists())])
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if (step + 1) % CHECKPOINT_STEPS == 0:
                # Named when it is complete: a rank may be killed while it is written.
                unfinished = here / f"{attempt}-unfinished-{step + 1}"
                dcp.save({"tables": flexd.ShardedState(collection)}, checkpoint_id=unfinished)
                if rank == 0:
                    os.rename(unfinished, here / f"checkpoint-{step + 1}")
            if stop:
                break
            time.sleep(max(0.0, step_seconds - record["seconds"]))
    sent = publisher.close(10.0)
    connection.close(5.0)
    tables = {name: collection.gather_table(name).numpy() for name in TABLES}
    counters = publisher.counters()
    done = {"steps": step + 1, "all_sent": sent, "published": counters.published, "failed": counters.messages_failed}
    if rank == 0:
        np.savez(here / f"{attempt}-tables.npz", **tables)
    (here / f"{attempt}-{rank}.done").write_text(json.dumps(done))
    dist.barrier()
    dist.destroy_process_group()


def _step(collection: flexd.EmbeddingBagCollection, steps: Iterator[tuple[float, str]], step: int) -> dict[str, Any]:
    started = time.monotonic()
    loss, misuse = next(steps)
    ended = time.monotonic()
    return {
        "step": step, "loss": loss, "misuse": misuse, "version": collection.placement_version,
        "digest": collection.engine.migrator.digest, "bit_equal": collection.replicas_bit_equal(),
        "seconds": ended - started, "at": ended,
    }  # fmt: skip


def _plain(found: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the rows, and the sums of bags."""
    return {name: rows.values if isinstance(rows, flexd.Jagged) else rows for name, rows in found.items()}
