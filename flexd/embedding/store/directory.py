"""Lists the rows of a rank that have replicas. A chunk changes it in time proportional to the chunk."""

import threading
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.arrays import Int32Array, Int64Array, UInt8Array, first_of_run
from flexd.core.keyspace import DimGroup
from flexd.core.placement import REHOMED, RankLayout, Tier, is_rehomed, nodes_of_rehomed
from flexd.embedding.store.key_table import ABSENT, MAX_LOAD, BucketTable, is_dense, key_table

BLOCK = 64
"""Numbers of a block: one word of bits."""
_SLACK_BLOCKS = 16


class EntryPool:
    """Numbers the rows of one tier and dim-group, in blocks that each belong to one home rank.

    A row keeps its number while it is listed. Numbers depend on the sequence of changes alone, so ranks that list the
    same rows (all ranks at DEVICE, those of a rail at NODE) give them the same numbers and the same blocks, without
    sorting and without a message. The blocks of a home in ascending order are its rows in an order that all of them
    share.

    Args:
        homes: number of home ranks.
    """

    def __init__(self, homes: int) -> None:
        self._owners = np.empty(0, dtype=np.int32)
        self._free: dict[int, array[int]] = {}
        self._rows = np.zeros(homes, dtype=np.int64)
        self.blocks = 0
        """Blocks in use."""
        self.changes = 0
        """Times that the blocks, or the homes that they belong to, have changed."""

    def __len__(self) -> int:
        return int(self._rows.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the owners and of the free numbers."""
        return self._owners.nbytes + 4 * (self.blocks * BLOCK - len(self))

    @property
    def owners(self) -> Int32Array:
        """int32 [blocks] home of each block."""
        return self._owners[: self.blocks]

    def blocks_by_home(self) -> tuple[Int64Array, Int64Array]:
        """Return int64 [blocks] blocks ordered by home, and int64 [homes + 1] where the blocks of each home begin."""
        narrow = self.owners.astype(np.uint16) if len(self._rows) <= 2**16 else self.owners
        order = np.argsort(narrow, kind="stable")
        starts = np.zeros(len(self._rows) + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.owners, minlength=len(self._rows)), out=starts[1:])
        return order, starts

    def allocate(self, homes: Int64Array) -> Int32Array:
        """Return int32 [n] numbers for rows of int64 [n] homes."""
        numbers = np.empty(len(homes), dtype=np.int32)
        for home, at in _by_home(homes):
            free = self._free.setdefault(home, array("i"))
            missing = len(at) - len(free)
            if missing > 0:
                first, count = self.blocks, -(-missing // BLOCK)
                self._add_blocks(home, count)
                # In front of the others, and from the end, so that old numbers and then low ones are given first.
                free[:0] = array("i", range((first + count) * BLOCK - 1, first * BLOCK - 1, -1))
            numbers[at] = free[: -len(at) - 1 : -1]
            del free[len(free) - len(at) :]
            self._rows[home] += len(at)
        return numbers

    def release(self, numbers: Int32Array) -> None:
        """Free int32 [n] numbers, each once."""
        for home, at in _by_home(self._owners[numbers // BLOCK].astype(np.int64)):
            self._free[home].extend(numbers[at].tolist())
            self._rows[home] -= len(at)

    def compact(self) -> Int32Array | None:
        """Renumber all rows if more than half of the blocks could be saved: int32 [numbers before] -> number now, -1
        for a free one; None: nothing has changed. Takes time in proportion to the pool."""
        needed = -(-self._rows // BLOCK)
        if self.blocks <= 2 * int(needed.sum()) + _SLACK_BLOCKS:
            return None
        self.changes += 1
        used = np.ones(self.blocks * BLOCK, dtype=np.bool_)
        for free in self._free.values():
            used[np.array(free, dtype=np.int64)] = False
        before = np.flatnonzero(used)
        homes = self._owners[before // BLOCK]
        order = np.argsort(homes, kind="stable")
        first_rows, first_blocks = np.cumsum(self._rows) - self._rows, np.cumsum(needed) - needed
        of_row = homes[order]
        after = np.arange(len(order)) - first_rows[of_row] + first_blocks[of_row] * BLOCK
        moved = np.full(len(used), -1, dtype=np.int32)
        moved[before[order]] = after
        self._owners = np.repeat(np.arange(len(needed), dtype=np.int32), needed)
        self.blocks = len(self._owners)
        ends, rows = (np.cumsum(needed) * BLOCK).tolist(), self._rows.tolist()
        starts = (first_blocks * BLOCK).tolist()
        self._free = {
            home: array("i", range(end - 1, start + count - 1, -1))
            for home, (start, end, count) in enumerate(zip(starts, ends, rows, strict=True))
            if count
        }
        return moved

    def _add_blocks(self, home: int, count: int) -> None:
        self.changes += 1
        if self.blocks + count > len(self._owners):
            grown = np.empty(max(self.blocks + count, 2 * len(self._owners)), dtype=np.int32)
            grown[: self.blocks] = self._owners[: self.blocks]
            self._owners = grown
        self._owners[self.blocks : self.blocks + count] = home
        self.blocks += count


def _by_home(homes: Int64Array) -> list[tuple[int, Int64Array]]:
    """Return (home, int64 places of its rows in their order) of each home, ascending."""
    if len(homes) == 0:
        return []
    order = np.argsort(homes, kind="stable")
    ordered = homes[order]
    starts = np.flatnonzero(first_of_run(ordered))
    return list(zip(ordered[starts].tolist(), np.split(order, starts[1:]), strict=True))


# A pool's part of the entries grows by an eighth.
_GROWTH = 8


NOT_REHOMED = ABSENT
"""The place of a row that has not moved."""


def _on_device(column: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(column)).to(device)


class RehomedRows:
    """Places of re-homed rows: the slot of one that lives here, -1 - its node of one that lives elsewhere.

    Every rank has the same rows: node owners look them up, and samples are dealt by where rows are. They are no entries
    of the ``Directory``: nothing of them is synchronised.

    Args:
        max_address: no address is above it.
        node: of this rank.
    """

    def __init__(self, max_address: int, node: int, device: torch.device) -> None:
        self._node = node
        self._table = BucketTable(0, max_address, device)
        self._nowhere = torch.full((), NOT_REHOMED, dtype=torch.int32, device=device)
        self._device = device

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return self._table.nbytes + self._nowhere.nbytes

    def find(self, addresses: torch.Tensor) -> torch.Tensor:
        """int64 [n] addresses -> int32 [n] places. The host waits for nothing."""
        return self._table.values_of(addresses, self._nowhere)

    def read(self, addresses: Int64Array) -> tuple[Int64Array, Int32Array]:
        """int64 [n] addresses -> (int64 [n] nodes in which re-homed rows live, -1 for all others; int32 [n] slots of
        those that live on this rank, else -1)."""
        places = self.find(_on_device(addresses, self._device)).cpu().numpy()
        here = (places >= 0) & (places != NOT_REHOMED)
        nodes = np.where(places < 0, -1 - places.astype(np.int64), np.where(here, self._node, -1))
        return nodes, np.where(here, places, np.int32(-1)).astype(np.int32)

    def nodes_of(self, addresses: Int64Array, homes: Int64Array) -> Int64Array:
        """Return int64 [n], the nodes in which rows live, given those of their ``homes``."""
        if not len(self):
            return homes
        nodes, _ = self.read(addresses)
        return np.where(nodes >= 0, nodes, homes)

    def addresses(self) -> Int64Array:
        """Return int64 [n] addresses of all rows, ascending. Linear in the table."""
        found: Int64Array = self._table.items()[0].cpu().numpy()
        found.sort()
        return found

    def change(self, removed: Int64Array, addresses: Int64Array, slots: Int32Array, nodes: Int64Array) -> None:
        """Remove rows and add others.

        Args:
            removed: int64 [r] addresses, all of them here.
            addresses: int64 [m], not here unless removed.
            slots: int32 [m], of the rows that live on this rank; -1 for all others.
            nodes: int64 [m], where the others live.
        """
        if len(removed):
            self._table.remove(self._table.find(_on_device(removed, self._device))[1])
        if len(addresses):
            places = np.where(slots >= 0, slots, -1 - nodes).astype(np.int32)
            self._table.insert(_on_device(addresses, self._device), _on_device(places, self._device))


class Directory:
    """The NODE rows of a rank's rail and all DEVICE rows, of all dim-groups, home copies included; and, beside them,
    all rows that have moved.

    A row's *entry* is the number of a place in arrays over all listed rows: each dim-group has a range of entries, its
    NODE rows before its DEVICE rows. Each of these is an ``EntryPool``, so ranks that list the same rows have them in
    the same order, and in blocks by home. Entries are valid until the next ``change``.

    ``change`` belongs to the training thread, while no other looks rows up. ``read`` may run beside it.

    Args:
        groups: the dim-groups, in the order of their keys.
        rank: the rank whose directory it is.
        max_rows: rows for which memory is allocated at once; with more it grows, which takes long.
    """

    def __init__(
        self, groups: Sequence[DimGroup], layout: RankLayout, rank: int, max_rows: int, device: torch.device
    ) -> None:
        self.layout = layout
        self.rehomed = RehomedRows(groups[-1].end_key, layout.node_of(rank), device)
        """Not counted by ``len``, and no entries."""
        self._rank = rank
        self.groups = len(groups)
        self.device = device
        self._first_keys = np.array([group.first_key for group in groups], dtype=np.int64)
        self._table = key_table(max_rows, groups[-1].end_key, device)
        self.pools = [EntryPool(layout.world_size) for _ in range(2 * self.groups)]
        """Of each dim-group: NODE rows, DEVICE rows."""
        self.starts = [0] * (2 * self.groups + 1)
        """Entry at which each pool's range begins, and the number of entries."""
        # Slot of a NODE row in its dim-group's store, -1 - slot of a DEVICE row; 0 for a free entry, and after the
        # last one for rows that are not listed.
        self._places = torch.zeros(1, dtype=torch.int32, device=device)
        # The number of entries.
        self._nowhere = torch.zeros((), dtype=torch.int32, device=device)
        self.places_by_home: list[int] = self._places_of(np.arange(layout.world_size)).tolist()
        """Place of each home rank among all of them: those of a rail are adjacent, by node."""
        self._lock = threading.RLock()
        # After the last change; None on a CPU.
        self._changed: torch.cuda.Event | None = None
        self.version = 0
        """Number of changes so far."""

    def __len__(self) -> int:
        return len(self._table)

    @property
    def entries(self) -> int:
        """Number of entries, free ones included."""
        return self.starts[-1]

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        of_pools = sum(pool.nbytes for pool in self.pools)
        return self._table.nbytes + self._places.nbytes + self._nowhere.nbytes + of_pools + self.rehomed.nbytes

    @property
    def first_entries(self) -> list[int]:
        """Entry at which each dim-group begins, and the number of entries."""
        return self.starts[::2]

    @property
    def blocks_version(self) -> int:
        """Number of changes of the blocks of entries so far: while it is equal, so are all blocks, their homes and the
        entries at which pools begin. Most chunks give rows numbers of blocks that exist."""
        return sum(pool.changes for pool in self.pools)

    def _places_of(self, homes: Int64Array) -> Int64Array:
        nodes = homes // self.layout.local_ranks
        return (homes - nodes * self.layout.local_ranks) * self.layout.nodes + nodes

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """int64 [n] keys -> int64 [n] entries, ``entries`` for rows that are not listed. The host waits for nothing."""
        return self._table.values_of(keys, self._nowhere).to(torch.int64)

    def places_at(self, entries: torch.Tensor) -> torch.Tensor:
        """int64 [m] entries -> int32 [m] slots of NODE rows, -1 - slots of DEVICE rows; undefined for rows that are not
        listed."""
        return self._places.index_select(0, entries)

    def slots_at(self, entries: torch.Tensor) -> torch.Tensor:
        """int64 [m] entries -> int64 [m] slots in the store of their dim-group."""
        places = self._places.index_select(0, entries).to(torch.int64)
        return places ^ (places >> 63)  # -1 - place where it is negative

    def read(self, keys: Int64Array) -> tuple[UInt8Array, Int32Array]:
        """int64 [n] keys -> (uint8 [n] tiers, HOME for a row that is not listed; int32 [n] slots, -1 of a row that is
        not here). Any thread."""
        tiers, slots = np.zeros(len(keys), dtype=np.uint8), np.full(len(keys), -1, dtype=np.int32)
        with self._lock:
            if len(self) + len(self.rehomed) == 0 or len(keys) == 0:
                return tiers, slots
            if self._changed is not None:
                torch.cuda.current_stream(self.device).wait_event(self._changed)
            if len(self.rehomed):
                nodes, slots = self.rehomed.read(keys)
                tiers[nodes >= 0] = REHOMED + nodes[nodes >= 0]
            if len(self) == 0:
                return tiers, slots
            entries = self.find(torch.from_numpy(keys).to(self.device))
            # On the host before the lock is released: the training thread must not change what is still read.
            places = self.places_at(entries).cpu().numpy()
            listed = entries.cpu().numpy() < self.entries
        tiers[listed] = np.where(places[listed] < 0, Tier.DEVICE, Tier.NODE)
        slots[listed] = np.where(places[listed] < 0, -1 - places[listed], places[listed])
        return tiers, slots

    def rows(self) -> tuple[Int64Array, UInt8Array, Int32Array]:
        """Return all rows, moved ones too: int64 [n] keys, ascending, uint8 [n] tiers and int32 [n] slots. Any thread.
        Linear in the directory."""
        with self._lock:
            if self._changed is not None:
                torch.cuda.current_stream(self.device).wait_event(self._changed)
            keys = np.concatenate([self._table.items()[0].cpu().numpy(), self.rehomed.addresses()])
            keys.sort()
            return keys, *self.read(keys)

    def listed_entries(self) -> torch.Tensor:
        """Return int64 [n] entries of all rows, ascending. Linear in the directory."""
        return self._table.items()[1].to(torch.int64).sort().values

    def at_tier(self, group: int, tier: Tier) -> torch.Tensor:
        """Return int64 entries of the rows of a dim-group at NODE or DEVICE, in the same order on all ranks that list
        them."""
        pool = 2 * group + (tier == Tier.DEVICE)
        entries = self.listed_entries()
        return entries[(entries >= self.starts[pool]) & (entries < self.starts[pool + 1])]

    def change(self, removed: Int64Array, keys: Int64Array, slots: Int32Array, tiers: UInt8Array) -> None:
        """Unlist rows and list others. The host waits for the device once.

        Args:
            removed: int64 [r] keys, each once, all of them listed.
            keys: int64 [m], each once, not listed unless removed.
            slots: int32 [m].
            tiers: uint8 [m], NODE, DEVICE, or of re-homed rows.
        """
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            self.version += 1
            removed, keys, slots, tiers = self._change_moved(removed, keys, slots, tiers)
            if len(removed):
                cells = self._table.find(_on_device(removed, self.device))[1]
                pools, listed = self._numbers_of(self._table.values_at(cells).cpu().numpy())
                for pool in np.unique(pools).tolist():
                    self.pools[pool].release(listed[pools == pool])
                self._table.remove(cells)
            of_pools = 2 * (np.searchsorted(self._first_keys, keys, side="right") - 1) + (tiers == Tier.DEVICE)
            numbers = np.empty(len(keys), dtype=np.int32)
            places_of_homes = self._places_of(self.layout.home_rank(keys))
            for pool in np.unique(of_pools).tolist():
                mine = of_pools == pool
                numbers[mine] = self.pools[pool].allocate(places_of_homes[mine])
            self._make_room()
            entries = np.array(self.starts, dtype=np.int64)[of_pools] + numbers
            on_device = of_pools % 2 == 1
            places = np.where(on_device, -1 - slots, slots).astype(np.int32)
            self._table.insert(_on_device(keys, self.device), _on_device(entries.astype(np.int32), self.device))
            self._places.index_copy_(0, _on_device(entries, self.device), _on_device(places, self.device))
            self._compact()
            if self.device.type == "cuda":
                self._changed = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._changed.record()

    def _change_moved(
        self, removed: Int64Array, keys: Int64Array, slots: Int32Array, tiers: UInt8Array
    ) -> tuple[Int64Array, Int64Array, Int32Array, UInt8Array]:
        """Change the re-homed rows, and return the arguments of ``change`` without them."""
        mine = is_rehomed(tiers)
        were_moved = self.rehomed.read(removed)[0] >= 0 if len(self.rehomed) else np.zeros(len(removed), np.bool_)
        if not mine.any() and not were_moved.any():
            return removed, keys, slots, tiers
        nodes = nodes_of_rehomed(tiers[mine])
        local_ranks = self.layout.local_ranks
        is_here = nodes * local_ranks + keys[mine] % local_ranks == self._rank
        here = np.where(is_here, slots[mine], np.int32(-1)).astype(np.int32)
        self.rehomed.change(removed[were_moved], keys[mine], here, nodes)
        return removed[~were_moved], keys[~mine], slots[~mine], tiers[~mine]

    def _make_room(self) -> None:
        """Give every pool as many entries as it has numbers, and some more."""
        sizes = [end - first for first, end in zip(self.starts, self.starts[1:], strict=False)]
        needed = [pool.blocks * BLOCK for pool in self.pools]
        if all(has >= needs for has, needs in zip(sizes, needed, strict=True)):
            return
        grown = [
            has if has >= needs else needs + needs // _GROWTH // BLOCK * BLOCK
            for has, needs in zip(sizes, needed, strict=True)
        ]
        self._lay_out(grown, list(torch.split(self._places[:-1], sizes)))

    def _lay_out(self, sizes: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        places = self._places.new_zeros(sum(sizes) + 1)
        first = 0
        before, self.starts = self.starts, [0]
        for size, part in zip(sizes, parts, strict=True):
            kept = min(size, len(part))
            places[first : first + kept] = part[:kept]
            first += size
            self.starts.append(first)
        self._places = places
        self._nowhere.fill_(first)
        shifts = [after - start for after, start in zip(self.starts, before, strict=True)][:-1]
        if len(self) and any(shifts):
            bounds, of_pools = torch.tensor([before[1:-1], shifts[1:]], dtype=torch.int32, device=self.device)
            self._table.shift_values(bounds, torch.nn.functional.pad(of_pools, (1, 0)))

    def _compact(self) -> None:
        """Renumber the rows of pools that have become mostly empty. Rare, and linear in the directory."""
        for number, pool in enumerate(self.pools):
            moved = pool.compact()
            if moved is None:
                continue
            keys, values = self._table.items()
            of_pools, numbers = self._numbers_of(values.cpu().numpy())
            mine = of_pools == number
            before = numbers[mine]
            after = moved[before]
            cells = self._table.find(keys[torch.from_numpy(mine).to(self.device)])[1]
            self._table.set_values(cells, _on_device((self.starts[number] + after).astype(np.int32), self.device))
            sizes = [end - first for first, end in zip(self.starts, self.starts[1:], strict=False)]
            parts = list(torch.split(self._places[:-1], sizes))
            sizes[number] = pool.blocks * BLOCK
            own = parts[number].new_zeros(sizes[number])
            own[_on_device(after.astype(np.int64), self.device)] = parts[number][
                _on_device(before.astype(np.int64), self.device)
            ]
            parts[number] = own
            self._lay_out(sizes, parts)

    def _numbers_of(self, entries: Int32Array) -> tuple[Int64Array, Int64Array]:
        """int32 [n] entries -> (int64 [n] pool, int64 [n] number in it)."""
        starts = np.array(self.starts, dtype=np.int64)
        pools: Int64Array = np.searchsorted(starts[:-1], entries, side="right") - 1
        return pools, entries - starts[pools]


def max_listed_rows(group: DimGroup, layout: RankLayout, replica_slots: int) -> int:
    """Return the upper bound of the rows in a rank's directory, with ``replica_slots`` for the dim-group on every rank.

    A NODE row uses a slot on all but one of the N ranks of its rail. A DEVICE row uses one on all but one rank of the
    world, so on at least N - 1 ranks of a rail; with one node on all but one of the L ranks.
    """
    holders = layout.nodes if layout.nodes > 1 else layout.local_ranks
    return 0 if holders == 1 else min(group.rows, replica_slots * holders // (holders - 1))


def max_directory_bytes(max_rows: int, homes: int, groups: int, end_key: int) -> int:
    """Return the upper bound of ``Directory.nbytes``.

    Args:
        max_rows: the argument of the directory, of which no more rows are listed.
        end_key: of the last dim-group.
    """
    cells = int(max_rows / MAX_LOAD) + 4 * 8
    table = 4 * (end_key + 1) if is_dense(max_rows, end_key) else cells * (8 if end_key <= 2**31 else 12)
    # Each pool has at most twice the blocks that its rows fill, and a few.
    numbers = 2 * (max_rows + 2 * groups * homes * BLOCK) + 2 * groups * 17 * BLOCK
    return table + 8 * (37 + 4 + 1) + numbers * (4 + 4 + 1)
