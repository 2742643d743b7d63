"""The division of a rank's rows over fast and slow memory, where the cold ones are, and what happened there."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from flexd.control.protocol.report import SlowMemoryReport, SlowTableReport, named_tables
from flexd.core.errors import EmbeddingError, SlowMemoryError
from flexd.core.keyspace import DimGroup, Homes
from flexd.core.placement import RankLayout
from flexd.embedding.devices import packed
from flexd.embedding.row_hashes import fill_initial_rows
from flexd.embedding.row_optimizers import RowOptimizer, RowUpdate
from flexd.embedding.step import StepMoments
from flexd.embedding.store.slow.cold_rows import ColdRows, FreshRows, HostRows, SlowTraffic
from flexd.embedding.store.slow.fast_memory import (
    CACHE_SLOT_BYTES,
    divide_cache_slots,
    proportional_cache_slots,
    total_misses,
)
from flexd.embedding.store.slow.file_rows import FileRows
from flexd.embedding.store.slow.log_rows import INDEX_BYTES, LogRows
from flexd.embedding.store.slow.tiered_rows import COUNT_BYTES, CacheSlotCounts, TieredRows, with_counts
from flexd.embedding.store.store import TORCH_DTYPES, GroupStore

if TYPE_CHECKING:
    from flexd.embedding.rank_rows import RankRows

logger = logging.getLogger(__name__)

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
        slow = [(store.tier, store.row_bytes + CACHE_SLOT_BYTES) for store in stores if store.tier is not None]
        return [CacheSlotDivision([tier for tier, _ in slow], [size for _, size in slow])] if len(slow) > 1 else []

    def _has_index(self, home_rows: Sequence[int]) -> bool:
        """Return whether cold rows of a file are found by an index: where it takes a quarter of fast memory at most."""
        return self.directory is not None and INDEX_BYTES * sum(home_rows) <= self.fast_memory_bytes * MAX_INDEX_SHARE

    def begin(
        self, stores: Sequence[GroupStore], number: int, scales: Sequence[float], seed: int, state: float,
        names: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Let the home rows of a dim-group begin with the initial values that ``RowEngine.initialise`` gives them.

        Args:
            stores: of all dim-groups.
            names: of files that are in use.

        Raises:
            SlowMemoryError: the file cannot be made.
        """
        store = stores[number]
        if store.tier is not None:
            state_like = store.state.shape[1], store.state.dtype
            fresh = partial(
                _initial_rows, store.homes.homes, store.first_home_address, (store.group.width, store.dtype),
                state_like, scales, seed, state,
            )  # fmt: skip
            has_index = self._has_index([each.home_rows for each in stores])
            first_slots, of_tables = first_home_slots(store)
            counts = CacheSlotCounts(store.rows.device, first_slots, of_tables, len(store.group.tables))
            own = f"rank{store.rank}.group{number}"
            numbered = (f"{own}.{again}.rows" if again else f"{own}.rows" for again in count())
            store.tier.name = store.tier.name or next(name for name in numbered if name not in names)
            row_bytes = store.tier.row_bytes + COUNT_BYTES
            store.tier.begin(partial(self._cold_rows, store.tier.name, store, row_bytes, fresh, has_index), counts)

    def _cold_rows(self, name: str, store: GroupStore, row_bytes: int, fresh: FreshRows, has_index: bool) -> ColdRows:
        if self.directory is None:
            return HostRows(store.home_rows, row_bytes, fresh, pinned=store.rows.device.type == "cuda")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SlowMemoryError(
                f"{self.directory}: cannot be made: {error.strerror}", remedy="give slow_memory_dir a path to write"
            ) from error
        of_file = LogRows if has_index else FileRows
        return of_file(self.directory / name, store.home_rows, row_bytes, fresh)


def first_home_slots(store: GroupStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [r] ascending first slots of the home rows of each table of a dim-group that has any on this rank,
    and int64 [r] the number of the table in the dim-group. The first is slot 0, also if rows have left it."""
    runs = [store.homes.homes.run(table, store.rank) for table in store.group.tables]
    found = sorted((run.first_slot, number) for number, run in enumerate(runs) if run.rows)
    if not found or found[0][0] > 0:
        found.insert(0, (0, found[0][1] if found else 0))
    first_slots, of_tables = torch.tensor(found, dtype=torch.int64).unbind(1)
    return first_slots.contiguous(), of_tables.contiguous()


def _initial_rows(
    homes: Homes, first_address: int, rows_like: tuple[int, torch.dtype], state_like: tuple[int, torch.dtype],
    scales: Sequence[float], seed: int, state: float, slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return cold rows with the initial values of int64 [n] home slots.

    Args:
        first_address: of slot 0.
        rows_like, state_like: width and dtype.
    """
    width, dtype = rows_like
    rows = torch.empty((len(slots), width), dtype=dtype)
    keys = homes.keys((slots * homes.layout.world_size + first_address).numpy())
    of_tables, of_rows = homes.keyspace.table_rows(keys)
    for table in np.unique(of_tables).tolist():
        here = np.flatnonzero(of_tables == table)
        part = rows.new_empty((len(here), width))
        name = homes.keyspace.tables[table].name
        fill_initial_rows(part, name, torch.from_numpy(of_rows[here]), scale=scales[table], seed=seed)
        rows[here] = part
    return with_counts(packed(rows, torch.full((len(slots), state_like[0]), state, dtype=state_like[1])))


def _row_bytes(group: DimGroup) -> int:
    dtype = TORCH_DTYPES[group.dtype]
    floats = sum(group.state_columns.values())
    return group.width * dtype.itemsize + floats * (8 if dtype == torch.float64 else 4)


def slow_memory_report(stores: Sequence[GroupStore]) -> SlowMemoryReport:
    """Return what happened in the tiered storage of all dim-groups since the call before."""
    found: list[SlowTableReport] = []
    sums = SlowTraffic()
    for store in stores:
        if store.tier is not None:
            counted, traffic = store.tier.drain()
            used = counted.any(dim=1).nonzero().view(-1).tolist()
            found += [SlowTableReport(store.group.tables[at], *counted[at].tolist()) for at in used]
            sums.bytes_read += traffic.bytes_read
            sums.bytes_written += traffic.bytes_written
            sums.seconds += traffic.seconds
    return SlowMemoryReport(named_tables(found), sums.bytes_read, sums.bytes_written, sums.seconds)


LEAST_GAIN = 0.03
"""Share of the expected misses that a new division must save: each change copies all cache slots of a dim-group."""
EVERY = 0.5
"""Divisions are compared each time that look-ups have used rows of so many times the bytes of all cache slots..."""
LEAST_STEPS = 4
"""... and at most once in so many steps: on an accelerator the host waits for what was counted."""
KEPT = 0.7
"""Share of what was counted before that counts on in the next comparison."""


class CacheSlotDivision(StepMoments):
    """Divides the bytes of all cache slots of a rank anew where that misses less. Not thread-safe; not collective.

    The values and states of rows do not depend on it: training goes on exactly. A change takes the time to copy the
    cache slots of the dim-groups that change, and to write back the changed rows of those that shrink. The cache slots
    of the one that is copied are in memory twice meanwhile.

    Args:
        tiers: of the dim-groups in tiered storage.
        sizes: bytes of a cache slot of each.

    Attributes:
        changes: divisions that were changed.
    """

    def __init__(self, tiers: Sequence[TieredRows], sizes: Sequence[int]) -> None:
        self._tiers, self._sizes = tiers, sizes
        self._budget = sum(tier.cache_slots * size for tier, size in zip(tiers, sizes, strict=True))
        self._used = self._used_bytes()
        self._steps = self.changes = 0

    def regrouped(self, before: RankRows, after: RankRows) -> bool:
        """Return False: there are other cache slots to divide."""
        del before, after
        return False

    def updated(self, optimizer: RowUpdate, step: int) -> None:
        """Count a step, and divide anew when it is time and pays.

        Raises:
            SlowMemoryError: as ``TieredRows.resize``.
        """
        del optimizer, step
        self._steps += 1
        used = self._used_bytes()
        if self._steps < LEAST_STEPS or used - self._used < EVERY * self._budget:
            return
        steps, self._steps, self._used = self._steps, 0, used
        curves = [tier.miss_curve(steps, KEPT, size) for tier, size in zip(self._tiers, self._sizes, strict=True)]
        cache_slots = divide_cache_slots(curves, self._budget)
        now = total_misses(curves, [tier.cache_slots for tier in self._tiers])
        if now and now - total_misses(curves, cache_slots) >= LEAST_GAIN * now:
            self.change(cache_slots)

    @torch.no_grad()
    def change(self, cache_slots: Sequence[int]) -> bool:
        """Give each dim-group so many cache slots; return False where there is no memory to copy them.

        Raises:
            SlowMemoryError: as ``TieredRows.resize``.
        """
        # Those that shrink first: their bytes make room.
        order = sorted(
            range(len(cache_slots)), key=lambda at: (cache_slots[at] - self._tiers[at].cache_slots) * self._sizes[at]
        )
        for at in order:
            try:
                self._tiers[at].resize(cache_slots[at])
            except torch.OutOfMemoryError:
                logger.warning("no memory to copy %d cache slots: their division stays for now", cache_slots[at])
                return False
        self.changes += 1
        logger.info("cache slots by dim-group: %s", [tier.cache_slots for tier in self._tiers])
        return True

    def _used_bytes(self) -> int:
        return sum(tier.used_rows * size for tier, size in zip(self._tiers, self._sizes, strict=True))
