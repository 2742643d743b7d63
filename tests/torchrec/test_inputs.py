"""Inputs of TorchRec's types: tensor dicts and invalid ``KeyedJaggedTensor``."""

from __future__ import annotations

import pytest
import torch

from tests.support.rank_pool import RankPool

torchrec = pytest.importorskip("torchrec")
from torchrec import EmbeddingConfig  # noqa: E402

from flexd.core.layout import RankLayout  # noqa: E402
from flexd.torchrec import FlexEmbeddingCollection  # noqa: E402


def test_invalid_input_is_refused_on_every_rank(pair: RankPool) -> None:
    causes = ["a Tensor instead of a KeyedJaggedTensor", "has no history, target", "2 values and 3 lengths", "row 99"]
    for rank, errors in enumerate(pair.run("torchrec_jobs:refused", RankLayout(2, 1), 1)):
        for text, cause in zip(errors, causes, strict=True):
            assert (cause if rank == 1 else "rank 1 has input") in text


def test_a_tensor_dict_is_converted() -> None:
    tensordict = pytest.importorskip("tensordict")
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    ours = FlexEmbeddingCollection([EmbeddingConfig(name="t", num_embeddings=5, embedding_dim=2, feature_names=["f"])])
    out = ours(tensordict.TensorDict({"f": ids}, batch_size=[2]))["f"]
    assert torch.equal(out.values(), ours.gather_table("t")[[1, 2, 3]])
    assert out.lengths().tolist() == [2, 1]
