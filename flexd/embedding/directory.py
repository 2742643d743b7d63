"""Which rows a rank holds beside plain home rows, and where: 12 bytes a hot row, nothing for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexd.layout import Tier

_POSITION_BLOCK = 2**20


@dataclass(frozen=True)
class Directory:
    """The NODE rows of this rank's rail and all DEVICE rows, of one dim-group, home copies included.

    Every holder of a tier lists the same keys in the same order, which is what lets replica synchronisation talk
    about positions instead of ids. Immutable: a chunk makes the next directory, so other threads may read this one.

    Attributes:
        first_key: of the dim-group.
        offsets: [n], keys less ``first_key``, ascending; int32, or int64 in a group of more than 2^31 rows.
        places: int32 [n], where the row is in the group's store: the slot of a NODE row, -1 - slot of a DEVICE row.
        positions: for NODE and DEVICE the int32 positions of their rows in ``offsets``, ascending.
    """

    first_key: int
    offsets: torch.Tensor
    places: torch.Tensor
    positions: dict[Tier, torch.Tensor]

    def __len__(self) -> int:
        return len(self.offsets)

    @staticmethod
    def empty(first_key: int, group_rows: int, device: torch.device) -> Directory:
        """Of a dim-group of ``group_rows`` rows."""
        wide = torch.int64 if group_rows > 2**31 else torch.int32
        none = torch.empty(0, dtype=torch.int32, device=device)
        return Directory(first_key, none.to(wide), none, {Tier.NODE: none, Tier.DEVICE: none})

    @property
    def keys(self) -> torch.Tensor:
        """int64 [n], ascending. A copy."""
        return self.offsets.to(torch.int64) + self.first_key

    @property
    def tiers(self) -> torch.Tensor:
        """uint8 [n]. A copy."""
        return _tiers(self.places)

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return sum(tensor.nbytes for tensor in (self.offsets, self.places, *self.positions.values()))

    def slots_at(self, positions: torch.Tensor) -> torch.Tensor:
        """int32 or int64 [m] positions -> int64 [m] slots."""
        places = self.places.index_select(0, positions).to(torch.int64)
        return torch.where(places < 0, -1 - places, places)

    def tiers_at(self, positions: torch.Tensor) -> torch.Tensor:
        """int32 or int64 [m] positions -> uint8 [m] tiers, NODE or DEVICE."""
        return _tiers(self.places.index_select(0, positions))

    def find(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [m] keys of the group -> (int64 [m] positions, bool [m] found); a position is meaningless where not
        found."""
        if len(self.offsets) == 0:
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        wanted = (keys - self.first_key).to(self.offsets.dtype)
        at = torch.searchsorted(self.offsets, wanted).clamp_(max=len(self.offsets) - 1)
        return at, self.offsets.index_select(0, at) == wanted

    def replace(self, removed: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, tiers: torch.Tensor) -> Directory:
        """Without the ``removed`` positions, with the given rows.

        Linear in the directory, with one pass over each column; both directories and one column exist at the same
        time.

        Args:
            removed: int64 [r] positions, each once.
            keys: int64 [m], ascending, not listed otherwise.
            slots: int32 [m].
            tiers: uint8 [m], NODE or DEVICE.
        """
        offsets = (keys - self.first_key).to(self.offsets.dtype)
        places = torch.where(tiers == Tier.DEVICE, -1 - slots, slots).to(torch.int32)
        if self.offsets.device.type == "cpu":
            return self._replaced_on_cpu(removed.numpy(), offsets.numpy(), places.numpy())
        return self._replaced(removed, offsets, places)

    def _replaced(self, removed: torch.Tensor, offsets: torch.Tensor, places: torch.Tensor) -> Directory:
        device = self.offsets.device
        keep = torch.ones(len(self), dtype=torch.bool, device=device)
        keep[removed] = False
        kept = self.offsets[keep]
        # A merge of two sorted lists by position: linear in the directory, where a sort of it would not be.
        target = torch.searchsorted(kept, offsets) + torch.arange(len(offsets), device=device)
        stays = torch.ones(len(kept) + len(offsets), dtype=torch.bool, device=device)
        stays[target] = False
        merged = []
        for before, new in ((kept, offsets), (self.places[keep], places)):
            column = torch.empty(len(stays), dtype=before.dtype, device=device)
            column[stays] = before
            column[target] = new
            merged.append(column)
        device_rows = merged[1] < 0
        positions = {
            tier: rows.nonzero().view(-1).to(torch.int32)
            for tier, rows in ((Tier.NODE, ~device_rows), (Tier.DEVICE, device_rows))
        }
        return Directory(self.first_key, merged[0], merged[1], positions)

    def _replaced_on_cpu(
        self, removed: npt.NDArray[np.int64], offsets: npt.NDArray[Any], places: npt.NDArray[np.int32]
    ) -> Directory:
        """As ``_replaced``: numpy's masks take a tenth of the time of torch's on a CPU."""
        keep = np.ones(len(self), dtype=np.bool_)
        keep[removed] = False

        def kept(column: torch.Tensor) -> npt.NDArray[Any]:
            whole: npt.NDArray[Any] = column.numpy()
            return whole[keep] if len(removed) else whole

        before = kept(self.offsets)
        target = np.searchsorted(before, offsets) + np.arange(len(offsets))
        stays = np.ones(len(before) + len(offsets), dtype=np.bool_)
        stays[target] = False

        def merged(before: npt.NDArray[Any], new: npt.NDArray[Any]) -> npt.NDArray[Any]:
            column = np.empty(len(stays), dtype=before.dtype)
            column[stays] = before
            column[target] = new
            return column

        new_offsets = merged(before, offsets)
        del before
        new_places = merged(kept(self.places), places)
        positions = {
            Tier.NODE: torch.from_numpy(_positions(new_places, negative=False)),
            Tier.DEVICE: torch.from_numpy(_positions(new_places, negative=True)),
        }
        return Directory(self.first_key, torch.from_numpy(new_offsets), torch.from_numpy(new_places), positions)


def _tiers(places: torch.Tensor) -> torch.Tensor:
    return (places < 0).to(torch.uint8) + int(Tier.NODE)


def _positions(places: npt.NDArray[np.int32], *, negative: bool) -> npt.NDArray[np.int32]:
    """Where places are negative, or are not; in blocks, because numpy's indices are twice as wide as ours."""
    count = int(np.count_nonzero((places < 0) == negative))
    if count == len(places):
        return np.arange(count, dtype=np.int32)
    positions = np.empty(count, dtype=np.int32)
    if count == 0:
        return positions
    filled = 0
    for start in range(0, len(places), _POSITION_BLOCK):
        found = np.flatnonzero((places[start : start + _POSITION_BLOCK] < 0) == negative)
        positions[filled : filled + len(found)] = found + start
        filled += len(found)
    return positions
