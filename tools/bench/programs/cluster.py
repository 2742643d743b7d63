"""One rank of ``cases.cluster``: trains with one strategy after another, as requests on standard input say.

Started with the environment that torchrun gives; the setting is the first argument, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import flexd
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Delta, Placement
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import RowWiseAdagrad
from flexd.planner.model.prices import Exchange
from flexd.planner.model.workload import TrainingShape
from flexd.planner.plan import Plan, PlanOrigin, make_plan
from flexd.topology.cluster import INTER
from tools.bench import workloads as data
from tools.bench.peers import torchrec_collection as torchrec_peer
from tools.bench.ranks import serve
from tools.bench.workloads import Batch, Setting

LEARNING_RATE, EPS = 0.02, 1e-8
TARGET = 0.1
"""Target of the rows (or of the dense part's output): any constant that is not where they start."""


class Attention(nn.Module):
    """The dense part: one block of self-attention and a perceptron over the sequence.

    Its weights stay as they are and their gradients, which are computed, are not sent: all bytes on the wire are the
    embeddings'.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def weight(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator) * columns**-0.5)

        self.mix, self.back = weight(3 * dim, dim), weight(dim, dim)
        self.up, self.down = weight(2 * dim, dim), weight(dim, 2 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, length, dim], the same back."""
        query, key, value = nn.functional.linear(x, self.mix).unsqueeze(1).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).squeeze(1)
        x = x + nn.functional.linear(mixed, self.back)
        return x + nn.functional.linear(nn.functional.relu(nn.functional.linear(x, self.up)), self.down)


class Trainer(Protocol):
    def step(self, loss_of: Callable[[Batch, list[torch.Tensor]], torch.Tensor]) -> float:
        """One optimizer step on the next batch; the loss of this rank before it. ``loss_of``: rows by table -> loss."""
        ...

    def stored_bytes(self) -> int:
        """Memory of this rank between steps: rows, optimizer state, and what finds them."""
        ...


def trained(trainer: Any, loss_of: Any, steps: int) -> dict[str, Any]:
    losses, ends, arms = [], [], []
    dist.barrier()
    started, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        losses.append(trainer.step(loss_of))
        ends.append(time.perf_counter())
        arms.append(trainer.collection.tuning().arm if isinstance(trainer, FlexdTrainer) else "")
    used = (time.process_time() - used) / steps
    seconds = np.diff([started, *ends]).tolist()
    return {"seconds": seconds, "processor_seconds": used, "losses": losses, "arms": arms}


def forever(batches: list[Any]) -> Iterator[Any]:
    while True:
        yield from batches


class TorchRecTrainer:
    """TorchRec's sharded collection.

    Args:
        gradients: False: rows are looked up without.
    """

    def __init__(
        self,
        setting: Setting,
        batches: list[Batch],
        *,
        learning_rate: float = LEARNING_RATE,
        gradients: bool = True,
        **options: Any,
    ) -> None:
        self._gradients = gradients
        tables = setting.embedding_tables()
        self._names = [table.name for table in tables]
        self._module = torchrec_peer.sharded_collection(
            tables, local_ranks=setting.local_ranks, learning_rate=learning_rate, eps=EPS, **options
        )
        inputs = [torchrec_peer.keyed(self._names, batch.values, batch.lengths) for batch in batches]
        self._loader = forever(list(zip(batches, inputs, strict=True)))

    def step(self, loss_of: Callable[[Batch, list[torch.Tensor]], torch.Tensor]) -> float:
        batch, features = next(self._loader)
        with torch.set_grad_enabled(self._gradients):
            found = self._module(features)
            rows = [found[name].values() for name in self._names]
        loss = loss_of(batch, rows)
        if loss.requires_grad:
            loss.backward()  # updates the rows: the optimizer is fused into it
        return loss.item()

    def stored_bytes(self) -> int:
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for module in self._module.modules()
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }
        return sum(storages.values())


class FlexdTrainer:
    """A flexd collection.

    Args:
        target: the placement to train at; it is applied by the first step.
        comm_dtype: of rows and gradients on the wire, if not that of the tables.
        prefetch: batches come through ``flexd.prefetch``, with ``ahead`` of 1, or None, with which the tuner decides.
        micro_batches: batches of an optimizer step.
    """

    def __init__(
        self,
        setting: Setting,
        batches: list[Batch],
        *,
        exchange: str = "chain",
        target: Placement | None = None,
        comm_dtype: str | None = None,
        prefetch: Sequence[int | None] = (),
        micro_batches: int = 1,
    ) -> None:
        tables = setting.embedding_tables()
        self._micro_batches = micro_batches
        self._names = [table.name for table in tables]
        self.collection = EmbeddingCollection(
            tables,
            optimizer=RowWiseAdagrad(lr=LEARNING_RATE, eps=EPS),
            layout=setting.layout,
            replica_slots=[0 if target is None else int(setting.replica_fraction * setting.rows)],
            average_gradients=False,
            exchange=exchange,
            max_migration_bytes_per_step=2**30,
            **({} if comm_dtype is None else {"comm_dtype": comm_dtype}),
        )
        if target is not None and len(target):
            delta = Delta(target.keys, np.zeros(len(target), np.uint8), target.tiers)
            self.collection.engine.inbox.offer(1, delta)
        inputs = [
            {
                name: Jagged(torch.from_numpy(values), torch.from_numpy(lengths))
                for name, values, lengths in zip(self._names, batch.values, batch.lengths, strict=True)
            }
            for batch in batches
        ]
        self._loader = forever(list(zip(batches, inputs, strict=True)))
        for ahead in prefetch:
            self._loader = iter(
                flexd.prefetch(
                    self._loader,
                    self.collection,
                    features=lambda batch: batch[1],
                    ahead=ahead,
                    passes_per_step=micro_batches,
                )
            )

    def step(self, loss_of: Callable[[Batch, list[torch.Tensor]], torch.Tensor]) -> float:
        total = 0.0
        for _ in range(self._micro_batches):
            batch, features = next(self._loader)
            rows = self.collection(features)
            loss = loss_of(batch, [rows[name].values for name in self._names])
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        self.collection.optimizer.step()
        return total / self._micro_batches

    def stored_bytes(self) -> int:
        return self.collection.memory().stored_bytes


@dataclass(frozen=True)
class Strategy:
    """``lacks``: why it cannot run here, or None."""

    make: Callable[[], Trainer]
    lacks: str | None


class Rank:
    """Answers the requests of ``strategies.Bench``. Every one is collective."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._batches = data.batches_of(setting, dist.get_rank())
        self._dense = Attention(setting.dim)
        self._trainer: dict[str, Trainer] = {}
        self._strategies: Mapping[str, Strategy] = {}

    def prepare(self, rate_mbit: float) -> dict[str, Any]:
        """Makes the plan. What there is to run: name -> why it cannot, or None."""
        every = [self._plan(rate_mbit, exchange) for exchange in (Exchange.CHAIN, Exchange.DIRECT_DEDUP)]
        plan = every[0] if not self._setting.read_only else min(every, key=lambda one: one.costs.after.exposed_seconds)
        self._strategies = self._of_read_only(plan) if self._setting.read_only else self._all(plan.target)
        cost = plan.costs.after
        return {
            "strategies": {name: strategy.lacks for name, strategy in self._strategies.items()},
            "replicated_rows": len(plan.target),
            "exchange": plan.costs.exchange.value,
            "inter_node_bytes": cost.all_to_all_bytes(INTER) + cost.sync_bytes(INTER),
        }

    def make(self, strategy: str) -> None:
        self._trainer[strategy] = self._strategies[strategy].make()

    def forget(self) -> None:
        """The collections of all strategies."""
        self._trainer.clear()

    def train(self, strategy: str, dense: bool, steps: int) -> dict[str, Any]:
        """Return seconds of each step, processor seconds per step, and losses, of this rank."""
        return trained(self._trainer[strategy], self._loss_of_sequences if dense else self._loss_of_rows, steps)

    def placement_version(self, strategy: str) -> int:
        trainer = self._trainer[strategy]
        return trainer.collection.placement_version if isinstance(trainer, FlexdTrainer) else 0

    def inter_node_bytes(self, strategy: str) -> int:
        """Return the payload that this rank has sent to other nodes."""
        trainer = self._trainer[strategy]
        assert isinstance(trainer, FlexdTrainer)
        totals = trainer.collection.traffic.totals()
        return totals["all_to_all_inter_bytes"] + totals["sync_inter_bytes"]

    def tuning(self, strategy: str) -> dict[str, Any]:
        trainer = self._trainer[strategy]
        assert isinstance(trainer, FlexdTrainer)
        return asdict(trainer.collection.tuning())

    def stored_bytes(self, strategy: str) -> int:
        """Memory of this rank between steps: rows, optimizer state, and what finds them."""
        return self._trainer[strategy].stored_bytes()

    def dense_seconds(self, steps: int) -> list[float]:
        """Of the dense part alone, all ranks at once: seconds of each forward and backward pass."""
        batch = self._batches[0]
        rows = [torch.zeros(len(values), self._setting.dim, requires_grad=True) for values in batch.values]
        ends = []
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            self._loss_of_sequences(batch, rows).backward()
            ends.append(time.perf_counter())
        return list(np.diff([started, *ends]))

    def _loss_of_rows(self, batch: Batch, rows: list[torch.Tensor]) -> torch.Tensor:
        del batch
        total = self._setting.samples * self._setting.length
        return torch.stack([(of_table - TARGET).square().sum() for of_table in rows]).sum() / total

    def _loss_of_sequences(self, batch: Batch, rows: list[torch.Tensor]) -> torch.Tensor:
        setting = self._setting
        tokens = torch.cat(rows).index_select(0, torch.from_numpy(batch.order))
        out = self._dense(tokens.view(setting.samples, setting.length, setting.dim))
        for parameter in self._dense.parameters():
            parameter.grad = None
        return (out - TARGET).square().sum() / (setting.samples * setting.length)

    def _plan(self, rate_mbit: float, exchange: Exchange) -> Plan:
        """Made without latencies, as for a job whose messages are large. With those of this machine the planner keeps
        every row HOME: what a copy saves here are the eight bytes of an id, and two more collectives cost more."""
        setting = self._setting
        keyspace = KeySpace(
            [TableSpec(t.name, t.rows, t.dim, t.dtype, RowWiseAdagrad().name) for t in setting.embedding_tables()]
        )
        return make_plan(
            data.exact_profile(setting), keyspace, setting.layout,
            data.given_cluster(setting.local_ranks, rate_mbit, latencies=False),
            [int(setting.replica_fraction * setting.rows)], Placement.empty(),
            PlanOrigin("bench", "", 1, "bench", 0.0), horizon_steps=1e9, exchange=exchange,
            shape=TrainingShape(frozen_tables=frozenset(t.name for t in setting.embedding_tables() if not t.trainable)),
        )  # fmt: skip

    def _torchrec(self, sharding: str, **options: Any) -> Strategy:
        given = self._setting, self._batches
        return Strategy(lambda: TorchRecTrainer(*given, sharding=sharding, **options), torchrec_peer.missing())

    def _own(self, **options: Any) -> Strategy:
        return Strategy(lambda: FlexdTrainer(self._setting, self._batches, **options), None)

    def _of_read_only(self, plan: Plan) -> dict[str, Strategy]:
        """Ways to have read-only tables. TorchRec has none for a part of its tables; with a learning rate of 0 it sends
        gradients, without gradients none."""
        exchange, torchrec, own = (
            "chain" if plan.costs.exchange is Exchange.CHAIN else "direct",
            self._torchrec,
            self._own,
        )
        return {
            "planned exchange": own(exchange=exchange, target=plan.target),
            "FlexShard's tiers": own(target=data.flexshard_tiers(self._setting)),
            "TorchRec row-wise": torchrec("row_wise", learning_rate=0.0),
            "TorchRec table-wise": torchrec("table_wise", learning_rate=0.0),
            "TorchRec row-wise, no gradients": torchrec("row_wise", gradients=False),
            "TorchRec table-wise, no gradients": torchrec("table_wise", gradients=False),
        }

    def _all(self, target: Placement) -> dict[str, Strategy]:
        torchrec, own = self._torchrec, self._own
        return {
            "TorchRec row-wise": torchrec("row_wise"),
            "TorchRec table-wise": torchrec("table_wise"),
            "TorchRec row-wise, fp16": torchrec("row_wise", half_precision=True),
            "flexd": own(exchange="auto", prefetch=[None]),
            "direct, dedup": own(exchange="direct"),
            "chain": own(),
            "tiers": own(target=target),
            "direct, dedup, prefetch pipeline": own(exchange="direct", prefetch=[1]),
            "chain, prefetch pipeline": own(prefetch=[1]),
            "tiers, prefetch pipeline": own(target=target, prefetch=[1]),
            "tiers, bf16": own(target=target, comm_dtype="bfloat16"),
            "tiers, prefetch pipeline, bf16": own(target=target, prefetch=[1], comm_dtype="bfloat16"),
        }


if __name__ == "__main__":
    serve(lambda: Rank(Setting(**json.loads(sys.argv[1]))))
