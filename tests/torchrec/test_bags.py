"""``FlexEmbeddingBagCollection``: weights and batch sizes that differ by key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

import flexd
import flexd.core.errors
from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.torchrec import (
    FlexEmbeddingBagCollection,
)
from tests.support.rank_pool import RankPool
from tests.support.torchrec_jobs import ROWS, loss_of

STEPS = 5


def train_changed(rank: int, layout: RankLayout, what: str, one_thread: bool | None) -> tuple[list[float], int]:
    """Train weighted bags; the loop of rank 0 changes part of each input. Without the prefetch pipeline if
    ``one_thread`` is None. Return losses and the batches located twice."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    collection = FlexEmbeddingBagCollection(
        tables, is_weighted=True, optimizer=flexd.SGD(0.1), layout=layout, pooling_at={"item": "owner"}
    )
    inputs: Any = [
        KeyedJaggedTensor.from_lengths_sync(
            keys=list(ROWS), values=torch.arange(8) + step, lengths=torch.tensor([1, 3, 2, 2]),
            weights=torch.linspace(0.5, 1.5, 8) * (1 + rank),
        )
        for step in range(STEPS)
    ]  # fmt: skip
    if one_thread is not None:
        inputs = flexd.prefetch(inputs, collection, one_thread=one_thread)
    losses = []
    for given in inputs:
        kjt = given
        if rank == 0 and what == "ids":
            kjt.values()[1] = 7
        elif rank == 0 and what == "lengths":
            kjt.lengths().copy_(torch.tensor([3, 1, 2, 2]))
        elif rank == 0 and what == "weights":
            kjt.weights()[2] = -4.0
        elif rank == 0 and what == "object":
            kjt = KeyedJaggedTensor.from_lengths_sync(
                keys=list(ROWS), values=given.values() + 1, lengths=given.lengths(), weights=given.weights()
            )
        loss = loss_of(collection(kjt))
        loss.backward()
        collection.optimizer.step()
        losses.append(float(loss.detach()))
    return losses, collection.engine.hooks.unused_batches


@pytest.mark.parametrize("pooling_at", ["requester", "owner"])
def test_weights_are_factors_of_the_rows(pooling_at: str) -> None:
    table = EmbeddingBagConfig(name="item", num_embeddings=61, embedding_dim=4, feature_names=["a", "b"])
    ours = FlexEmbeddingBagCollection([table], is_weighted=True, pooling_at={"item": pooling_at})
    plain = torchrec.EmbeddingBagCollection(tables=[table], is_weighted=True)
    plain.embedding_bags["item"].weight.data.copy_(ours.gather_table("item"))
    inputs = {"keys": ["a", "b"], "values": torch.tensor([1, 2, 2, 60, 5]), "lengths": torch.tensor([2, 0, 1, 2])}
    kjt = KeyedJaggedTensor.from_lengths_sync(**inputs, weights=torch.tensor([0.5, -1.0, 2.0, 1.0, 3.0]))
    torch.testing.assert_close(ours(kjt).values(), plain(kjt).values())
    with pytest.raises(EmbeddingError, match="without a weight for each value"):
        ours(KeyedJaggedTensor.from_lengths_sync(**inputs))
    table.pooling = PoolingType.MEAN
    with pytest.raises(EmbeddingError, match=r"pooled by MEAN: item.*sum to 1"):
        FlexEmbeddingBagCollection([table], is_weighted=True)


@pytest.mark.parametrize(
    ("what", "one_thread"), [("ids", False), ("lengths", True), ("weights", False), ("object", True)]
)
def test_inputs_that_change_after_they_were_announced_train_equally(
    pair: RankPool, what: str, one_thread: bool
) -> None:
    """The requester multiplies rows by the weights of the look-up: weighted bags are answered by rows."""
    job = (train_changed, RankLayout(2, 1), what)
    for (losses, unused), (plain, _) in zip(pair.run(*job, one_thread), pair.run(*job, None), strict=True):
        assert losses == pytest.approx(plain, rel=1e-6)
        assert unused == (0 if what == "weights" else len(losses))
