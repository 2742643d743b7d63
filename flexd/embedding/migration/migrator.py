"""Applies chunks: copies promoted rows from their homes, frees the slots of demoted ones, changes the directory.

The values of promoted rows travel with the next fetch over the chain (``RowCarrier``), so they add no collective; where
none can carry them, collectives of their own copy them at once. Rows that move to another node travel over the rail,
at once (``RowMover``): what serves them next must have them already.

Chunks name keys. Directory, slots and messages go by addresses (``flexd.core.keyspace``), to which keys are mapped
here.

The agent's thread checks a chunk and prepares its slots and the rows to copy, from the directory as it is applied and
the chunks that were prepared before. The training thread changes the directory, which takes time in proportion to the
chunk, and copies rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from flexd.control.agent.inbox import Prepared
from flexd.core.arrays import BoolArray, Int32Array, Int64Array, UInt8Array, first_of_run, matches
from flexd.core.errors import PlacementError
from flexd.core.keyspace import Homes
from flexd.core.placement import Delta, Tier, is_rehomed, without_moves
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.migration.row_carrier import ChangesHomeRows, RowCarrier, RowMover
from flexd.embedding.store.store import GroupStore

# int64 [n] addresses of listed rows -> int32 [n] slots.
_SlotsOf = Callable[[Int64Array], Int32Array]


class SideStream:
    """Runs a helper thread's work on the device beside training; does nothing on a CPU.

    Without a stream of its own the thread's kernels would go to the default stream, where they and the host's reads of
    their results wait for all that training has queued. Made by the training thread; the work comes after what is
    queued there at that time. Tensors that training makes later must not be given to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def work(self) -> Iterator[None]:
        """Queue the work inside on the stream. The host's reads inside wait for this stream alone."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def finished(self) -> torch.cuda.Event | None:
        """Return an event after all work so far; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def receive(finished: torch.cuda.Event | None, tensors: Iterable[torch.Tensor]) -> None:
    """Use tensors of a ``SideStream`` on the current stream: it waits for ``finished``, the host does not.

    The allocator gives the memory of a tensor that is dropped to the stream that made it at once; recorded here, the
    memory stays until the current stream has done its work with it.
    """
    if finished is None:
        return
    stream = torch.cuda.current_stream()
    stream.wait_event(finished)
    for tensor in tensors:
        tensor.record_stream(stream)


@dataclass(eq=False)
class NextPlacement:
    """Everything that one rank needs to apply a chunk. Preparing it does not change the applied placement.

    Attributes:
        delta: the chunk, of addresses.
        digest_change: ``Delta.digest_change`` of its keys.
        version: ``Directory.version`` that it starts from.
        addresses: int64 [n] addresses of the chunk, ascending.
        was_listed: bool [n] rows that this rank lists before it.
        tiers: uint8 [n] tier at which this rank lists the row after it; HOME: not listed.
        slots: int32 [n] slots after it, of listed rows.
        free: replica slots that are free after it.
        after: the prepared chunk before; None once that is applied.
        applied: set by the training thread, after the directory has the chunk.
        blocks: the rows to copy, together those that fit the buffer: from the home to the node owners over the rail,
            then inside the node.
        finished: event after the device has prepared all of it; None on a CPU.
    """

    delta: Delta
    digest_change: int
    version: int
    addresses: Int64Array
    was_listed: BoolArray
    tiers: UInt8Array
    slots: Int32Array
    free: tuple[Int32Array, ...]
    after: NextPlacement | None
    applied: bool = False
    blocks: tuple[RowCarrier, ...] = ()
    finished: torch.cuda.Event | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Tensors that training reads once the chunk is applied."""
        for block in self.blocks:
            yield from (slots for hop in (block.over_rail, block.in_node) for group in hop for slots in group)

    @property
    def nbytes(self) -> int:
        """Bytes beside the chunk."""
        columns = (self.addresses, self.was_listed, self.tiers, self.slots, *self.free)
        return sum(column.nbytes for column in columns) + sum(slots.nbytes for slots in self.tensors())

    def slots_of(self, addresses: Int64Array) -> Int32Array:
        """int64 [m] addresses of the chunk -> int32 [m] slots after it."""
        return self.slots[np.searchsorted(self.addresses, addresses)]


def _checked(prepared: Prepared) -> NextPlacement:
    assert isinstance(prepared, NextPlacement)  # noqa: S101
    return prepared


class Migrator:
    """Applies chunks to the stores of a rank. Collective: ``ChunkInbox`` gives every rank the same chunks at a step.

    Args:
        buffer_bytes: limit on rows and state that are copied at once; more are copied block by block, so that the
            buffers do not grow with the chunk. A block has at least one row.
        changes_home_rows: called with the home slots that rows which moved away have come back to.
    """

    def __init__(
        self,
        groups: ChainGroups,
        stores: Sequence[GroupStore],
        homes: Homes,
        buffer_bytes: int,
        changes_home_rows: ChangesHomeRows | None = None,
    ) -> None:
        self._mover = RowMover(groups, stores, buffer_bytes, changes_home_rows)
        self._groups = groups
        self._homes = homes
        self._layout = groups.layout
        self._stores = list(stores)
        self._directory = self._stores[0].directory
        self._buffer_bytes = buffer_bytes
        self._device = self._stores[0].rows.device
        # Of all work but that of the training thread.
        self._side_stream = SideStream(self._device)
        self._local = groups.layout.local_rank_of(groups.rank)
        self.carrier: RowCarrier | None = None
        """Promoted rows that wait for a fetch to carry them; equally on every rank."""
        self.digest = 0
        """``Placement.digest`` of the applied placement."""
        self.max_chunk_rows = 0
        """Most rows of a chunk so far."""
        self.rehomed_rows = 0
        """Rows of all ranks that live in another node than their home; equal on every rank."""

    def copied_bytes(self, delta: Delta) -> int:
        """Return the row and state bytes that the busiest link copies for a chunk; equal on every rank."""
        by_address = self._by_address(delta)
        moves = is_rehomed(delta.old_tiers).astype(np.int64) + is_rehomed(delta.new_tiers)
        moved = sum(
            store.row_bytes * int(moves[self._in_group(store, by_address.keys)].sum()) for store in self._stores
        )
        return int(self._bytes_by_row(by_address).sum()) + moved

    def nodes_of(self, addresses: Int64Array) -> Int64Array:
        """Return int64 [n], the nodes in which rows live, in the applied placement; not while it changes."""
        return self._directory.rehomed.nodes_of(addresses, self._layout.home_node(addresses))

    def rows_at_tiers(self, keys: Int64Array, old: UInt8Array) -> BoolArray:
        """Return bool [n]: False for rows that are not at these tiers in the applied placement. Any thread.

        NODE rows of other rails are not listed here and count as HOME.
        """
        addresses = self._homes.addresses(keys)
        with self._side_stream.work():
            right: BoolArray = self._directory.read(addresses)[0] == self._listed_tiers(addresses, old)
        return right

    @torch.no_grad()
    def prepare(self, chunk: Delta, after: Prepared | None) -> NextPlacement:
        """Prepare a chunk for ``apply``. Any thread, one at a time.

        Args:
            after: the prepared chunk before; None: the chunk starts from the applied placement.

        Raises:
            PlacementError: rows of the chunk are at other tiers there. Applying it would assign slots of other rows
                twice.
        """
        before = None if after is None else _checked(after)
        delta = merge_deltas([self._by_address(chunk)])
        self.max_chunk_rows = max(self.max_chunk_rows, len(delta))
        with self._side_stream.work():
            made = self._next(chunk, delta, before)
            made.blocks = tuple(self._blocks(delta, made.slots_of))
        made.finished = self._side_stream.finished()
        return made

    def apply(self, chunks: Sequence[Prepared], *, fetch_follows: bool = False) -> None:
        """Apply chunks as one: a row is copied at most once, and one message a hop serves all chunks and dim-groups.
        Demotions free their slots before promotions use them.

        Args:
            fetch_follows: a fetch over node and rail follows, which can carry the rows. More rows than the buffer holds
                are copied at once.

        Raises:
            PlacementError: they were prepared for another placement; nothing has been changed.
        """
        prepared = [_checked(one) for one in chunks]
        directory = self._directory
        if [one.version for one in prepared] != list(range(directory.version, directory.version + len(prepared))):
            raise PlacementError(
                f"rank {self._groups.rank}: chunks were prepared for another placement than the one that is applied",
                remedy="a fault of flexd: please report it",
            )
        last = prepared[-1]
        changed_rows = np.unique(np.concatenate([one.delta.keys for one in prepared]))
        self._move(changed_rows, home=True)
        for one in prepared:
            stays = one.tiers != Tier.HOME
            directory.change(one.addresses[one.was_listed], one.addresses[stays], one.slots[stays], one.tiers[stays])
        for one in prepared:
            one.applied, one.after = True, None
        for one in prepared:
            receive(one.finished, one.tensors())
        deltas = [one.delta for one in prepared]
        self._fill_slots(last.free, changed_rows)
        blocks = last.blocks
        if len(prepared) > 1:
            blocks = tuple(self._blocks(merge_deltas([_of_copies(delta) for delta in deltas]), self._applied_slots))
        if fetch_follows and len(blocks) == 1:
            self.carrier = blocks[0]
        else:
            for block in blocks:
                block.carry()
        self._move(changed_rows, home=False)
        for delta in deltas:
            self.rehomed_rows += int(is_rehomed(delta.new_tiers).sum()) - int(is_rehomed(delta.old_tiers).sum())
        for one in prepared:
            self.digest = (self.digest + one.digest_change) % 2**64

    def _move(self, addresses: Int64Array, *, home: bool) -> None:
        """Collective. Copy those of these rows that have moved to their home slots, or from these to where they
        live."""
        if len(self._directory.rehomed):
            tiers, slots = self._directory.read(addresses)
            self._mover.move(addresses, slots, tiers, home=home)

    def bring_home(self) -> None:
        """Collective. Make the home slots of all re-homed rows current. They go on living where they are."""
        self._move(self._directory.rehomed.addresses(), home=True)

    def list_copied_tables(self) -> bool:
        """List the rows of tables that have copies on every rank by their sharding type; return whether there are any.

        It is no chunk: plans do not know these copies, and ``refresh`` gives them their values.
        """
        addresses = np.sort(self._homes.addresses(self._homes.copied_keys))
        if self._layout.world_size == 1 or len(addresses) == 0:
            return False
        self._list(addresses, np.full_like(addresses, Tier.DEVICE, np.uint8))
        return True

    def list_as(self, other: Migrator) -> None:
        """List the rows that another one lists, which has them in other dim-groups. ``refresh`` gives copies and
        re-homed rows their values."""
        found, tiers, _ = other._directory.rows()
        addresses = self._homes.addresses(other._homes.keys(found))
        order = np.argsort(addresses)
        if len(order):
            self._list(addresses[order], tiers[order])
        self.digest, self.rehomed_rows = other.digest, other.rehomed_rows
        self.max_chunk_rows = other.max_chunk_rows

    def _list(self, addresses: Int64Array, tiers: UInt8Array) -> None:
        """List int64 [n] ascending addresses of rows that are not listed."""
        delta = Delta(addresses, np.zeros_like(tiers), tiers)
        made = self._next(delta, delta, None)
        self._directory.change(np.empty(0, np.int64), addresses, made.slots, made.tiers)
        self._fill_slots(made.free, addresses)

    def _fill_slots(self, free: Sequence[Int32Array], addresses: Int64Array) -> None:
        """Set the free slots of each dim-group, and record the addresses of rows whose slots have changed."""
        for store, of_group in zip(self._stores, free, strict=True):
            store.free = of_group
            if len(store.replica_addresses):
                changed = addresses[self._in_group(store, addresses)]
                store.record_addresses(torch.from_numpy(changed).to(self._device))

    def complete(self) -> None:
        """Collective. Copy the promoted rows that no fetch has carried."""
        if self.carrier is not None:
            carrier, self.carrier = self.carrier, None
            carrier.carry()

    def refresh(self) -> None:
        """Collective. Refresh every replica, and every re-homed row, from its home, after the home rows were loaded."""
        addresses, tiers, _ = self._directory.rows()
        self._move(addresses[is_rehomed(tiers)], home=False)
        for store in self._stores:
            for tier in (Tier.NODE, Tier.DEVICE):
                # One tier at a time: all ranks of a collective list the same rows of it, so their blocks are the same.
                at = addresses[(tiers == tier) & self._in_group(store, addresses)]
                delta = Delta(at, np.zeros(len(at), np.uint8), np.full(len(at), tier, np.uint8))
                for block in self._blocks(delta, self._applied_slots):
                    block.carry()

    def placement(self) -> tuple[Int64Array, UInt8Array]:
        """Return this rank's part of the placement: (int64 keys, ascending, and uint8 tiers) of its rail's NODE rows,
        all DEVICE rows that chunks have listed, and the re-homed rows of its rail. Any thread."""
        with self._side_stream.work():
            addresses, tiers, _ = self._directory.rows()
        mine = ~is_rehomed(tiers) | (addresses % self._layout.local_ranks == self._local)
        addresses, tiers = addresses[mine], tiers[mine]
        keys = self._homes.keys(addresses)
        order = np.argsort(keys)
        order = order[~np.isin(keys[order], self._homes.copied_keys, assume_unique=True)]
        return keys[order], tiers[order]

    def _by_address(self, delta: Delta) -> Delta:
        return Delta(self._homes.addresses(delta.keys), delta.old_tiers, delta.new_tiers)

    @staticmethod
    def _in_group(store: GroupStore, addresses: Int64Array) -> BoolArray:
        inside: BoolArray = (addresses >= store.group.first_key) & (addresses < store.group.end_key)
        return inside

    def _bytes_by_row(self, delta: Delta) -> Int64Array:
        """Return int64 [n] bytes of each row and state that is copied; equal on every rank."""
        cost = np.zeros(len(delta), dtype=np.int64)
        promoted = without_moves(delta.new_tiers) > without_moves(delta.old_tiers)
        for store in self._stores:
            cost[promoted & self._in_group(store, delta.keys)] = store.row_bytes
        return cost

    def _listed_tiers(self, addresses: Int64Array, tiers: UInt8Array) -> UInt8Array:
        """Return uint8 [n]: the tiers of the rows that this rank's directory lists, HOME for the others. With one node
        NODE rows have no copies."""
        on_rail = (tiers == Tier.NODE) & (addresses % self._layout.local_ranks == self._local)
        on_rail = (on_rail | is_rehomed(tiers)) & (self._layout.nodes > 1)
        listed = on_rail | ((tiers == Tier.DEVICE) & (self._layout.world_size > 1))
        return np.where(listed, tiers, np.uint8(Tier.HOME)).astype(np.uint8)

    def _applied_slots(self, addresses: Int64Array) -> Int32Array:
        return self._directory.read(addresses)[1]

    def _read(self, addresses: Int64Array, after: NextPlacement | None) -> tuple[UInt8Array, Int32Array]:
        """Return what ``Directory.read`` returns once ``after`` and the chunks before it are applied."""
        # First the chunks that are not applied, then the directory: one that is applied meanwhile is in both.
        waiting: list[NextPlacement] = []
        while after is not None and not after.applied:
            waiting.append(after)
            after = after.after
        tiers, slots = self._directory.read(addresses)
        for one in reversed(waiting):
            changed, at = matches(one.addresses, addresses)
            tiers[changed], slots[changed] = one.tiers[at], one.slots[at]
        return tiers, slots

    def _next(self, chunk: Delta, delta: Delta, after: NextPlacement | None) -> NextPlacement:
        """Check a chunk, and assign its slots. The new replicas are not copied yet."""
        addresses, old, new = delta.keys, delta.old_tiers, delta.new_tiers
        before, slots = self._read(addresses, after)
        right = before == self._listed_tiers(addresses, old)
        rank = self._groups.rank
        if not bool(right.all()):
            raise PlacementError(
                f"rank {rank}: {int((~right).sum())} rows of a chunk of {len(right)} are not at the tier "
                f"that it states, key {int(self._homes.keys(addresses[~right])[0])} for one",
                remedy="a fault of the daemon: please report it with the daemon's journal",
            )
        tiers = self._listed_tiers(addresses, new)
        had_replica = self._layout.holds_replica(rank, addresses, old)
        has_replica = self._layout.holds_replica(rank, addresses, new)
        at_home = self._layout.home_rank(addresses) == rank
        free = []
        for number, store in enumerate(self._stores):
            mine = self._in_group(store, addresses)
            slots_left = store.free if after is None else after.free[number]
            if mine.any():
                slots_left = np.concatenate([slots_left, slots[mine & had_replica & ~has_replica]])
                fresh = mine & has_replica & ~had_replica
                slots_left, slots[fresh] = np.split(slots_left, [len(slots_left) - int(fresh.sum())])
                home = mine & at_home
                slots[home] = (addresses[home] - store.first_home_address) // store.world_size
            free.append(slots_left)
        version = self._directory.version if after is None else after.version + 1
        digest_change = chunk.digest_change()
        return NextPlacement(
            delta, digest_change, version, addresses, before != Tier.HOME, tiers, slots, tuple(free), after
        )

    def _blocks(self, delta: Delta, slots_of: _SlotsOf) -> Iterator[RowCarrier]:
        """Divide the promoted rows of a delta into blocks that fit the buffer."""
        delta = _of_copies(delta)
        travels = self._bytes_by_row(delta)
        before = np.cumsum(travels) - travels
        widest = max((store.row_bytes for store in self._stores), default=1)
        room = max(widest, self._buffer_bytes - widest + 1)
        bounds = np.searchsorted(before, np.arange(0, int(travels.sum()), room), side="left")
        for start, end in pairwise([*np.unique(bounds).tolist(), len(delta)]):
            if end > start:
                yield self._block(delta.select(slice(start, end)), slots_of)

    def _block(self, block: Delta, slots_of: _SlotsOf) -> RowCarrier:
        layout, peers = self._layout, self._groups
        over_rail, in_node = [], []
        for store in self._stores:
            mine = self._in_group(store, block.keys)
            addresses, old, new = block.keys[mine], block.old_tiers[mine], block.new_tiers[mine]
            promoted = (old == Tier.HOME) & (new != Tier.HOME)
            of_rail = addresses[promoted & (addresses % layout.local_ranks == self._local)]
            over_rail.append(self._slots(slots_of(of_rail), layout.home_node(of_rail), peers.rail.size))
            of_node = addresses[(old != Tier.DEVICE) & (new == Tier.DEVICE)]
            in_node.append(self._slots(slots_of(of_node), of_node % layout.local_ranks, peers.node.size))
        return RowCarrier(self._groups, self._stores, over_rail, in_node)

    def _slots(self, slots: Int32Array, owner: Int64Array, peers: int) -> tuple[torch.Tensor, ...]:
        """Order int32 [n] slots by the peer that sends each row, and split them."""
        ordered = torch.from_numpy(slots[np.argsort(owner, kind="stable")].astype(np.int64)).to(self._device)
        return torch.split(ordered, np.bincount(owner, minlength=peers).tolist())


def _of_copies(delta: Delta) -> Delta:
    """Return a delta with re-homed rows at HOME: where they get copies these are made from the home slots."""
    return Delta(delta.keys, without_moves(delta.old_tiers), without_moves(delta.new_tiers))


def merge_deltas(deltas: Sequence[Delta]) -> Delta:
    """Merge deltas applied in order into one: each row once, ascending, at its tier after the last.

    Its tier before is its lowest on the way: a row that is demoted and promoted again gets another slot and is copied.
    """
    keys = np.concatenate([delta.keys for delta in deltas])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(first_of_run(keys))
    if len(first) == 0:
        return Delta.empty()
    last = np.concatenate([first[1:], [len(keys)]]) - 1
    old = np.concatenate([delta.old_tiers for delta in deltas])[order]
    new = np.concatenate([delta.new_tiers for delta in deltas])[order]
    return Delta(keys[first], np.minimum.reduceat(old, first), new[last])
