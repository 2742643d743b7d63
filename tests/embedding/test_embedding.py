"""``flexd.Embedding`` in the place of ``nn.Embedding``: equal training, ``.weight``, padding, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from tests.support.rank_pool import RankPool
from tests.support.trainer_jobs import Training, train_alone

Ranks = Callable[[int], RankPool]

FOUR = RankLayout(2, 2)
TRAININGS = [
    Training(),
    Training(softmax=True, max_norm=0.2, scheduler="step"),
    Training(optimizer="adam", max_norm=0.3, scheduler="one cycle"),
    Training(optimizer="adamw", softmax=True),
    Training(optimizer="adam", max_norm=0.3, scaled=True),
]


@pytest.mark.parametrize("job", ["embedded", "own"])
@pytest.mark.parametrize("case", TRAININGS, ids=str)
def test_training_is_that_of_plain_embeddings_and_one_optimizer(ranks: Ranks, job: str, case: Training) -> None:
    results, expected = ranks(4).run(f"trainer_jobs:{job}", FOUR, case), train_alone(4, case)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["losses"], expected["losses"][rank], rtol=0, atol=1e-9)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=0, atol=1e-9)
        np.testing.assert_allclose(result["scores"], expected["scores"][rank], rtol=0, atol=1e-9)
        np.testing.assert_allclose(result["lr"], expected["lr"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(result["dense"], expected["dense"], rtol=0, atol=1e-9)
        for table, plain in zip(result["tables"], expected["tables"], strict=True):
            np.testing.assert_allclose(table, plain, rtol=0, atol=1e-9)
        assert result["parameters"] == ["dense.weight", "dense.bias"]
        assert result["versions"] == ([1] if job == "embedded" else [0, 0])
        assert result["equal"]
        assert not any(result["pending"])


def test_inputs_that_cannot_be_looked_up_are_errors_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks(2).run("trainer_jobs:faults", RankLayout(2, 1))
    assert first == ["rank 1 has input that cannot be looked up - see the error of rank 1"] * 8
    parts = (
        f"row {41} of table", "torch.float32", "a list instead of", "row -1", "a Jagged instead of a dense tensor",
        "a tuple instead of", "layout torch.jagged instead of", "layout torch.sparse_coo instead of",
    )  # fmt: skip
    for text, part in zip(second, parts, strict=True):
        assert part in text
    assert "embedding.collection({'embedding': ids})" in second[4]


@pytest.mark.slow
def test_a_model_with_an_embedding_compiles_around_it() -> None:
    """Losses and rows after two steps, with ``.weight`` read in training as a softmax over all rows reads it."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = flexd.Embedding(20, 4, dtype=torch.float64, optimizer=flexd.SGD(0.5), layout=RankLayout(1, 1))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = (self.items(ids) * 2).sin().sum(1)
            return torch.nn.functional.cross_entropy(hidden @ self.items.weight.T, ids[:, 0])

    torch._dynamo.reset()
    losses, tables = [], []
    for compiled in (False, True):
        model = Model()
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        for step in range(2):
            loss = forward(torch.arange(6).view(3, 2) + step)
            loss.backward()
            model.items.optimizer.step()
            losses.append(loss.item())
        tables.append(model.items.eval().weight.clone())
        model.items.collection.close()
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-12)
    torch.testing.assert_close(*tables)


def test_the_weight_is_gathered_once_for_each_change_of_rows(ranks: Ranks) -> None:
    for result in ranks(2).run("trainer_jobs:weights_read", RankLayout(1, 2)):
        assert result["seen"] == [
            (label, 1, True, True) for label in ("first", "step", "rows loaded", "state loaded", "reset")
        ]
        assert not result["grad"]
        assert result["trains"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_batches_are_looked_up_ahead(ranks: Ranks, optimizer: str) -> None:
    for result in ranks(4).run("trainer_jobs:looked_ahead", FOUR, optimizer):
        np.testing.assert_allclose(*result["losses"], rtol=0, atol=1e-9)
        np.testing.assert_allclose(*result["tables"], rtol=0, atol=1e-9)
        assert result["unused"] == [0, 0]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0), (0,), (2, 1, 4)])
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
def test_rows_and_gradients_are_those_of_nn_embedding(shape: tuple[int, ...], padding_idx: int | None) -> None:
    ours = flexd.Embedding(5, 3, padding_idx, dtype=torch.float64, optimizer=flexd.SGD(1.0))
    values = torch.arange(15, dtype=torch.float64).view(5, 3)
    ours.load_rows(0, values)
    plain = nn.Embedding.from_pretrained(values.clone(), freeze=False, padding_idx=padding_idx)
    assert ours.padding_idx == plain.padding_idx
    for ids in (torch.randint(0, 5, shape), torch.full(shape, 4), torch.zeros(shape, dtype=torch.int32)):
        got, expected = ours(ids), plain(ids)
        assert torch.equal(got, expected)
        plain.weight.grad = None
        for rows in (got, expected):
            rows.sin().sum().backward()
        ours.optimizer.step()
        with torch.no_grad():
            plain.weight -= plain.weight.grad
        torch.testing.assert_close(ours.weight.detach(), plain.weight.detach(), rtol=0, atol=1e-12)
        ours.optimizer.zero_grad()
        ours.optimizer.step()


def test_the_row_of_padding_begins_with_zeros_on_meta_too() -> None:
    assert not flexd.Embedding(5, 3, -1).weight[4].any()
    with torch.device("meta"):
        model = nn.Sequential(flexd.Embedding(5, 3, 2), nn.Linear(3, 1))
    model.to_empty(device="cpu")
    weight = model[0].weight.detach()
    assert not weight[2].any()
    assert weight[1].all()


def test_dtypes_follow_torch_and_others_are_refused() -> None:
    assert flexd.Embedding(5, 3, dtype=torch.bfloat16)(torch.tensor(1)).dtype == torch.bfloat16
    assert flexd.Embedding(5, 3)(torch.tensor(1)).dtype == torch.get_default_dtype()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dtype": torch.int8}, "torch.int8"),
        ({"padding_idx": 5}, "padding_idx=5 of 5 rows"),
        ({"max_norm": 1.0}, "max_norm"),
    ]
    for arguments, text in refused:
        with pytest.raises(EmbeddingError, match=text):
            flexd.Embedding(5, 3, **arguments)


def test_embeddings_of_one_collection_may_be_in_different_modes() -> None:
    tables = flexd.EmbeddingCollection([flexd.EmbeddingTable("a", 5, 3), flexd.EmbeddingTable("b", 5, 3)])
    one, other = flexd.Embedding.of(tables, "a").eval(), flexd.Embedding.of(tables, "b")
    assert not one(torch.tensor([1])).requires_grad
    assert other(torch.tensor([1])).requires_grad
    assert len(tables.engine.passes) == 1
    with pytest.raises(EmbeddingError, match="no table 'c' - one of a, b"):
        flexd.Embedding.of(tables, "c")
    assert repr(one) == "Embedding(5, 3, name='a')"
