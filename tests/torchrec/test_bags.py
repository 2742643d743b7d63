"""``FlexEmbeddingBagCollection``: weights and batch sizes that differ by key."""

from __future__ import annotations

import pytest
import torch

torchrec = pytest.importorskip("torchrec")
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType  # noqa: E402

from flexd.core.errors import EmbeddingError  # noqa: E402
from flexd.core.layout import RankLayout  # noqa: E402
from flexd.torchrec import FlexEmbeddingBagCollection, FlexEmbeddingCollection  # noqa: E402
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


def by_key(inverse: list[list[int]] | None, sizes: tuple[int, int] = (2, 3)) -> KeyedJaggedTensor:
    """Return keys with batch sizes of 2 and 3."""
    indices = None if inverse is None else (["a", "b"], torch.tensor(inverse))
    return KeyedJaggedTensor(
        keys=["a", "b"], values=torch.tensor([1, 2, 3, 4, 5, 6]), lengths=torch.tensor([1, 2, 0, 2, 1]),
        stride_per_key_per_rank=[[sizes[0]], [sizes[1]]], inverse_indices=indices,
    )  # fmt: skip


def test_batch_sizes_may_differ_by_key() -> None:
    names = {"name": "item", "num_embeddings": 20, "embedding_dim": 4, "feature_names": ["a", "b"]}
    sequences = FlexEmbeddingCollection([EmbeddingConfig(**names)])
    out = sequences(by_key(None))
    table = sequences.gather_table("item")
    assert torch.equal(out["a"].values(), table[[1, 2, 3]])
    assert [out[key].lengths().tolist() for key in ("a", "b")] == [[1, 2], [0, 2, 1]]

    bags = FlexEmbeddingBagCollection([EmbeddingBagConfig(**names)])
    plain = torchrec.EmbeddingBagCollection(tables=[EmbeddingBagConfig(**names)])
    plain.embedding_bags["item"].weight.data.copy_(bags.gather_table("item"))
    kjt = by_key([[0, 1, 1, 0], [2, 0, 1, 1]])
    torch.testing.assert_close(bags(kjt).values(), plain(kjt).values())
    with pytest.raises(EmbeddingError, match="batch sizes differ by feature"):
        bags(by_key(None))
    for bad in ([[0, 1, 2, 0], [2, 0, 1, 1]], [[0, 1, 1, 0], [2, 0, 1, -1]]):
        with pytest.raises(EmbeddingError, match="inverse_indices are missing or outside"):
            bags(by_key(bad))


@pytest.mark.parametrize("one_thread", [False, True])
@pytest.mark.parametrize("what", ["ids", "lengths", "weights", "object", "weights of rows"])
def test_inputs_that_change_after_they_were_announced_train_equally(
    pair: RankPool, what: str, one_thread: bool
) -> None:
    """Weights count where the owner of a table pools; the requester multiplies rows by those of the look-up anyway."""
    job = ("torchrec_jobs:train_changed", RankLayout(2, 1), what)
    for (losses, unused), (plain, _) in zip(pair.run(*job, one_thread), pair.run(*job, None), strict=True):
        assert losses == pytest.approx(plain, rel=1e-6)
        assert unused == (0 if what == "weights of rows" else len(losses))
