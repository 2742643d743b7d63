"""Inputs of TorchRec's types: tensor dicts and invalid ``KeyedJaggedTensor``."""

from __future__ import annotations

import torch
from torchrec import KeyedJaggedTensor

import flexd
import flexd.core.errors
from flexd.core.placement import RankLayout
from tests.support.rank_pool import RankPool
from tests.support.torchrec_jobs import batch, loss_of, make


def refused(rank: int, layout: RankLayout, faulty: int) -> list[str]:
    """Give one rank faulty input and return the error of every rank."""
    collection = make(False, layout)
    good = batch(1, rank, samples=3)
    some = torch.tensor([1, 2])
    faults = [
        torch.tensor([1, 2]),
        KeyedJaggedTensor.from_lengths_sync(["shop"], torch.tensor([1, 2]), torch.tensor([2])),
        KeyedJaggedTensor(["shop", "history", "target"], some, lengths=torch.tensor([1, 1, 1])),
        KeyedJaggedTensor.from_lengths_sync(
            ["shop", "history", "target"], torch.tensor([99, 1, 1]), torch.tensor([1, 1, 1])
        ),
    ]
    errors = []
    for fault in faults:
        try:
            collection(fault if rank == faulty else good)
            errors.append("no error")
        except flexd.core.errors.EmbeddingError as error:
            errors.append(str(error))
        loss_of(collection(good)).backward()
        collection.optimizer.step()
    return errors


def test_invalid_input_is_refused_on_every_rank(pair: RankPool) -> None:
    causes = ["a Tensor instead of a KeyedJaggedTensor", "has no history, target", "2 values and 3 lengths", "row 99"]
    for rank, errors in enumerate(pair.run(refused, RankLayout(2, 1), 1)):
        for text, cause in zip(errors, causes, strict=True):
            assert (cause if rank == 1 else "rank 1 has input") in text
