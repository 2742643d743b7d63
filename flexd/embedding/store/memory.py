"""Memory of a rank, by part: current bytes counted on the live tensors, and upper bounds by arithmetic."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass

import torch

from flexd.control.agent.inbox import PREPARED_BYTES, PREPARED_CHUNKS
from flexd.core.placement import RankLayout
from flexd.embedding.store.directory import BLOCK, max_directory_bytes, max_listed_rows
from flexd.embedding.store.store import GroupStore

# Of a block of entries in a list of rows that are synchronised (``SyncList``), in two exchanges: the trainer's and
# that of the prefetch pipeline.
_LIST_BYTES_PER_BLOCK = 32
# Keys and numbers of all rows while a directory that has become mostly empty is renumbered.
_COMPACTION_BYTES_PER_ROW = 64
# Rounding of the two sections of a dim-group in a block.
_SECTION_BYTES = 32
# Source and target slots of the rows of a prepared chunk: 8 bytes on each hop, and as much for its own columns.
_SLOT_BYTES_PER_ROW = 48
# Keys, tiers, orders, slots and masks of the rows of a chunk while it is applied.
_CHUNK_BYTES_PER_ROW = 256


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, without the activations of the model.

    Attributes:
        home_bytes: home rows with optimizer state; allocated once. Where they are in tiered storage, the cache slots,
            what finds rows in them, and the index and buffers of slow memory.
        replica_bytes: all replica slots with optimizer state; allocated once.
        free_list_bytes: free lists of the replica slots, in host memory; allocated once.
        directory_bytes: the directory of the listed rows, now; most of it is allocated once.
        max_directory_bytes: the directory with every replica slot of the job in use, the lists by which replicas are
            synchronised, and what finds re-homed rows, as large as it is now.
        working_bytes: tables that find distinct rows without sorting, keys of the replica slots of half-precision
            tables and the marks of ``flexd.prefetch``, which are allocated once; and lists for the synchronisation of
            replicas and a number for each requested row, now.
        prepared_bytes: slots and tiers of the chunks that are prepared and not applied, now.
        max_prepared_bytes: the same for as many chunks as are prepared ahead, with every replica slot in use.
        pending_bytes: routes and gradients of the passes that wait for ``optimizer.step``, and those of
            ``flexd.prefetch``, now.
        waiting_bytes: chunks received and not applied, in host memory, now; the daemon sends at most
            ``control.window_chunks`` of ``control.chunk_rows``.
        max_migration_bytes: while chunks are applied, the renumbering of the directory and the buffers of one block of
            copied rows, if all of them have one home. For evenly spread homes the buffers take two blocks.
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


def storages_of(held: object) -> dict[int, int]:
    """Return the bytes of each storage that tensors of ``held`` are in: one that occurs twice counts once."""
    storages = (tensor.untyped_storage() for tensor in iterate_tensors(held))
    return {storage._cdata: storage.nbytes() for storage in storages}


def rank_memory(
    stores: Sequence[GroupStore],
    layout: RankLayout,
    buffer_bytes: int,
    chunk_rows: int,
    pending: object,
    waiting_bytes: int,
    working: object,
    prepared_bytes: int,
) -> RankMemory:
    """Return the memory of the rank with these dim-groups.

    Args:
        buffer_bytes: size of one block of copied rows.
        chunk_rows: largest number of rows of one step's chunks so far.
        working, prepared_bytes: see ``RankMemory``; ``working`` are objects whose tensors are counted, but for rows,
            directories and homes of ``stores``.
        pending: objects that waiting passes hold.
    """
    max_rows = sum(max_listed_rows(store.group, layout, store.replica_slots) for store in stores)
    world, groups = layout.world_size, len(stores)
    at_most = max_directory_bytes(max_rows, world, groups, stores[-1].group.end_key)
    blocks = 2 * (max_rows // BLOCK + 2 * groups * (world + 17))
    # One list upwards and one across a hop has a row once, one downwards once per peer.
    lists = _LIST_BYTES_PER_BLOCK * blocks * (4 + layout.nodes + layout.local_ranks) if max_rows else 0
    free_list_bytes = sum(4 * store.replica_slots for store in stores)
    block = max(buffer_bytes, 2 * max(store.row_bytes for store in stores))
    # One rank's part of an all-gather and the parts of all ranks; a world of one rank copies nothing.
    parts = 0 if layout.world_size == 1 else 1 + max(layout.nodes, layout.local_ranks)
    known = storages_of([(store.rows, store.state, store.tier, store.directory, store.homes) for store in stores])
    working_bytes = sum(nbytes for storage, nbytes in storages_of(working).items() if storage not in known)
    return RankMemory(
        home_bytes=sum(
            store.home_rows * store.row_bytes
            if store.tier is None
            else store.tier.cache_slots * store.row_bytes + store.tier.table_nbytes
            for store in stores
        ),
        replica_bytes=sum(store.replica_slots * store.row_bytes for store in stores),
        free_list_bytes=free_list_bytes,
        directory_bytes=stores[0].directory.nbytes,
        max_directory_bytes=at_most + lists + stores[0].directory.rehomed.nbytes,
        working_bytes=working_bytes,
        prepared_bytes=prepared_bytes,
        max_prepared_bytes=max(PREPARED_CHUNKS * free_list_bytes, PREPARED_BYTES)
        + (PREPARED_CHUNKS + 1) * chunk_rows * _SLOT_BYTES_PER_ROW,
        pending_bytes=sum(storages_of(pending).values()),
        waiting_bytes=waiting_bytes,
        max_migration_bytes=max_rows * _COMPACTION_BYTES_PER_ROW
        + (block + _SECTION_BYTES * len(stores)) * parts
        + chunk_rows * _CHUNK_BYTES_PER_ROW,
    )
