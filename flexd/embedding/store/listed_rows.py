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
        """Bytes beside the directories once they were searched: 8 for each dim-group and rank, and with several
        dim-groups 12 a listed row."""
        made = ("_first_codes",) if len(self.directories) == 1 else ("_first_codes", "_codes", "_places")
        return sum(vars(self)[name].nbytes for name in made if name in vars(self))

    def find(self, turns: torch.Tensor, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Find rows: (bool [n] is listed, int64 [n] entry; some entry where it is not). There are listed rows.

        Args:
            turns: int64 [n], key // world size.
            cells: int64 [n], dim-group * world size + home rank.
        """
        codes = (self._first_codes.index_select(0, cells) + turns).to(self._codes.dtype)
        at = torch.searchsorted(self._codes, codes).clamp_(max=len(self) - 1)
        return self._codes.index_select(0, at) == codes, at

    def places_at(self, entries: torch.Tensor) -> torch.Tensor:
        """int64 [m] entries -> int [m] slots of NODE rows, -1 - slots of DEVICE rows."""
        return self._places.index_select(0, entries)

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
    def _first_codes(self) -> torch.Tensor:
        """int64 [groups x world size]: what is added to the turn of a row of a dim-group and home."""
        homes = torch.arange(self._layout.world_size)
        places = homes % self._layout.local_ranks * self._layout.nodes + homes // self._layout.local_ranks
        of_groups = [
            places * homed_rows + ((g << _GROUP_SHIFT) - turn)
            for g, (homed_rows, turn) in enumerate(zip(self._homed_rows, self._first_turns, strict=True))
        ]
        return torch.cat(of_groups).to(self._device)
