"""Batches are moved to the device of the tables: what is in them, what stays, and by whom."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

import flexd
from flexd.core.layout import RankLayout
from flexd.embedding.prefetch.batch_mover import BatchMover

META = torch.device("meta")


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass(frozen=True)
class Sample:
    ids: flexd.Jagged
    name: str


def test_tensors_are_moved_wherever_they_are_and_anything_else_stays() -> None:
    ids = flexd.Jagged(torch.tensor([1, 2]), torch.tensor([2]))
    label, names = torch.ones(3), object()
    batch = {
        "label": label, "again": label, "pair": Pair([label], ids), "sample": Sample(ids, "a"),
        "rest": (1, None, names), "nested": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    }  # fmt: skip
    moved = BatchMover(META).move(MappingProxyType(batch))
    assert type(moved) is MappingProxyType
    assert moved["label"].device == META
    assert moved["label"].shape == (3,)
    assert moved["label"] is moved["again"] is moved["pair"].one[0]
    assert type(moved["pair"]) is Pair
    assert moved["pair"].other is moved["sample"].ids
    assert (moved["sample"].ids.values.device, moved["sample"].ids.lengths.device) == (META, META)
    assert moved["sample"].name == "a"
    assert moved["rest"] is batch["rest"]
    assert moved["rest"][2] is names
    assert moved["nested"].device == META
    assert label.device.type == "cpu"


def test_a_batch_that_is_there_is_the_same_object() -> None:
    batch = {"a": [torch.ones(1)], "b": flexd.Jagged(torch.tensor([1]), torch.tensor([1]))}
    assert BatchMover(torch.device("cpu")).move(batch) is batch


class OnDisk:
    """A batch that becomes ids only when it is moved."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def to(self, device: torch.device, non_blocking: bool) -> dict[str, flexd.Jagged]:
        assert non_blocking
        if not self.ids:
            raise OSError("nothing to move")
        values = torch.tensor(self.ids, device=device)
        return {"item": flexd.Jagged(values, torch.tensor([len(self.ids)], device=device))}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_loop_moves_each_batch_and_looks_it_up_ahead(depth: int) -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 50, 4)], layout=RankLayout(1, 1))
    plain = collection.gather_table("item").clone()
    given = [[1, 2], [3], [2, 2, 9]]
    read = 0
    for ids, batch in zip(
        given, flexd.prefetch([OnDisk(ids) for ids in given], collection, to_device=True, depth=depth), strict=True
    ):
        assert torch.equal(collection(batch)["item"].values, plain[torch.tensor(ids)])
        read += 1
    assert read == 3


def test_an_error_of_moving_is_one_of_the_loader() -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 50, 4)], layout=RankLayout(1, 1))
    batches = iter(flexd.prefetch([OnDisk([1]), OnDisk([])], collection, to_device=True))
    collection(next(batches))
    with pytest.raises(OSError, match="nothing to move"):
        next(batches)
