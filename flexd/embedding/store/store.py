"""The rows of one dim-group that one rank holds: its home rows, then its replica pool.

Rows are named by their addresses (``flexd.core.keyspace``), which of tables spread over all ranks are their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from flexd.core.keyspace import NO_KEY, QUANTIZED, TURN_BITS, Homes
from flexd.embedding.devices import HALF_DTYPES, packed, unpacked
from flexd.embedding.store.directory import NOT_REHOMED, Directory, max_listed_rows
from flexd.embedding.store.quantized_rows import looked_up_dtype

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tiered_rows import RowColumn, TieredRows


TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    QUANTIZED: torch.int8,
}


class DeviceHomes:
    """``Homes`` for tensors: a constant number of kernels and no wait, none at all where addresses are keys."""

    def __init__(self, homes: Homes, device: torch.device) -> None:
        self.homes = homes
        self.linear = homes.linear
        """True if addresses are keys."""
        self._world_size = homes.layout.world_size
        if self.linear:
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

    def addresses(self, keys: torch.Tensor) -> torch.Tensor:
        """Map int64 [n] keys to int64 [n] addresses."""
        if self.linear:
            return keys
        return self._address(torch.searchsorted(self._first_keys, keys, right=True) - 1, keys)

    def keys(self, addresses: torch.Tensor) -> torch.Tensor:
        """Map int64 [n] addresses to int64 [n] keys; ``NO_KEY`` where no row has the address."""
        if self.linear:
            return addresses
        world = self._world_size
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
        return keys.add(shift).add_(torch.div(keys, span, rounding_mode="floor").mul_(self._world_size - span))


class GroupStore:
    """Rows [home_rows + replica_slots, width] and their optimizer state, allocated once.

    A home row has slot ``(address - first_home_address) // world_size``; replica slot s has slot ``home_rows + s``.

    Args:
        number: of the dim-group.
        directory: of all dim-groups.
        cache_slots: of fast memory; with fewer than there are home rows these are in tiered storage (``tier``), and
            ``rows`` and ``state`` stand for tensors.
        keep_keys: of replicas, of every dtype.
        before: a store of the same home rows with as many slots, whose columns of equal width this one takes over.
    """

    rows: RowColumn
    state: RowColumn

    def __init__(
        self,
        homes: DeviceHomes,
        number: int,
        rank: int,
        replica_slots: int,
        directory: Directory,
        cache_slots: int | None = None,
        keep_keys: bool = False,
        before: GroupStore | None = None,
    ) -> None:
        self.group = group = homes.homes.groups[number]
        """With a range of addresses."""
        self.homes = homes
        self.directory = directory
        self.world_size = homes.homes.layout.world_size
        self.rank = rank
        self.first_home_address = group.first_key + (rank - group.first_key) % self.world_size
        self.home_rows = int(homes.homes.home_rows(number)[rank])
        self.replica_slots = replica_slots
        self.dtype = TORCH_DTYPES[group.dtype]
        self.values_dtype = looked_up_dtype(self.dtype)
        """Of what is looked up."""
        slots = self.home_rows + replica_slots
        fast_home_rows = self.home_rows if cache_slots is None else min(cache_slots, self.home_rows)
        state_dtype = torch.promote_types(self.dtype, torch.float32)
        floats = sum(group.state_columns.values())
        self.value_bytes = group.width * self.dtype.itemsize
        self.row_bytes = self.value_bytes + floats * state_dtype.itemsize
        """Bytes of one row with its state, which a migration copies."""
        self.tier: TieredRows | None = None
        """Of home rows in tiered storage."""
        if before is not None and before.tier is not None:
            self.rows, self.state, self.tier = before.rows, before.state, before.tier
        else:
            shape = fast_home_rows + replica_slots, group.width
            rows = torch.zeros(shape, dtype=self.dtype, device=directory.device) if before is None else before.rows
            state: RowColumn | None = None if before is None else before.state
            if state is None or state.shape[1] != floats:
                state = torch.zeros((shape[0], floats), dtype=state_dtype, device=directory.device)
            self.rows, self.state = rows, state
        if self.tier is None and fast_home_rows < self.home_rows:
            rows, state = self.rows, self.state
            assert isinstance(rows, torch.Tensor) and isinstance(state, torch.Tensor)  # noqa: S101, PT018
            from flexd.embedding.store.slow.tiered_rows import (  # loaded where a job has cold rows
                TieredColumn,
                TieredRows,
            )

            self.tier = TieredRows(rows, state, fast_home_rows, self.home_rows)
            self.rows, self.state = TieredColumn(self.tier, rows), TieredColumn(self.tier, state)
        self.replica_addresses = torch.zeros(
            replica_slots if keep_keys or self.dtype in HALF_DTYPES else 0, dtype=torch.int64, device=directory.device
        )
        """int64: the address of the row in each replica slot, for rounding at random and rates by table; none without.
        """
        self.free = np.arange(slots - 1, self.home_rows - 1, -1, dtype=np.int32)
        """int32: free replica slots, of which the last are given first."""

    def home_slots(self, addresses: torch.Tensor) -> torch.Tensor:
        """Map int64 addresses of this rank to int64 slots."""
        return (addresses - self.first_home_address) // self.world_size

    def keys_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Map int64 [n] slots to int64 [n] keys; ``NO_KEY`` for a home slot without a row. Undefined for replica slots
        that are free, or of a store that does not keep the addresses of its replicas."""
        addresses = slots * self.world_size + self.first_home_address
        if len(self.replica_addresses):
            replicas = slots - self.home_rows
            addresses = torch.where(
                replicas < 0, addresses, self.replica_addresses.index_select(0, replicas.clamp(min=0))
            )
        return self.homes.keys(addresses)

    def record_addresses(self, addresses: torch.Tensor) -> None:
        """Record the slots of int64 [n] addresses of the group, whose placement has just changed."""
        if len(self.replica_addresses) and len(addresses):
            held, slots, _ = self.locate(addresses)
            replicas = held & (slots >= self.home_rows)
            self.replica_addresses[slots[replicas] - self.home_rows] = addresses[replicas]

    def locate(self, addresses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map int64 [n] addresses of the group to (bool [n] held here, int64 [n] slot, int64 [n] directory entry or
        -1).

        The slot is undefined where the row is not held. A re-homed row is held where it lives, and nowhere else.
        """
        home = addresses % self.world_size == self.rank
        slots = self.home_slots(addresses)
        directory = self.directory
        if len(directory.rehomed):
            places = directory.rehomed.find(addresses)
            here = (places >= 0) & (places != NOT_REHOMED)
            home, slots = torch.where(places < 0, False, home | here), torch.where(here, places, slots)
        if len(directory) == 0:
            return home, slots, torch.full_like(addresses, -1)
        at = directory.find(addresses)
        found = at < directory.entries
        return home | found, torch.where(found, directory.slots_at(at), slots), torch.where(found, at, -1)

    def read_homes(self, slots: torch.Tensor) -> torch.Tensor:
        """Return uint8 [n, row_bytes] of int64 [n] distinct home slots; cold rows stay cold, and are in host memory.

        Raises:
            SlowMemoryError: rows cannot be read.
        """
        return self.pack(slots) if self.tier is None else self.tier.read_through(slots)

    def write_homes(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write what ``read_homes`` returns to int64 [n] distinct home slots; cold rows stay cold.

        Raises:
            SlowMemoryError: rows cannot be written.
        """
        if self.tier is None:
            self.unpack(rows.to(self.rows.device), slots)
        else:
            self.tier.write_through(slots, rows)

    def fitted(self, rows: torch.Tensor, initial_state: float) -> torch.Tensor:
        """Return uint8 [n, row_bytes] of packed rows with the state of this store or with none, or of those that had
        some where this store has none: state that is missing begins, and state too many is dropped."""
        if rows.shape[1] >= self.row_bytes:
            return rows[:, : self.row_bytes]
        floats = (self.row_bytes - self.value_bytes) // self.state.element_size()
        begun = torch.full((1, floats), initial_state, dtype=self.state.dtype, device=rows.device).view(torch.uint8)
        return torch.cat([rows, begun.expand(len(rows), -1)], dim=1)

    def pack(self, slots: torch.Tensor) -> torch.Tensor:
        """Return uint8 [n, row_bytes]: rows and state, for copying to another rank."""
        return packed(self.rows.index_select(0, slots), self.state.index_select(0, slots))

    def unpack(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write packed rows and state into ``slots``; inverse of ``pack``."""
        columns = self.rows, self.state
        for column, values in zip(columns, unpacked(rows, columns), strict=True):
            if column.shape[1]:
                column.index_copy_(0, slots, values)


def make_stores(
    homes: Homes,
    rank: int,
    replica_slots: Sequence[int],
    device: torch.device,
    cache_slots: Sequence[int | None] | None = None,
    *,
    keep_keys: bool = False,
    before: Sequence[GroupStore | None] | None = None,
) -> list[GroupStore]:
    """Make the stores of all dim-groups of a rank, with one directory.

    Args:
        replica_slots, cache_slots, keep_keys, before: of each dim-group, as in ``GroupStore``.
    """
    limits = [max_listed_rows(g, homes.layout, slots) for g, slots in zip(homes.groups, replica_slots, strict=True)]
    directory = Directory(homes.groups, homes.layout, rank, sum(limits), device)
    on_device, cached = DeviceHomes(homes, device), cache_slots or [None] * len(limits)
    return [
        GroupStore(on_device, number, rank, slots, directory, of_group, keep_keys, before[number] if before else None)
        for number, (slots, of_group) in enumerate(zip(replica_slots, cached, strict=True))
    ]
