"""Memory of a rank, by part: current bytes counted on the live tensors, and upper bounds by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch

from flexd.control.agent.inbox import PREPARED_BYTES, PREPARED_CHUNKS
from flexd.core.keyspace import DimGroup
from flexd.core.layout import RankLayout
from flexd.embedding import devices
from flexd.embedding.store.store import GroupStore

DIRECTORY_BYTES_PER_ROW = 12
DIRECTORY_BYTES_PER_ROW_OF_LARGE_GROUP = 16
"""For a dim-group of more than 2^31 rows, whose keys need 8 bytes."""
_LISTING_BYTES_PER_ROW = 8
"""For a row whose tier differs from that of its neighbours, in the trainer's exchange and in the run-ahead exchange."""
_JOINED_BYTES_PER_ROW = 24
"""Joined directories of several dim-groups (``ListedRows``), in the same two exchanges."""
_INDEX_BYTES_PER_ROW = 48
"""Entries by bit on an accelerator (``SyncList.index``): three lists of each of two hops, in both exchanges."""
_MERGE_BYTES_PER_ROW = 2
"""Two masks over the rows of a directory while a chunk is merged into it, beside the next directory."""
_SECTION_BYTES = 32
"""Rounding of the two sections of a dim-group in a block."""
_SLOT_BYTES_PER_ROW = 32
"""Source and target slots of the rows of a prepared chunk: 8 bytes on each hop, and as much for its own columns."""
_CHUNK_BYTES_PER_ROW = 256
"""Keys, tiers, orders, slots and masks of the rows of a chunk while it is applied."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, without the activations of the model.

    Attributes:
        home_bytes: home rows with optimizer state; allocated once.
        replica_bytes: all replica slots with optimizer state; allocated once.
        free_list_bytes: free lists of the replica slots, in host memory; allocated once.
        directory_bytes: directories of the listed rows, now.
        max_directory_bytes: directories with every replica slot of the job in use, joined if there are several, and the
            lists by which replicas are synchronised.
        working_bytes: tables that find distinct rows without sorting, keys of the replica slots of half-precision
            tables and the marks of ``flexd.prefetch``, which are allocated once; and joined directories and lists for
            the synchronisation of replicas, now.
        prepared_bytes: next directories and slots of the chunks that are prepared and not applied, now.
        max_prepared_bytes: the same for as many chunks as are prepared ahead, with every replica slot in use.
        pending_bytes: routes and gradients of the passes that wait for ``optimizer.step``, and those of
            ``flexd.prefetch``, now.
        waiting_bytes: chunks received and not applied, in host memory, now; the daemon sends at most
            ``control.window_chunks`` of ``control.chunk_rows``.
        max_migration_bytes: while chunks are applied, the next directory and the buffers of one block of copied rows,
            if all of them have one home. For evenly spread homes the buffers take two blocks.
    """

    home_bytes: int
    replica_bytes: int
    free_list_bytes: int
    directory_bytes: int
    max_directory_bytes: int
    working_bytes: int
    prepared_bytes: int
    max_prepared_bytes: int
    pending_bytes: int
    waiting_bytes: int
    max_migration_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Bytes that stay between steps, now."""
        return (
            self.home_bytes + self.replica_bytes + self.free_list_bytes + self.directory_bytes + self.working_bytes
            + self.prepared_bytes
        )  # fmt: skip

    @property
    def budget_bytes(self) -> int:
        """Upper bound of the bytes of rows, directory and migrations, for any chunks that the daemon sends."""
        return (
            self.home_bytes
            + self.replica_bytes
            + self.free_list_bytes
            + self.max_directory_bytes
            + self.working_bytes
            + self.max_prepared_bytes
            + self.max_migration_bytes
        )

    def to_dict(self) -> dict[str, int]:
        """Return all fields and sums as JSON values."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return named | {"stored_bytes": self.stored_bytes, "budget_bytes": self.budget_bytes}


def max_listed_rows(group: DimGroup, layout: RankLayout, replica_slots: int) -> int:
    """Return the upper bound of the rows in a rank's directory, with ``replica_slots`` for the dim-group on every rank.

    A NODE row uses a slot on all but one of the N ranks of its rail. A DEVICE row uses one on all but one rank of the
    world, so on at least N - 1 ranks of a rail; with one node on all but one of the L ranks.
    """
    holders = layout.nodes if layout.nodes > 1 else layout.local_ranks
    return 0 if holders == 1 else min(group.rows, replica_slots * holders // (holders - 1))


def iterate_tensors(held: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested sequences, mappings, dataclasses and plain objects of this package."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, Mapping):
        for value in held.values():
            yield from iterate_tensors(value)
    elif isinstance(held, list | tuple):
        for value in held:
            yield from iterate_tensors(value)
    elif is_dataclass(held) or type(held).__module__.startswith("flexd."):
        yield from iterate_tensors(vars(held))


def rank_memory(
    stores: Sequence[GroupStore],
    layout: RankLayout,
    buffer_bytes: int,
    chunk_rows: int,
    pending: object,
    waiting_bytes: int,
    working_bytes: int,
    prepared_bytes: int,
) -> RankMemory:
    """Return the memory of the rank with these dim-groups.

    Args:
        buffer_bytes: size of one block of copied rows.
        chunk_rows: largest number of rows of one step's chunks so far.
        working_bytes, prepared_bytes: see ``RankMemory``.
        pending: objects that waiting passes hold; a storage that occurs twice is counted once.
    """
    directory = at_most = lists = merge = given = 0
    for store in stores:
        listed = max_listed_rows(store.group, layout, store.replica_slots)
        wide = store.group.rows > 2**31
        row = DIRECTORY_BYTES_PER_ROW_OF_LARGE_GROUP if wide else DIRECTORY_BYTES_PER_ROW
        directory += store.directory.nbytes
        at_most += listed * row
        lists += listed * (
            _LISTING_BYTES_PER_ROW
            + (_JOINED_BYTES_PER_ROW if len(stores) > 1 else 0)
            + (0 if devices.in_host_memory(store.rows) else _INDEX_BYTES_PER_ROW)
        )
        given += 4 * store.replica_slots
        # One dim-group after another makes its next directory, with one column of the old one beside it.
        merge = max(merge, listed * (row + (8 if wide else 4) + _MERGE_BYTES_PER_ROW))
    widest = max(store.row_bytes for store in stores)
    block = max(buffer_bytes, 2 * widest)
    # One rank's part of an all-gather and the parts of all ranks; a world of one rank copies nothing.
    parts = 0 if layout.world_size == 1 else 1 + max(layout.nodes, layout.local_ranks)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in iterate_tensors(pending)
    }
    return RankMemory(
        home_bytes=sum(store.home_rows * store.row_bytes for store in stores),
        replica_bytes=sum(store.replica_slots * store.row_bytes for store in stores),
        free_list_bytes=sum(4 * store.replica_slots for store in stores),
        directory_bytes=directory,
        max_directory_bytes=at_most + lists,
        working_bytes=working_bytes,
        prepared_bytes=prepared_bytes,
        max_prepared_bytes=max(PREPARED_CHUNKS * (at_most + given), PREPARED_BYTES)
        + (PREPARED_CHUNKS + 1) * chunk_rows * _SLOT_BYTES_PER_ROW,
        pending_bytes=sum(storages.values()),
        waiting_bytes=waiting_bytes,
        max_migration_bytes=merge + (block + _SECTION_BYTES * len(stores)) * parts + chunk_rows * _CHUNK_BYTES_PER_ROW,
    )
