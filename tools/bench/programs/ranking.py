"""One rank of ``cases.ranking``: trains the ranking model with one strategy after another, as requests say."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

import flexd
from flexd.embedding.step_probe import measure_step_costs
from tools.bench.peers import ranking_plans as plans
from tools.bench.peers import torchrec_collection as torchrec_peer
from tools.bench.programs.cluster import Attention, forever, trained
from tools.bench.ranking_tables import DENSE, DIMS, POOLED, SEQUENCES, Batch, Setting, batches_of
from tools.bench.ranks import serve

COST_SECONDS = 5.0
LEARNING_RATE, EPS = 0.005, 1e-8
HIDDEN = 128
OWN, GREEDY, SHARD, FLEXD, AHEAD = (
    "TorchRec, its own plan", "TorchRec, greedy", "TorchRec, flexd shard", "flexd", "flexd, prefetch pipeline",
)  # fmt: skip


class Dense(nn.Module):
    """The dense part: attention over each sequence, and a perceptron over all.

    Its weights stay as they are and their gradients, which are computed, are not sent: all bytes on the wire are the
    embeddings'.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        tables = setting.listed()
        width = sum(table.dim for table in tables) + DENSE
        self._lengths = {table.name: int(table.lookups) for table in tables if not table.bags}
        self.attention = Attention(DIMS[1])
        self.up = nn.Parameter(torch.randn(HIDDEN, width, generator=generator) * width**-0.5)
        self.down = nn.Parameter(torch.randn(1, HIDDEN, generator=generator) * HIDDEN**-0.5)

    def loss(self, batch: Batch, pooled: dict[str, torch.Tensor], rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss; ``pooled`` [samples, dim] and ``rows`` [samples x length, dim] by table."""
        for parameter in self.parameters():
            parameter.grad = None
        parts = [pooled[name] for name in sorted(pooled)]
        for name, length in self._lengths.items():
            parts.append(self.attention(rows[name].view(-1, length, DIMS[1])).mean(dim=1))
        parts.append(torch.from_numpy(batch.dense))
        hidden = nn.functional.relu(nn.functional.linear(torch.cat(parts, dim=1), self.up))
        logit = nn.functional.linear(hidden, self.down).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logit, torch.from_numpy(batch.labels))


class Trainer(Protocol):
    def step(self, dense: Dense) -> float:
        """One optimizer step on the next batch; the loss of this rank before it."""
        ...


class TorchRecTrainer:
    """TorchRec's sharded collections by a document of ``flexd shard``."""

    def __init__(self, setting: Setting, batches: list[Batch], document: dict[str, Any]) -> None:
        tables = setting.embedding_tables()
        self._modules = torchrec_peer.sharded_by_document(
            plans.torchrec_model(setting), tables, document, learning_rate=LEARNING_RATE, eps=EPS
        )
        self._optimizer: torch.optim.Optimizer | None = None
        names = {module: [t.name for t in setting.listed() if t.module == module] for module in self._modules}
        inputs = [
            {
                module: torchrec_peer.keyed(
                    of_module, [batch.values[name] for name in of_module], [batch.lengths[name] for name in of_module]
                )
                for module, of_module in names.items()
            }
            for batch in batches
        ]
        self._loader = forever(list(zip(batches, inputs, strict=True)))

    def step(self, dense: Dense) -> float:
        batch, inputs = next(self._loader)
        waited = {name: module(inputs[name]) for name, module in self._modules.items()}
        bags, rows = waited[POOLED], waited[SEQUENCES]
        pooled = (bags if hasattr(bags, "to_dict") else bags.wait()).to_dict()
        loss = dense.loss(batch, pooled, {name: rows[name].values() for name in dense._lengths})
        loss.backward()  # updates the rows but those of data-parallel tables: the optimizer is fused into it
        self._step_data_parallel()
        return loss.item()

    def _step_data_parallel(self) -> None:
        parameters = [p for module in self._modules.values() for p in module.parameters() if p.grad is not None]
        if not parameters:
            return
        if self._optimizer is None:
            from torchrec.optim import RowWiseAdagrad

            self._optimizer = RowWiseAdagrad(parameters, lr=LEARNING_RATE, eps=EPS)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad *= dist.get_world_size()  # DistributedDataParallel averages; the fused ones are summed
        self._optimizer.step()
        self._optimizer.zero_grad()


class FlexdTrainer:
    """A flexd collection of pooled and un-pooled tables, by the rules of ``flexd shard --for flexd``."""

    def __init__(
        self, setting: Setting, batches: list[Batch], document: dict[str, Any], *, prefetch_pipeline: bool
    ) -> None:
        tables = setting.embedding_tables()
        rules = flexd.TableRules.read(document)
        settings: dict[str, Any] = {
            "optimizer": flexd.RowWiseAdagrad(lr=LEARNING_RATE, eps=EPS), "layout": setting.layout,
            "average_gradients": False, "rules": rules, "exchange": "chain",
        }  # fmt: skip
        self._collection = flexd.EmbeddingBagCollection(tables, **settings)
        self._rows = [table.name for table in tables if not isinstance(table, flexd.EmbeddingBagTable)]
        inputs = [
            {
                table.name: flexd.Jagged(
                    torch.from_numpy(batch.values[table.name]), torch.from_numpy(batch.lengths[table.name])
                )
                for table in tables
            }
            for batch in batches
        ]
        self._loader: Iterator[Any] = forever(list(zip(batches, inputs, strict=True)))
        if prefetch_pipeline:
            self._loader = iter(
                flexd.prefetch(self._loader, self._collection, features=lambda batch: batch[1], ahead=1)
            )

    def step(self, dense: Dense) -> float:
        batch, inputs = next(self._loader)
        found = self._collection(inputs)
        rows = {name: found.pop(name).values for name in self._rows}
        loss = dense.loss(batch, found, rows)
        loss.backward()
        self._collection.optimizer.step()
        return float(loss.detach())


class Rank:
    """Answers the requests of ``strategies.Bench``. Every one is collective."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._batches = batches_of(setting, dist.get_rank())
        self._dense = Dense(setting)
        self._trainer: dict[str, Trainer] = {}
        self._documents: dict[str, Any] = {}

    def prepare(self, rate_mbit: float) -> dict[str, Any]:
        """Measure step costs and make the plans on rank 0: strategies -> why they cannot run, or None; and what the
        plans chose."""
        setting, missing = self._setting, torchrec_peer.missing()
        costs = measure_step_costs(setting.layout, torch.device("cpu"), COST_SECONDS)
        documents: dict[str, Any] = {}
        greedy = ""
        if dist.get_rank() == 0:
            documents[FLEXD] = plans.flexds(setting, rate_mbit, costs, prefetch_pipeline=False)
            documents[AHEAD] = plans.flexds(setting, rate_mbit, costs, prefetch_pipeline=True)
            if missing is None:
                documents[OWN] = plans.torchrecs_own(setting, rate_mbit)
                greedy, documents[GREEDY] = plans.greedy_best(setting, rate_mbit)
                documents[SHARD] = plans.flexds_for_torchrec(setting, rate_mbit)
        shared = [documents, greedy]
        dist.broadcast_object_list(shared, src=0)
        self._documents, greedy = shared
        lacks = dict.fromkeys((OWN, GREEDY, SHARD), missing) | {FLEXD: None, AHEAD: None}
        return {"strategies": lacks, "greedy": greedy, "plans": self._documents, "costs": asdict(costs)}

    def make(self, strategy: str) -> None:
        setting, batches, document = self._setting, self._batches, self._documents[strategy]
        if strategy in (FLEXD, AHEAD):
            self._trainer[strategy] = FlexdTrainer(setting, batches, document, prefetch_pipeline=strategy == AHEAD)
        else:
            self._trainer[strategy] = TorchRecTrainer(setting, batches, document)

    def train(self, strategy: str, dense: bool, steps: int) -> dict[str, Any]:
        """Return seconds of each step, processor seconds per step, and losses, of this rank; the dense part always."""
        return trained(self._trainer[strategy], self._dense, steps)


if __name__ == "__main__":
    serve(lambda: Rank(Setting(**json.loads(sys.argv[1]))))
