"""Lists the rows of a rank that have replicas: 8 to 12 bytes a listed row, nothing for plain home rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.layout import RankLayout, Tier
from flexd.embedding import devices

_POSITION_BLOCK = 2**20


@dataclass(frozen=True)
class HomeOrder:
    """The order in which a rank lists the rows of a dim-group: by rail, node and number of the home rank, then by key.

    So the rows that two ranks synchronise (those of one home, or of one rail) are adjacent and in the same order on
    both, and need no list of their own.

    Attributes:
        first_key, rows: keys lie in [first_key, first_key + rows).
        local_rank: local rank of the rank whose order it is.
    """

    first_key: int
    rows: int
    layout: RankLayout
    local_rank: int

    @property
    def homed_rows(self) -> int:
        """Number of codes of each home rank."""
        world = self.layout.world_size
        return (self.first_key + max(self.rows, 1) - 1) // world - self.first_key // world + 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the codes: int32, or int64 in a group of more than about 2^31 rows."""
        return torch.int32 if self.homed_rows * self.layout.world_size <= 2**31 else torch.int64

    def place_of(self, home: int) -> int:
        """Return the place of a home rank among all of them."""
        return self.layout.local_rank_of(home) * self.layout.nodes + self.layout.node_of(home)

    def codes(self, keys: torch.Tensor) -> torch.Tensor:
        """int64 [n] keys of the group -> [n] codes, ascending in this order, of ``dtype``."""
        layout = self.layout
        turn = torch.div(keys, layout.world_size, rounding_mode="floor")
        home = keys - turn * layout.world_size
        node = torch.div(home, layout.local_ranks, rounding_mode="floor")
        place = (home - node * layout.local_ranks) * layout.nodes + node
        return (place * self.homed_rows + (turn - self.first_key // layout.world_size)).to(self.dtype)

    def keys(self, codes: torch.Tensor) -> torch.Tensor:
        """Return int64 [n] keys; the inverse of ``codes``."""
        layout = self.layout
        wide = codes.to(torch.int64)
        place = torch.div(wide, self.homed_rows, rounding_mode="floor")
        local = torch.div(place, layout.nodes, rounding_mode="floor")
        home = (place - local * layout.nodes) * layout.local_ranks + local
        turn = wide - place * self.homed_rows + self.first_key // layout.world_size
        return turn * layout.world_size + home

    def bounds(self, codes: torch.Tensor) -> tuple[int, ...]:
        """Ascending codes -> [world_size + 1] positions at which the rows of each home rank begin, and the end."""
        starts = torch.arange(self.layout.world_size + 1, dtype=torch.int64, device=codes.device) * self.homed_rows
        if self.dtype == torch.int32:
            starts = starts.clamp_(max=2**31 - 1)  # the end of the last may be one beyond, and no code is that large
            found = torch.searchsorted(codes, starts.to(torch.int32)).tolist()
            found[-1] = len(codes)
        else:
            found = torch.searchsorted(codes, starts).tolist()
        return tuple(found)


@dataclass(frozen=True)
class Directory:
    """The NODE rows of this rank's rail and all DEVICE rows, of one dim-group, home copies included.

    Two holders list the rows that they have in common in the same order, so that replica synchronisation can use
    positions instead of ids. Immutable: a chunk makes the next directory, so other threads may read this one, and
    prepare the next.

    Attributes:
        codes: [n], ``HomeOrder.codes``, ascending.
        places: int32 [n], the slot of a NODE row in the group's store, -1 - slot of a DEVICE row.
        bounds: [world_size + 1] positions at which the rows of each home begin, in the order of ``HomeOrder.place_of``.
        rail_device: int32, ascending: positions of the DEVICE rows of this rank's rail; None if there are no other rows
            of the rail.
    """

    order: HomeOrder
    codes: torch.Tensor
    places: torch.Tensor
    bounds: tuple[int, ...] = field(repr=False)
    rail_device: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.codes)

    @staticmethod
    def empty(order: HomeOrder, device: torch.device) -> Directory:
        none = torch.empty(0, dtype=torch.int32, device=device)
        return Directory(order, none.to(order.dtype), none, (0,) * (order.layout.world_size + 1), None)

    @property
    def keys(self) -> torch.Tensor:
        """int64 [n] keys in the order of the positions. A copy."""
        return self.order.keys(self.codes)

    @property
    def tiers(self) -> torch.Tensor:
        """uint8 [n] tiers. A copy."""
        return _tiers(self.places)

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        held = (self.codes, self.places, *([] if self.rail_device is None else [self.rail_device]))
        return sum(tensor.nbytes for tensor in held)

    @property
    def rail(self) -> tuple[int, int]:
        """First and end position of the rows of this rank's rail."""
        nodes, local = self.order.layout.nodes, self.order.local_rank
        return self.bounds[local * nodes], self.bounds[(local + 1) * nodes]

    def at_tier(self, tier: Tier) -> torch.Tensor:
        """Return int64 positions of the rows at NODE or DEVICE, in the same order on all ranks that list them."""
        return ((self.places < 0) == (tier == Tier.DEVICE)).nonzero().view(-1)

    def slots_at(self, positions: torch.Tensor) -> torch.Tensor:
        """int32 or int64 [m] positions -> int64 [m] slots."""
        places = self.places.index_select(0, positions).to(torch.int64)
        return torch.where(places < 0, -1 - places, places)

    def tiers_at(self, positions: torch.Tensor) -> torch.Tensor:
        """int32 or int64 [m] positions -> uint8 [m] tiers, NODE or DEVICE."""
        return _tiers(self.places.index_select(0, positions))

    def find(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [m] keys of the group -> (int64 [m] positions, bool [m] found); positions are valid where found."""
        if len(self.codes) == 0:
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        codes = self.order.codes(keys)
        at = torch.searchsorted(self.codes, codes).clamp_(max=len(self.codes) - 1)
        return at, self.codes.index_select(0, at) == codes

    def replace(self, removed: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, tiers: torch.Tensor) -> Directory:
        """Return the directory without the ``removed`` positions and with the given rows.

        Linear in the directory, with one pass over each column; both directories and one column exist at the same
        time.

        Args:
            removed: int64 [r] positions, each once.
            keys: int64 [m], each once, not listed otherwise.
            slots: int32 [m].
            tiers: uint8 [m], NODE or DEVICE.
        """
        codes, order = torch.sort(self.order.codes(keys))
        places = torch.where(tiers == Tier.DEVICE, -1 - slots, slots).to(torch.int32).index_select(0, order)
        in_host_memory = devices.in_host_memory(self.codes)
        merged = (_merged_on_cpu if in_host_memory else _merged)(self.codes, self.places, removed, codes, places)
        made = Directory(self.order, *merged, self.order.bounds(merged[0]), None)
        first, end = made.rail
        device_rows = merged[1][first:end] < 0
        several = end > first and not bool(device_rows.all())
        return Directory(made.order, *merged, made.bounds, _positions(device_rows, first) if several else None)


def _tiers(places: torch.Tensor) -> torch.Tensor:
    return (places < 0).to(torch.uint8) + int(Tier.NODE)


def _merged(
    codes: torch.Tensor, places: torch.Tensor, removed: torch.Tensor, new_codes: torch.Tensor, new_places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two sorted lists in linear time."""
    device = codes.device
    keep = torch.ones(len(codes), dtype=torch.bool, device=device)
    keep[removed] = False
    kept = codes[keep]
    target = torch.searchsorted(kept, new_codes) + torch.arange(len(new_codes), device=device)
    stays = torch.ones(len(kept) + len(new_codes), dtype=torch.bool, device=device)
    stays[target] = False
    merged = []
    for before, new in ((kept, new_codes), (places[keep], new_places)):
        column = torch.empty(len(stays), dtype=before.dtype, device=device)
        column[stays] = before
        column[target] = new
        merged.append(column)
    return merged[0], merged[1]


def _merged_on_cpu(
    codes: torch.Tensor, places: torch.Tensor, removed: torch.Tensor, new_codes: torch.Tensor, new_places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge as ``_merged`` does. numpy's masks take a tenth of the time of torch's on a CPU."""
    keep = np.ones(len(codes), dtype=np.bool_)
    keep[removed.numpy()] = False

    def kept(column: torch.Tensor) -> npt.NDArray[Any]:
        whole: npt.NDArray[Any] = column.numpy()
        return whole[keep] if len(removed) else whole

    before = kept(codes)
    target = np.searchsorted(before, new_codes.numpy()) + np.arange(len(new_codes))
    stays = np.ones(len(before) + len(new_codes), dtype=np.bool_)
    stays[target] = False

    def merged(before: npt.NDArray[Any], new: npt.NDArray[Any]) -> torch.Tensor:
        column = np.empty(len(stays), dtype=before.dtype)
        column[stays] = before
        column[target] = new
        return torch.from_numpy(column)

    all_codes = merged(before, new_codes.numpy())
    del before
    return all_codes, merged(kept(places), new_places.numpy())


def _positions(chosen: torch.Tensor, first: int) -> torch.Tensor:
    """bool [n] -> int32 ``first`` + positions of True; in blocks, because torch's indices are twice as wide."""
    blocks = torch.split(chosen, _POSITION_BLOCK)
    starts = range(first, first + len(chosen), _POSITION_BLOCK)
    return torch.cat(
        [(block.nonzero().view(-1) + start).to(torch.int32) for block, start in zip(blocks, starts, strict=True)]
    )
