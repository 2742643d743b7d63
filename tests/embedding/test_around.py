"""A collection among other parts of PyTorch: FSDP2, checkpointing, compile, AMP, nested tensors, whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from flexd.embedding.jagged import as_jagged
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
TWO = RankLayout(2, 1)


@pytest.fixture(scope="module")
def expected(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks(2).run("around_jobs:plain", TWO)


def same(results: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-9) -> None:
    for got, wanted in zip(results, expected, strict=True):
        losses = [torch.tensor(result["losses"], dtype=torch.float64) for result in (got, wanted)]
        torch.testing.assert_close(*losses, rtol=0, atol=tolerance)
        torch.testing.assert_close(got["table"], wanted["table"], rtol=0, atol=tolerance)
        assert got["equal"]
        assert got["steps"] == wanted["steps"]
        assert got["pending"] == 0


@pytest.mark.parametrize("inside", [False, True])
def test_dense_part_in_fsdp2(ranks: Ranks, expected: list[dict[str, Any]], inside: bool) -> None:
    same(ranks(2).run("around_jobs:fsdp", TWO, inside), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around_all", [False, True])
def test_checkpointing(ranks: Ranks, expected: list[dict[str, Any]], reentrant: bool, around_all: bool) -> None:
    same(ranks(2).run("around_jobs:checkpointed", TWO, reentrant, around_all), expected)


@pytest.mark.parametrize("whole", [False, True])
def test_compile(ranks: Ranks, expected: list[dict[str, Any]], whole: bool) -> None:
    same(ranks(2).run("around_jobs:compiled", TWO, whole), expected)


def test_nested_tensors(ranks: Ranks, expected: list[dict[str, Any]]) -> None:
    same(ranks(2).run("around_jobs:nested", TWO), expected)


def test_autocast_leaves_rows_in_the_dtype_of_their_table(ranks: Ranks) -> None:
    results = ranks(2).run("around_jobs:autocast", TWO)
    same(results, ranks(2).run("around_jobs:plain", TWO, "float32"), tolerance=0.5)
    for result in results:
        assert result["dtypes"] == ["torch.bfloat16", "torch.float32"]
        assert result["table"].dtype == torch.float32


def test_the_state_of_a_whole_model(ranks: Ranks) -> None:
    for result in ranks(2).run("around_jobs:whole_model_state", TWO):
        assert result["said"] == "<All keys matched successfully>"
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


def test_copies_are_refused_and_the_tables_stay(ranks: Ranks) -> None:
    for said in ranks(2).run("around_jobs:copies", TWO):
        assert ["cannot be copied or pickled" in text for text in said[:4]] == [True] * 4
        assert "cannot be moved - construct the collection with device=" in said[4]
        assert said[5] == "torch.float64 torch.float16"


def test_rows_loaded_into_a_table(ranks: Ranks) -> None:
    for rows in ranks(2).run("around_jobs:load", TWO):
        assert torch.equal(rows["table"], rows["expected"])
        assert torch.equal(rows["looked_up"], rows["expected"])
        assert rows["equal"]
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 5, 2)])
    for name, first, values in (
        ("item", 4, torch.zeros(2, 2)),
        ("item", 0, torch.zeros(2, 3)),
        ("item", -1, torch.zeros(1, 2)),
    ):
        with pytest.raises(EmbeddingError, match="first_row"):
            collection.load_rows(name, first, values)
    with pytest.raises(EmbeddingError, match="no table 'shop'"):
        collection.load_rows("shop", 0, torch.zeros(1, 2))


def test_all_forms_of_input_are_one() -> None:
    values, lengths = torch.tensor([4, 1, 2, 7]), torch.tensor([1, 0, 3])
    offsets = torch.tensor([0, 1, 1, 4])
    nested = torch.nested.nested_tensor([values[:1], values[:0], values[1:]], layout=torch.jagged)
    padded, starts = torch.tensor([[4, 9, 9], [9, 9, 9], [1, 2, 7]]), torch.zeros(3, dtype=torch.int64)
    with_holes = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    for form in (flexd.Jagged(values, lengths), nested, with_holes, (values, offsets), (values, offsets.int())):
        jagged = as_jagged(form, "item")
        assert torch.equal(jagged.values, values)
        assert torch.equal(jagged.lengths.long(), lengths)
    back = flexd.Jagged(values, lengths).to_nested()
    assert [part.tolist() for part in back.unbind()] == [[4], [], [1, 2, 7]]


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([1, 2]),
        [1, 2],
        (torch.tensor([1, 2]), torch.tensor([1, 1])),
        (torch.tensor([1, 2]), torch.tensor([0, 1])),
        (torch.tensor([1, 2]), torch.tensor([1, 2])),
        (torch.tensor([1, 2]), torch.tensor([0, 3, 2])),
        (torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)),
        (torch.tensor([1, 2]), torch.tensor([0.0, 2.0])),
        (torch.tensor([1, 2]),),
    ],
)
def test_other_forms_are_refused(bad: object) -> None:
    with pytest.raises(EmbeddingError):
        as_jagged(bad, "item")
    with pytest.raises(EmbeddingError):
        flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 50, 2)])({"item": bad})  # type: ignore[dict-item]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_another_layout_are_refused() -> None:
    strided = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.strided)
    with pytest.raises(EmbeddingError, match="is not jagged"):
        as_jagged(strided, "item")


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(EmbeddingError, match="a Tensor instead of features by name"):
        flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 50, 2)])(torch.tensor([1]))  # type: ignore[arg-type]
