"""The directories of all dim-groups as one, so that rows of any number of dim-groups are found by the same kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch

from flexd.embedding.store.directory import Directory
from flexd.embedding.store.store import GroupStore

_GROUP_SHIFT = 48
"""A code with its dim-group in the bits above."""


class ListedRows:
    """The rows that a rank lists. An *entry* is a position in the directories, one directory after another. Immutable.

    Attributes:
        directories: of the dim-groups, as they were when this was made.
        first_entries: entry at which each dim-group begins, and the number of entries.
    """

    def __init__(self, stores: Sequence[GroupStore]) -> None:
        self.directories: tuple[Directory, ...] = tuple(store.directory for store in stores)
        self.first_entries = [0, *accumulate(len(directory) for directory in self.directories)]
        self._device = stores[0].rows.device
        orders = [directory.order for directory in self.directories]
        self._layout = orders[0].layout
        self._homed_rows = [order.homed_rows for order in orders]
        self._first_turns = [order.first_key // self._layout.world_size for order in orders]

    def __len__(self) -> int:
        return self.first_entries[-1]

    def is_of(self, stores: Sequence[GroupStore]) -> bool:
        """Return whether the stores have these directories."""
        return all(a is store.directory for a, store in zip(self.directories, stores, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes beside the directories: nothing for one dim-group, else 12 a listed row once it was searched."""
        if len(self.directories) == 1 or "_codes" not in vars(self):
            return 0
        return self._codes.nbytes + self._places.nbytes

    def find(self, turns: torch.Tensor, homes: torch.Tensor, groups: torch.Tensor | None) -> torch.Tensor:
        """Find rows: int64 [n] entries, -1 for a row that is not listed.

        Args:
            turns, homes: int64 [n], key // world size and key % world size.
            groups: int64 [n] dim-group of each row; None if there is one.
        """
        if len(self) == 0:
            return torch.full_like(turns, -1)
        layout = self._layout
        nodes = torch.div(homes, layout.local_ranks, rounding_mode="floor")
        places = (homes - nodes * layout.local_ranks) * layout.nodes + nodes
        if groups is None:
            codes = places * self._homed_rows[0] + (turns - self._first_turns[0])
        else:
            homed_rows, shifts = self._by_group
            codes = places * homed_rows.index_select(0, groups) + (turns + shifts.index_select(0, groups))
        codes = codes.to(self._codes.dtype)
        at = torch.searchsorted(self._codes, codes).clamp_(max=len(self) - 1)
        return torch.where(self._codes.index_select(0, at) == codes, at, -1)

    def slots_at(self, entries: torch.Tensor) -> torch.Tensor:
        """int64 [m] entries -> int64 [m] slots in the store of their dim-group."""
        places = self._places.index_select(0, entries).to(torch.int64)
        return torch.where(places < 0, -1 - places, places)

    def on_device_tier(self, entries: torch.Tensor) -> torch.Tensor:
        """int64 [m] entries -> bool [m]: DEVICE rows; the others are NODE rows."""
        return self._places.index_select(0, entries) < 0

    @cached_property
    def _codes(self) -> torch.Tensor:
        if len(self.directories) == 1:
            return self.directories[0].codes
        return torch.cat([d.codes.to(torch.int64) + (g << _GROUP_SHIFT) for g, d in enumerate(self.directories)])

    @cached_property
    def _places(self) -> torch.Tensor:
        places = [directory.places for directory in self.directories]
        return places[0] if len(places) == 1 else torch.cat(places)

    @cached_property
    def _by_group(self) -> torch.Tensor:
        """int64 [2, groups]: ``homed_rows``, and what is added to a turn."""
        shifts = [(g << _GROUP_SHIFT) - turn for g, turn in enumerate(self._first_turns)]
        return torch.tensor([self._homed_rows, shifts], dtype=torch.int64, device=self._device)
