"""The map between keys and addresses on the device of the rows."""

from __future__ import annotations

import torch

from flexd.core.homes import NO_KEY, TURN_BITS, Homes


class DeviceHomes:
    """``Homes`` for tensors: a constant number of kernels and no wait, none at all where addresses are keys."""

    def __init__(self, homes: Homes, device: torch.device) -> None:
        self.homes = homes
        if homes.linear:
            return
        finder = homes.finder
        (
            self._first_keys, self._end_keys, self._factors, self._wide_starts, self._wide_parts, self._codes,
            self._narrow_parts,
        ) = (
            torch.from_numpy(column).to(device)
            for column in (
                homes.first_keys, homes.end_keys, homes.factors, finder.wide_starts, finder.wide_parts,
                finder.narrow_codes, finder.narrow_parts,
            )
        )  # fmt: skip

    @property
    def linear(self) -> bool:
        """True if addresses are keys."""
        return self.homes.linear

    @property
    def world_size(self) -> int:
        return self.homes.layout.world_size

    def addresses(self, keys: torch.Tensor) -> torch.Tensor:
        """Map int64 [n] keys to int64 [n] addresses."""
        if self.linear:
            return keys
        return self._address(torch.searchsorted(self._first_keys, keys, right=True) - 1, keys)

    def keys(self, addresses: torch.Tensor) -> torch.Tensor:
        """Map int64 [n] addresses to int64 [n] keys; ``NO_KEY`` where no row has the address."""
        if self.linear:
            return addresses
        world = self.world_size
        turn = torch.div(addresses, world, rounding_mode="floor")
        rank = addresses - turn * world
        code = (rank << TURN_BITS) + turn
        starts, ends = self._codes
        narrow = torch.searchsorted(starts, code, right=True) - 1
        wide = torch.searchsorted(self._wide_starts, addresses, right=True) - 1
        part = torch.where(code < ends[narrow], self._narrow_parts[narrow], self._wide_parts[wide])
        shift, span = self._factors.index_select(1, part)
        turns = torch.div(shift, world, rounding_mode="floor")
        keys = (turn - turns) * span + rank - (shift - turns * world)
        known = (keys >= self._first_keys[part]) & (keys < self._end_keys[part])
        return torch.where(known & (self._address(part, keys) == addresses), keys, NO_KEY)

    def _address(self, part: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        shift, span = self._factors.index_select(1, part)
        turns = torch.div(keys, span, rounding_mode="floor")
        return keys.add(shift).add_(turns.mul_(self.world_size - span))
