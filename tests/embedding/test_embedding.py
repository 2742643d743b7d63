"""``flexd.Embedding`` in the place of ``nn.Embedding``: equal training, ``.weight``, padding, errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import flexd
from flexd.core.layout import RankLayout
from tests.support import trainer_jobs
from tests.support.rank_pool import Job, RankPool
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


@pytest.mark.parametrize("job", [trainer_jobs.embedded, trainer_jobs.own])
@pytest.mark.parametrize("case", TRAININGS, ids=str)
def test_training_is_that_of_plain_embeddings_and_one_optimizer(ranks: Ranks, job: Job, case: Training) -> None:
    results, expected = ranks(4).run(job, FOUR, case), train_alone(4, case)
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
    first, second = ranks(2).run(trainer_jobs.faults, RankLayout(2, 1))
    assert first == ["rank 1 has input that cannot be looked up - see the error of rank 1"] * 8
    parts = (
        f"row {41} of table", "torch.float32", "a list instead of", "row -1", "a Jagged instead of a dense tensor",
        "a tuple instead of", "layout torch.jagged instead of", "layout torch.sparse_coo instead of",
    )  # fmt: skip
    for text, part in zip(second, parts, strict=True):
        assert part in text
    assert "embedding.collection({'embedding': ids})" in second[4]


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
