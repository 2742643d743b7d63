"""Features to keys and rows back to features."""

from __future__ import annotations

import pytest
import torch

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.embedding.features import FeatureMap, Jagged

CPU = torch.device("cpu")


TABLES = KeySpace([TableSpec("a", 10, 4), TableSpec("b", 20, 8), TableSpec("c", 30, 4)])


def feature_map() -> FeatureMap:
    return FeatureMap(TABLES, [("a", "a2"), ("b",), ("c",)], 3, CPU)


def test_features_become_keys_and_rows_become_features() -> None:
    """Dim-group (a, c) comes before b, in any order of the features."""
    features = {
        "b": Jagged(torch.tensor([19, 0], dtype=torch.int32), torch.tensor([2])),
        "c": Jagged(torch.tensor([1]), torch.tensor([0, 1])),
        "a2": Jagged(torch.tensor([9, 9, 2]), torch.tensor([1, 2])),
    }
    found = feature_map().keys(features)
    order = found.order
    assert order == ["c", "a2", "b"]
    assert found.keys.tolist() == [11, 9, 9, 2, 40 + 19, 40]
    assert found.keys.dtype == torch.int64
    assert found.faulty is not None
    assert not bool(found.faulty)
    out = feature_map().split(features, [torch.arange(16.0).view(4, 4), torch.arange(16.0).view(2, 8)])
    assert set(out) == set(features)
    assert out["c"].values.tolist() == [[0, 1, 2, 3]]
    assert out["a2"].values[:, 0].tolist() == [4, 8, 12]
    assert out["b"].values.shape == (2, 8)
    assert all(out[name].lengths is features[name].lengths for name in features)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(
    ("feature", "values", "cause"),
    [
        ("b", torch.tensor([1.0]), "float32"),
        ("b", torch.tensor([[1]]), r"\(1, 1\)"),
        ("b", torch.tensor([1], dtype=torch.int16), "int16"),
        ("b", torch.empty(0, 2, dtype=torch.int64), r"\(0, 2\)"),
        ("b", torch.tensor([1], device="meta"), "ids on meta, the tables are on cpu"),
        ("d", torch.tensor([1]), "no table reads feature 'd'"),
    ],
)
def test_invalid_ids_are_refused(feature: str, values: torch.Tensor, cause: str, others: bool) -> None:
    """Alone and beside valid ids, with which they cannot be joined, or only as another dtype."""
    more = {"a2": Jagged(torch.tensor([3]), torch.tensor([1]))} if others else {}
    with pytest.raises(EmbeddingError, match=f"rank 3.*{cause}"):
        feature_map().keys({**more, feature: Jagged(values, torch.tensor([1]))})


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(
    ("jagged", "cause"),
    [
        (Jagged(torch.tensor([10]), torch.tensor([1])), r"feature 'a2'.*row 10 of table 'a' is outside 0\.\.9"),
        (Jagged(torch.tensor([3, -2, 99]), torch.tensor([3])), r"row -2 of table 'a'"),
        (Jagged(torch.tensor([3, 2]), torch.tensor([1, 2])), r"lengths from 1 on sum to 3, for 2 ids"),
        (Jagged(torch.tensor([3, 2]), torch.tensor([3, -1])), r"lengths from -1 on sum to 2, for 2 ids"),
    ],
)
def test_faulty_numbers_are_found_without_a_read_and_named_after_one(jagged: Jagged, cause: str, others: bool) -> None:
    """Keys of a faulty batch are inside their tables: they may be used until all ranks know of the fault."""
    more = {"b": Jagged(torch.tensor([19]), torch.tensor([1, 0])), "c": Jagged(torch.tensor([0]), torch.tensor([1]))}
    features = {"a2": jagged} | (more if others else {})
    found = feature_map().keys(features)
    assert found.faulty is not None
    assert bool(found.faulty)
    assert found.keys.min() >= 0
    assert found.keys[: jagged.values.numel()].max() < 40
    with pytest.raises(EmbeddingError, match=cause):
        feature_map().raise_fault(features)


def test_a_feature_has_one_table() -> None:
    with pytest.raises(EmbeddingError, match="'x' is read by tables 'a' and 'b'"):
        FeatureMap(TABLES, [("x",), ("x",), ()], 0, CPU)
