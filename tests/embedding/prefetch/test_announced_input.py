"""Inputs of ``flexd.prefetch`` are kept and compared by value."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from flexd.embedding.exchange.route import FeatureKeys
from flexd.embedding.features import Jagged, as_jagged
from flexd.embedding.prefetch.announced_input import AnnouncedInput, InputValues
from tools.bench.sections.dispatch import Counting


def read(given: Mapping[str, Any]) -> InputValues:
    features = {name: as_jagged(ids, name) for name, ids in given.items() if name != "factors"}
    return InputValues(features, frozenset({"bag"} if "factors" in given else ()))


def announced_of(given: Mapping[str, Any]) -> AnnouncedInput:
    return AnnouncedInput(given, read, lambda values: FeatureKeys([], torch.arange(0), None, []))


def some() -> dict[str, Any]:
    return {
        "bag": Jagged(torch.arange(5), torch.tensor([2, 3])),
        "dense": torch.arange(6, dtype=torch.int32).view(2, 3),
        "more": Jagged(torch.arange(4), torch.tensor([1, 3])),
        "factors": torch.ones(5),
    }


def test_equal_values_in_other_objects_and_another_order_are_the_same_input() -> None:
    values, differs = announced_of(some()).compare(dict(reversed(some().items())))
    assert not bool(differs)
    assert list(values.features) == ["bag", "dense", "more"]
    assert isinstance(differs, torch.Tensor), "the host waits for nothing"


@pytest.mark.parametrize(
    "changes",
    [
        lambda given: given["bag"].values.__setitem__(4, 3),
        lambda given: given["bag"].lengths.copy_(torch.tensor([3, 2])),
        lambda given: given["bag"].values.resize_(4),
        lambda given: given["dense"].numpy().__setitem__((1, 1), 7),
        lambda given: given["dense"].set_(torch.zeros(3, 2, dtype=torch.int32)),
        lambda given: given["more"].lengths.copy_(torch.tensor([2, 2])),
        lambda given: given.pop("factors"),
        lambda given: given.pop("dense"),
        lambda given: given.update(more=torch.arange(3)),
        lambda given: given.update(dense=given["dense"].long()),
        lambda given: given.update(bag="no ids"),
    ],
)
def test_any_change_after_the_announcement_is_seen(changes: Any) -> None:
    given = some()
    announced = announced_of(given)
    before = [part.clone() for part in announced.values().numbers]
    changes(given)
    values, differs = announced.compare(given)
    assert bool(differs)
    assert all(map(torch.equal, announced.values().numbers, before)), "what is located stays what was announced"
    form = [part.numel() for part in values.numbers]
    assert form == [part.numel() for part in before], "rows of the announced input are split by its sizes"


def test_launches_do_not_grow_with_features() -> None:
    counts = []
    for features in (2, 200):
        given = {str(name): Jagged(torch.arange(3), torch.tensor([1, 2])) for name in range(features)}
        with Counting() as counting:
            announced_of(given).compare(given)
        counts.append(counting.launches.total())
    assert counts[0] == counts[1] <= 6
