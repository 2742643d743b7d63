"""Jobs of ranks: TorchRec's own pipeline on a CPU, beside the loop without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist

from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from flexd.torchrec import replace
from tests.support.torchrec_models import Ranker, batch, make, sharded, train_sharded


class BatchRanker(Ranker):
    """``Ranker`` with the input and the output that the pipeline wants."""

    def forward(self, given: Batch) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        loss = super().forward(given.dense_features, given.sparse_features, given.labels)
        return loss, loss


def pipeline_of(model: nn.Module, parameters: list[nn.Parameter]) -> Any:
    return TrainPipelineSparseDist(model, torch.optim.SGD(parameters, lr=0.1), torch.device("cpu"))


def train_pipelined(rank: int, layout: RankLayout, optimizer: str, steps: int) -> dict[str, Any]:
    """Train under ``DistributedModelParallel`` without and with the pipeline, then give it a replaced model."""
    expected = train_sharded(sharded(optimizer, layout.world_size), rank, 0, steps)
    model = sharded(optimizer, layout.world_size, kind=BatchRanker)
    tables = set(model.fused_optimizer.params)
    pipeline = pipeline_of(model, [p for name, p in model.named_parameters() if name not in tables])
    batches = [Batch(*batch(step, rank, weighted=False)) for step in range(steps)]
    source = iter(batches)
    losses = [float(pipeline.progress(source).detach()) for _ in range(steps)]

    moved = make(optimizer, weighted=False, kind=BatchRanker)
    replace(moved, layout=layout)
    text = "traced"
    try:
        pipeline_of(moved, list(moved.parameters())).progress(iter(batches))
    except EmbeddingError as error:
        text = str(error)
    return {"expected": expected, "losses": losses, "modules": len(pipeline._pipelined_modules), "text": text}
