"""Jagged input and output: checks, conversions, padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexd
from flexd.core.errors import EmbeddingError
from flexd.embedding.features import Jagged, as_jagged


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
    back = flexd.Jagged(values, lengths).to_nested()
    assert [part.tolist() for part in back.unbind()] == [[4], [], [1, 2, 7]]


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
