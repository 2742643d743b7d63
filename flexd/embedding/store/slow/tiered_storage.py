"""How a rank divides its rows over fast and slow memory, and where the cold ones are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from flexd.core.errors import EmbeddingError, SlowMemoryError
from flexd.core.fast_memory import CACHE_SLOT_BYTES, proportional_cache_slots
from flexd.core.homes import Homes
from flexd.core.keyspace import DimGroup, KeySpace, state_columns
from flexd.core.layout import RankLayout
from flexd.embedding.row_optimizers import RowOptimizer
from flexd.embedding.store.initial_values import fill_initial_rows
from flexd.embedding.store.slow.cache_slot_division import CacheSlotDivision
from flexd.embedding.store.slow.cold_rows import ColdRows
from flexd.embedding.store.slow.file_rows import FileRows
from flexd.embedding.store.slow.host_rows import HostRows
from flexd.embedding.store.slow.log_rows import INDEX_BYTES, LogRows
from flexd.embedding.store.slow.tier import Tier
from flexd.embedding.store.store import TORCH_DTYPES, GroupStore

MAX_INDEX_SHARE = 1 / 4
"""Of fast memory, for the index of cold rows; rows of larger tables have fixed places in their file instead."""


@dataclass(frozen=True)
class TieredStorage:
    """Settings of a rank's fast and slow memory. Ranks may differ in them.

    Attributes:
        fast_memory_bytes: of home rows in fast memory on each rank, with optimizer state and what finds them.
        directory: of the files of cold rows; None: they are in host memory.
    """

    fast_memory_bytes: int
    directory: Path | None = None

    @classmethod
    def of(
        cls, fast_memory_bytes: int | None, directory: str | os.PathLike[str] | None, optimizers: Sequence[RowOptimizer]
    ) -> TieredStorage | None:
        """Return None for rows that are all fast.

        Raises:
            EmbeddingError: no bytes, a directory for rows that are all fast, or an optimizer that moves all rows.
        """
        if fast_memory_bytes is None:
            if directory is not None:
                raise EmbeddingError(
                    "slow_memory_dir without fast_memory_bytes", remedy="give fast_memory_bytes, the limit of a rank"
                )
            return None
        if fast_memory_bytes < 1:
            raise EmbeddingError(f"fast_memory_bytes={fast_memory_bytes}", remedy="give at least the bytes of a row")
        everything = [type(each).__name__ for each in optimizers if each.moves_all_rows]
        if everything:
            raise EmbeddingError(
                f"fast_memory_bytes with {everything[0]}, which reads and writes every row at every step",
                remedy="use flexd.Adam, or leave all rows in fast memory",
            )
        return cls(fast_memory_bytes, None if directory is None else Path(directory))

    def cache_slots(self, groups: Sequence[DimGroup], layout: RankLayout) -> list[int]:
        """Return the cache slots of each dim-group, in proportion to the bytes of its rows; at least one each.

        What an index of the cold rows takes is not given to cache slots.
        """
        row_bytes = [_row_bytes(group) + CACHE_SLOT_BYTES for group in groups]
        rows = [-(-(group.end_key - group.first_key) // layout.world_size) for group in groups]
        index = INDEX_BYTES * sum(rows) if self._has_index(rows) else 0
        return proportional_cache_slots(self.fast_memory_bytes - index, rows, row_bytes)

    def division(self, stores: Sequence[GroupStore]) -> list[CacheSlotDivision]:
        """Return what divides the cache slots between dim-groups step by step; none where fewer than two have some."""
        division = CacheSlotDivision.of(stores)
        return [] if division is None else [division]

    def _has_index(self, home_rows: Sequence[int]) -> bool:
        """Return whether cold rows of a file are found by an index: where it takes a quarter of fast memory at most."""
        return self.directory is not None and INDEX_BYTES * sum(home_rows) <= self.fast_memory_bytes * MAX_INDEX_SHARE

    def begin(
        self,
        stores: Sequence[GroupStore],
        number: int,
        make: InitialRows,
        first_slots: torch.Tensor,
        of_tables: torch.Tensor,
    ) -> None:
        """Let the home rows of a dim-group begin with their initial values.

        Args:
            stores: of all dim-groups.
            number: of the dim-group.
            make: their initial values.
            first_slots, of_tables: as ``first_home_slots``.

        Raises:
            SlowMemoryError: the file cannot be made.
        """
        store = stores[number]
        if store.tier is not None:
            has_index = self._has_index([each.home_rows for each in stores])
            make_slow = partial(self._slow_rows, store, store.tier, number, make, has_index)
            store.tier.begin(make_slow, len(store.group.tables), first_slots, of_tables)

    def _slow_rows(self, store: GroupStore, tier: Tier, number: int, make: InitialRows, has_index: bool) -> ColdRows:
        fresh = tier.packed_fresh(make)
        if self.directory is None:
            return HostRows(store.home_rows, tier.packed_bytes, fresh, pinned=store.rows.device.type == "cuda")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SlowMemoryError(
                f"{self.directory}: cannot be made: {error.strerror}", remedy="give slow_memory_dir a path to write"
            ) from error
        path = self.directory / f"rank{store.rank}.group{number}.rows"
        of_file = LogRows if has_index else FileRows
        return of_file(path, store.home_rows, tier.packed_bytes, fresh)


InitialRows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""int64 [n] slots -> ([n, dim] rows, [n, s] state), in host memory."""


def first_home_slots(store: GroupStore, homes: Homes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [r] ascending first slots of the home rows of each table of a dim-group that has any on this rank,
    and int64 [r] the number of the table in the dim-group. The first is slot 0, also if rows have left it."""
    runs = [homes.run(table, store.rank) for table in store.group.tables]
    found = sorted((run.first_slot, number) for number, run in enumerate(runs) if run.rows)
    if not found or found[0][0] > 0:
        found.insert(0, (0, found[0][1] if found else 0))
    first_slots, of_tables = torch.tensor(found, dtype=torch.int64).unbind(1)
    return first_slots.contiguous(), of_tables.contiguous()


def initial_rows_of(
    store: GroupStore, keyspace: KeySpace, scales: Sequence[float], seed: int, state: float
) -> InitialRows:
    """Return what makes the initial values of home rows, those that ``RowEngine.initialise`` gives them."""
    group = store.group
    floats, dtype = store.state.shape[1], store.state.dtype
    first_keys = torch.tensor([int(keyspace.first_key[table]) for table in group.tables])

    def make(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.empty((len(slots), group.dim), dtype=TORCH_DTYPES[group.dtype])
        addresses = slots * store.world_size + store.first_home_address
        keys = addresses if store.homes is None else torch.from_numpy(store.homes.homes.keys(addresses.numpy()))
        of_table = torch.searchsorted(first_keys, keys, right=True) - 1
        for at in np.unique(of_table.numpy()).tolist():
            table = group.tables[at]
            here = (of_table == at).nonzero().view(-1)
            part = rows.new_empty((len(here), group.dim))
            fill_initial_rows(
                part, keyspace.tables[table].name, keys.index_select(0, here) - first_keys[at],
                scale=scales[table], seed=seed,
            )  # fmt: skip
            rows.index_copy_(0, here, part)
        return rows, torch.full((len(slots), floats), state, dtype=dtype)

    return make


def _row_bytes(group: DimGroup) -> int:
    dtype = TORCH_DTYPES[group.dtype]
    floats = sum(state_columns(group.optimizer, group.dim).values())
    return group.dim * dtype.itemsize + floats * (8 if dtype == torch.float64 else 4)
