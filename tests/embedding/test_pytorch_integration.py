"""A collection among other parts of PyTorch: FSDP2, checkpointing, compile, AMP, nested tensors, whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexd.core.layout import RankLayout
from tests.support import pytorch_jobs
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


TWO = RankLayout(2, 1)


@pytest.fixture(scope="module")
def expected(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks(2).run(pytorch_jobs.plain, TWO)


def same(results: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-9) -> None:
    for got, reference in zip(results, expected, strict=True):
        losses = [torch.tensor(result["losses"], dtype=torch.float64) for result in (got, reference)]
        torch.testing.assert_close(*losses, rtol=0, atol=tolerance)
        torch.testing.assert_close(got["table"], reference["table"], rtol=0, atol=tolerance)
        assert got["equal"]
        assert got["steps"] == reference["steps"]
        assert got["pending"] == 0


@pytest.mark.parametrize("inside", [False, True])
def test_the_dense_part_may_be_in_fsdp2(ranks: Ranks, expected: list[dict[str, Any]], inside: bool) -> None:
    same(ranks(2).run(pytorch_jobs.fsdp, TWO, inside), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around_all", [False, True])
def test_activation_checkpointing(
    ranks: Ranks, expected: list[dict[str, Any]], reentrant: bool, around_all: bool
) -> None:
    same(ranks(2).run(pytorch_jobs.checkpointed, TWO, reentrant, around_all), expected)


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_trains_equally(ranks: Ranks, expected: list[dict[str, Any]], whole: bool) -> None:
    same(ranks(2).run(pytorch_jobs.compiled, TWO, whole), expected)


def test_the_state_dict_of_a_whole_model(ranks: Ranks) -> None:
    for result in ranks(2).run(pytorch_jobs.whole_model_state, TWO):
        assert result["loaded"] == "<All keys matched successfully>"
        assert result["parameters"] == [
            "tower.first.weight",
            "tower.first.bias",
            "tower.second.weight",
            "tower.second.bias",
        ]
        assert result["buffers"] == []
        assert any(key.startswith("items.") for key in result["keys"])
        for first, second in (result["tables"], result["dense"]):
            assert torch.equal(first, second)
