"""Jagged features to keys, and rows back to features."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.embedding.features import FeatureMap, Jagged, as_jagged


def test_jagged_checks_its_lengths_and_has_offsets() -> None:
    jagged = Jagged.from_offsets(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 2, 3], dtype=torch.int32))
    assert jagged.lengths.tolist() == [2, 0, 1]
    assert jagged.offsets.tolist() == [0, 2, 2, 3]
    assert jagged.offsets.dtype == torch.int64
    with pytest.raises(EmbeddingError, match="scalar"):
        Jagged(torch.tensor(1), torch.tensor([1]))
    for lengths in (torch.tensor([[1]]), torch.tensor([1.0])):
        with pytest.raises(EmbeddingError, match="lengths"):
            Jagged(torch.tensor([1]), lengths)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), max_size=5), length=st.integers(0, 6), dim=st.integers(1, 3))
def test_padding_keeps_rows_and_masks_the_rest(lengths: list[int], length: int, dim: int) -> None:
    total = sum(lengths)
    values = torch.arange(total * dim, dtype=torch.float64).view(total, dim) + 1
    padded, mask = Jagged(values, torch.tensor(lengths, dtype=torch.int64)).to_padded(length)
    assert padded.shape == (len(lengths), length, dim)
    for sample, rows in enumerate(torch.split(values, lengths)):
        truncated = rows[:length]
        assert torch.equal(padded[sample, : len(truncated)], truncated)
        assert not padded[sample, len(truncated) :].any()
        assert mask[sample].tolist() == [at < len(truncated) for at in range(length)]


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 2), (0, 4), (3, 0)])
def test_a_dense_tensor_has_equally_many_ids_a_sample(shape: tuple[int, ...]) -> None:
    ids = torch.arange(math.prod(shape)).view(shape)
    for dense in (ids, ids.flip(0), ids.transpose(0, -1)):
        jagged = as_jagged(dense, "a")
        assert torch.equal(jagged.values, dense.flatten())
        assert jagged.lengths.tolist() == [dense[0].numel() if len(dense) else 0] * len(dense)


def test_all_types_of_input_give_equal_rows() -> None:
    values, lengths = torch.tensor([4, 1, 2, 7]), torch.tensor([1, 0, 3])
    nested = torch.nested.nested_tensor([values[:1], values[:0], values[1:]], layout=torch.jagged)
    padded, starts = torch.tensor([[4, 9, 9], [9, 9, 9], [1, 2, 7]]), torch.zeros(3, dtype=torch.int64)
    with_holes = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    for form in (flexd.Jagged(values, lengths), nested, with_holes):
        jagged = as_jagged(form, "item")
        assert torch.equal(jagged.values, values)
        assert torch.equal(jagged.lengths.long(), lengths)
    assert [part.tolist() for part in flexd.Jagged(values, lengths).to_nested().unbind()] == [[4], [], [1, 2, 7]]


@pytest.mark.parametrize(
    "bad",
    [
        [1, 2],
        (torch.tensor([1, 2]), torch.tensor([0, 2])),
        (torch.tensor([1, 2]),),
    ],
)
def test_other_types_of_input_are_refused(bad: object) -> None:
    with pytest.raises(EmbeddingError):
        as_jagged(bad, "item")


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
    assert found.order == ["c", "a2", "b"]
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
    assert bool(found.faulty)
    assert found.keys.min() >= 0
    assert found.keys[: jagged.values.numel()].max() < 40
    with pytest.raises(EmbeddingError, match=cause):
        feature_map().raise_fault(features)


def test_a_feature_has_one_table() -> None:
    with pytest.raises(EmbeddingError, match="'x' is read by tables 'a' and 'b'"):
        FeatureMap(TABLES, [("x",), ("x",), ()], 0, CPU)
