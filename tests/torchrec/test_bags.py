"""``FlexEmbeddingBagCollection``: weights and batch sizes that differ by key."""

from __future__ import annotations

import pytest
import torch

torchrec = pytest.importorskip("torchrec")
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType  # noqa: E402

from flexd.core.errors import EmbeddingError  # noqa: E402
from flexd.core.layout import RankLayout  # noqa: E402
from flexd.torchrec import FlexEmbeddingBagCollection  # noqa: E402
from tests.support import torchrec_jobs  # noqa: E402
from tests.support.rank_pool import RankPool  # noqa: E402


@pytest.mark.parametrize("answer", ["rows", "sums"])
def test_weights_are_factors_of_the_rows(answer: str) -> None:
    table = EmbeddingBagConfig(name="item", num_embeddings=61, embedding_dim=4, feature_names=["a", "b"])
    ours = FlexEmbeddingBagCollection([table], is_weighted=True, answers={"item": answer})
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


@pytest.mark.parametrize("one_thread", [False, True])
@pytest.mark.parametrize("what", ["ids", "lengths", "weights", "object", "weights of rows"])
def test_inputs_that_change_after_they_were_announced_train_equally(
    pair: RankPool, what: str, one_thread: bool
) -> None:
    """Weights count where the owner of a table pools; the requester multiplies rows by those of the look-up anyway."""
    job = (torchrec_jobs.train_changed, RankLayout(2, 1), what)
    for (losses, unused), (plain, _) in zip(pair.run(*job, one_thread), pair.run(*job, None), strict=True):
        assert losses == pytest.approx(plain, rel=1e-6)
        assert unused == (0 if what == "weights of rows" else len(losses))
