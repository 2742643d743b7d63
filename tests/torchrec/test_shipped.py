"""TorchRec's types are shipped between ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.rank_pool import RankPool

torchrec = pytest.importorskip("torchrec")
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor  # noqa: E402

import flexd.torchrec  # noqa: E402, F401
from flexd.core.errors import EmbeddingError  # noqa: E402
from flexd.core.layout import RankLayout  # noqa: E402
from flexd.embedding.affinity.sample_blocks import BlockLayout  # noqa: E402
from flexd.embedding.affinity.sample_parts import SampleParts  # noqa: E402

CHOSEN = torch.tensor([2, 0])


def chosen_of(batch: object) -> object:
    layout = BlockLayout(SampleParts.of(batch), torch.device("cpu"))
    return layout.batch(layout.blocks().select(CHOSEN))


@pytest.mark.parametrize("weighted", [False, True])
def test_samples_of_a_keyed_jagged_tensor_keep_their_ids_and_weights(weighted: bool) -> None:
    weights = torch.arange(6).double() if weighted else None
    kjt = KeyedJaggedTensor.from_lengths_sync(
        ["b", "a"], torch.arange(6), torch.tensor([1, 2, 0, 2, 0, 1], dtype=torch.int32), weights
    )
    made = chosen_of(kjt)
    assert isinstance(made, KeyedJaggedTensor)
    assert made.keys() == ["b", "a"]
    assert made.values().tolist() == [0, 5, 3, 4]
    assert made.lengths().tolist() == [0, 1, 1, 2]
    assert made.lengths().dtype == torch.int32
    assert (made.weights_or_none() is not None) == weighted
    assert not weighted or made.weights().tolist() == [0.0, 5.0, 3.0, 4.0]


def test_jagged_and_keyed_tensors_are_shipped() -> None:
    jagged = JaggedTensor(torch.arange(5), lengths=torch.tensor([2, 0, 3]))
    keyed = KeyedTensor(["x", "y"], [1, 2], torch.arange(9.0).view(3, 3))
    made = chosen_of([jagged, keyed])
    assert made[0].values().tolist() == [2, 3, 4, 0, 1]  # type: ignore[index]
    assert made[0].lengths().tolist() == [3, 2]  # type: ignore[index]
    assert made[1]["y"].tolist() == [[7.0, 8.0], [1.0, 2.0]]  # type: ignore[index]


def test_batch_sizes_by_key_are_refused() -> None:
    kjt = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 1], [0, 0]])),
    )
    with pytest.raises(EmbeddingError, match="batch sizes by key cannot be dealt"):
        SampleParts.of(kjt)


def test_training_on_dealt_samples_is_that_without_dealing(pair: RankPool) -> None:
    with_deal, without = (pair.run("torchrec_jobs:dealt", RankLayout(2, 1), deal) for deal in (True, False))
    for name, table in without[0]["tables"].items():
        np.testing.assert_allclose(with_deal[0]["tables"][name], table, rtol=0, atol=1e-6)
    losses, expected = (np.sum([of["losses"] for of in results], axis=0) for results in (with_deal, without))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert with_deal[0]["shipped"] > 0
    assert with_deal[0]["numbers"] != without[0]["numbers"]
