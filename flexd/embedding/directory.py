"""Which rows a rank holds beside plain home rows, and where: 13 bytes a hot row, nothing for the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexd.layout import Tier


@dataclass(frozen=True)
class Directory:
    """The NODE rows of this rank's rail and all DEVICE rows, of one dim-group, home copies included.

    Every holder of a tier lists the same keys in the same order, which is what lets replica synchronisation talk
    about positions instead of ids. Immutable: a chunk makes the next directory, so other threads may read this one.

    Attributes:
        keys: int64 [n], ascending.
        slots: int32 [n], where the row is in the group's store.
        tiers: uint8 [n], NODE or DEVICE.
        positions: for NODE and DEVICE the int64 positions in ``keys``, ascending.
    """

    keys: torch.Tensor
    slots: torch.Tensor
    tiers: torch.Tensor
    positions: dict[Tier, torch.Tensor]

    def __len__(self) -> int:
        return len(self.keys)

    @staticmethod
    def empty(device: torch.device) -> Directory:
        return Directory.of(
            torch.empty(0, dtype=torch.int64, device=device),
            torch.empty(0, dtype=torch.int32, device=device),
            torch.empty(0, dtype=torch.uint8, device=device),
        )

    @staticmethod
    def of(keys: torch.Tensor, slots: torch.Tensor, tiers: torch.Tensor) -> Directory:
        positions = {tier: (tiers == tier).nonzero().view(-1) for tier in (Tier.NODE, Tier.DEVICE)}
        return Directory(keys, slots, tiers, positions)

    def find(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [m] keys -> (int64 [m] positions, bool [m] found); a position is meaningless where not found."""
        if len(self.keys) == 0:
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        at = torch.searchsorted(self.keys, keys).clamp_(max=len(self.keys) - 1)
        return at, self.keys[at] == keys

    def replace(self, removed: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, tiers: torch.Tensor) -> Directory:
        """Without the ``removed`` positions, with the given rows (ascending ``keys`` not listed otherwise)."""
        keep = torch.ones(len(self.keys), dtype=torch.bool, device=self.keys.device)
        keep[removed] = False
        old = (self.keys[keep], self.slots[keep], self.tiers[keep])
        # A merge of two sorted lists by position: linear in the directory, where a sort of it would not be.
        target = torch.searchsorted(old[0], keys) + torch.arange(len(keys), device=keys.device)
        stays = torch.ones(len(old[0]) + len(keys), dtype=torch.bool, device=keys.device)
        stays[target] = False
        merged = []
        for before, new in zip(old, (keys, slots, tiers), strict=True):
            column = torch.empty(len(stays), dtype=before.dtype, device=before.device)
            column[stays] = before
            column[target] = new.to(before.dtype)
            merged.append(column)
        return Directory.of(*merged)
