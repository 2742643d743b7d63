"""One look-up for several collections, of which each reads its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flexd.core.keyspace import KeySpace
from flexd.embedding.features import FeatureMap
from flexd.embedding.prefetch.announced_input import may_be_input
from flexd.embedding.routed_input import RoutedInput

Mode = tuple[bool, bool, int]
"""Whether gradients are recorded, whether the module trains, and the number of steps."""


class FetchesRows(Protocol):
    """The collection of all tables."""

    keyspace: KeySpace

    def _rows(self, routed: RoutedInput, *, expand: bool = True) -> Sequence[torch.Tensor]: ...


class SharedLookUp:
    """Located rows of all collections; the first part that reads its rows fetches those of all.

    Args:
        names: for each collection, name of a feature -> its name in ``routed``.
        inputs: one for each collection.
    """

    def __init__(
        self,
        tables: FetchesRows,
        features: FeatureMap,
        names: Sequence[Mapping[str, str]],
        inputs: Sequence[Any],
        mode: Mode,
        routed: RoutedInput,
    ) -> None:
        self._tables = tables
        self._features = features
        self._names = names
        self._inputs = inputs
        self._mode = mode
        self.routed = routed
        self._taken: set[int] = set()
        self._rows: Sequence[torch.Tensor] | None = None

    @property
    def all_taken(self) -> bool:
        return len(self._taken) == len(self._inputs)

    def serves(self, number: int, given: Any, mode: Mode) -> bool:
        """Return whether a collection may take its part for this input."""
        return number not in self._taken and mode == self._mode and may_be_input(given, self._inputs[number])

    def share_of(self, number: int) -> RoutedInput:
        """Local. Return the part of one collection."""
        self._taken.add(number)
        own = {there: here for here, there in self._names[number].items()}
        features = {own[name]: jagged for name, jagged in self.routed.features.items() if name in own}
        order = [own[name] for name in self.routed.order if name in own]
        slices = [
            _slice_of(names, own, [self.routed.features[name].values.shape[0] for name in names])
            for names in self._features.by_group(self.routed.order)
        ]
        summed = self._features.summed_by_group(self.routed.features, self.routed.order)
        bags = [
            _slice_of(names, own, [self.routed.features[name].lengths.shape[0] for name in names]) for names in summed
        ]
        return RoutedInput(features, order, self.routed.forward_pass, _Part(self, slices, bags))

    def rows(self) -> Sequence[torch.Tensor]:
        """Collective at the first call. Return the distinct rows of each dim-group, and sums of bags after them."""
        if self._rows is None:
            self._rows = self._tables._rows(self.routed, expand=False)
        return self._rows

    @property
    def groups(self) -> int:
        return len(self._tables.keyspace.groups)


@dataclass(frozen=True)
class _Part:
    """Implements ``PartOfLookUp``.

    Attributes:
        slices: of each dim-group, the part of its ids.
        bags: of each dim-group, the part of its bags that are answered by sums.
    """

    look_up: SharedLookUp
    slices: Sequence[slice]
    bags: Sequence[slice]

    def places(self) -> list[torch.Tensor]:
        rows = self.look_up.rows()[: self.look_up.groups]
        return [every[part] for every, part in zip(self.look_up.routed.places(rows), self.slices, strict=True)]

    def rows(self, *, expand: bool) -> Sequence[torch.Tensor]:
        rows = self.look_up.rows()
        of_rows, of_bags = rows[: self.look_up.groups], rows[self.look_up.groups :]
        if expand:
            return [part.index_select(0, places) for part, places in zip(of_rows, self.places(), strict=True)]
        return [*of_rows, *(sums[part] for sums, part in zip(of_bags, self.bags, strict=False))]


def _slice_of(names: Sequence[str], own: Mapping[str, str], sizes: Sequence[int]) -> slice:
    """Return where the own names are, which follow one another."""
    inside = [number for number, name in enumerate(names) if name in own]
    if not inside:
        return slice(0, 0)
    first, last = inside[0], inside[-1]
    begin = sum(sizes[:first])
    return slice(begin, begin + sum(sizes[first : last + 1]))
