"""Batches taken apart, shipped as bytes and put together: every sample keeps its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import EmbeddingError
from flexd.embedding.affinity.sample_blocks import BlockLayout, SampleBlocks
from flexd.embedding.affinity.sample_parts import SampleParts
from flexd.embedding.jagged import Jagged

CPU = torch.device("cpu")


class Pair(NamedTuple):
    ids: Any
    label: torch.Tensor


@dataclass(frozen=True)
class Batch:
    sparse: dict[str, Jagged]
    dense: torch.Tensor
    pair: Pair
    note: str = "note"


def batch_of(first: int, samples: int, seed: int) -> Batch:
    """Make samples whose parts all have the sample's number."""
    rng = np.random.default_rng(seed)
    number = torch.arange(first, first + samples)

    def jagged(dtype: torch.dtype, *inner: int, of: torch.dtype = torch.int64) -> Jagged:
        lengths = torch.from_numpy(rng.integers(0, 4, samples)).to(of)
        values = number.repeat_interleave(lengths).to(dtype)
        return Jagged(values.view(-1, *[1] * len(inner)).expand(-1, *inner).contiguous(), lengths)

    return Batch(
        {"b": jagged(torch.int32), "a": jagged(torch.int64, of=torch.int32), "c": jagged(torch.float32, 2, 3)},
        number.view(-1, 1, 1).expand(-1, 3, 2).double(),
        Pair([jagged(torch.int64), number % 2 == 0], number.to(torch.bfloat16)),
    )


def rows_of(batch: Batch) -> list[list[Any]]:
    """Return all values of each sample."""
    jagged = [*batch.sparse.values(), batch.pair.ids[0]]
    split = [[part.tolist() for part in torch.split(one.values, one.lengths.tolist())] for one in jagged]
    dense = [one.tolist() for one in (batch.dense, batch.pair.ids[1], batch.pair.label)]
    return [list(sample) for sample in zip(*split, *dense, strict=True)]


@given(
    here=st.integers(0, 6),
    there=st.integers(0, 6),
    seed=st.integers(0, 1000),
    chosen=st.lists(st.booleans(), max_size=6),
)
@settings(max_examples=50, deadline=None)
def test_samples_that_leave_and_arrive_keep_their_parts(here: int, there: int, seed: int, chosen: list[bool]) -> None:
    mine, other = batch_of(0, here, seed), batch_of(100, there, seed + 1)
    picked = [at for at, take in enumerate(chosen) if take and at < there]
    parts = SampleParts.of(mine)
    layout = BlockLayout(parts, CPU)
    blocks, of_other = layout.blocks(), BlockLayout(SampleParts.of(other), CPU).blocks()
    leaving = of_other.select(torch.tensor(picked, dtype=torch.int64))
    message = leaving.pack()
    assert len(message) == int(of_other.sample_bytes()[picked].sum()), "what a sample costs is not what it sends"
    joined = SampleBlocks.join([blocks, blocks.unpack(message, len(picked))])
    made = layout.batch(joined)
    assert rows_of(made) == rows_of(mine) + [rows_of(other)[at] for at in picked]
    assert list(made.sparse) == list(mine.sparse)
    assert made.note == "note"
    for new, old in zip(SampleParts.of(made).values, parts.values, strict=True):
        assert type(new) is type(old)
        of_new, of_old = (
            (one.values.dtype, one.lengths.dtype, one.values.shape[1:])
            if isinstance(one, Jagged)
            else (one.dtype, one.shape[1:])
            for one in (new, old)
        )
        assert of_new == of_old


def test_nested_tensors_stay_nested_and_shared_objects_shared() -> None:
    nested = torch.nested.nested_tensor([torch.arange(2), torch.arange(0), torch.arange(3)], layout=torch.jagged)
    label = torch.arange(3)
    parts = SampleParts.of({"ids": nested, "label": label, "again": [label]})
    assert len(parts.values) == 2
    layout = BlockLayout(parts, CPU)
    made = layout.batch(layout.blocks().select(torch.tensor([2, 0])))
    assert [one.tolist() for one in made["ids"].unbind()] == [[0, 1, 2], [0, 1]]
    assert made["ids"].is_nested
    assert made["again"][0] is made["label"]
    assert made["label"].tolist() == [2, 0]


def test_the_structure_of_a_batch_does_not_depend_on_its_samples() -> None:
    first, second = (SampleParts.of(batch_of(at, samples, at)) for at, samples in ((0, 5), (9, 2)))
    assert first.structure == second.structure
    dense = batch_of(0, 5, 0)
    changed = SampleParts.of(Batch(dense.sparse, dense.dense.float(), dense.pair))
    assert changed.structure != first.structure


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": np.arange(3)}, r"batch\['x'\] is a ndarray"),
        ((torch.zeros(3), torch.zeros(4)), r"batch\[0\] has 3 samples, batch\[1\] has 4"),
        ([torch.zeros(2, requires_grad=True)], "requires gradients"),
        ({"x": torch.tensor(1.0)}, r"has shape \(\)"),
        ({"x": torch.zeros(2, 2).to_sparse()}, "sparse"),
    ],
)
def test_what_cannot_be_shipped_is_named(batch: Any, says: str) -> None:
    with pytest.raises(EmbeddingError, match=says):
        SampleParts.of(batch)


def test_lengths_that_do_not_fit_are_named() -> None:
    wrong = {"x": Jagged(torch.zeros(3), torch.tensor([4, -1]))}
    with pytest.raises(EmbeddingError, match=r"batch\['x'\] has 3 values, its lengths sum to 3"):
        BlockLayout(SampleParts.of(wrong), CPU).blocks()
    with pytest.raises(EmbeddingError, match="is on cpu, the tables on meta"):
        BlockLayout(SampleParts.of(torch.zeros(2)), torch.device("meta"))
