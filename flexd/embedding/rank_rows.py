"""The rows of one rank in the dim-groups of the tables that are read only now, and the same rows in others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from flexd.core.keyspace import HomeRun, KeySpace, homes_of
from flexd.embedding import devices
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.migration.migrator import Migrator
from flexd.embedding.migration.row_carrier import ChangesHomeRows
from flexd.embedding.row_hashes import fill_initial_rows
from flexd.embedding.store.store import GroupStore, make_stores

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tiered_storage import TieredStorage


@dataclass(frozen=True)
class RowSettings:
    """Settings of the rows of a rank.

    Attributes:
        replica_slots: of each dim-group of ``KeySpace.whole``, for chunks; copies of "data_parallel" tables have slots
            beside them.
        tiered_storage: None: all rows are in fast memory.
        keep_keys: the optimizer needs the keys of all rows, replicas too.
        changed: as ``StepMoments.changed``.
    """

    replica_slots: Sequence[int]
    max_migration_bytes: int
    device: torch.device
    tiered_storage: TieredStorage | None
    keep_keys: bool
    changed: ChangesHomeRows


@dataclass(frozen=True)
class InitialRows:
    """Values that rows begin with.

    Attributes:
        scales: of each table.
        states: value of every number of optimizer state, by ``DimGroup.optimizer``.
    """

    scales: Sequence[float]
    seed: int
    states: Mapping[str, float]


class RankRows:
    """The rows that one rank holds, with their directory and what migrates them.

    Args:
        before: the same rows in other dim-groups. Stores that have the same tables take over their columns; others are
            made without values (``regrouped``).
    """

    def __init__(
        self, keyspace: KeySpace, groups: ChainGroups, settings: RowSettings, before: RankRows | None = None
    ) -> None:
        self.keyspace = keyspace
        self.homes = homes = homes_of(keyspace, groups.layout)
        self._groups, self._settings = groups, settings
        self.rank = groups.rank
        self.replica_slots = keyspace.room_for_copies(settings.replica_slots)
        """Of each dim-group, for chunks."""
        storage = settings.tiered_storage
        self._cache_slots = None if storage is None else storage.cache_slots(homes.groups, groups.layout)
        all_slots = [slots + homes.copied_slots(group) for group, slots in enumerate(self.replica_slots)]
        self.stores = make_stores(
            homes, groups.rank, all_slots, settings.device, self._cache_slots, keep_keys=settings.keep_keys,
            before=None if before is None else [self._store_before(before, n, s) for n, s in enumerate(all_slots)],
        )  # fmt: skip
        self.trained = [group.trained for group in keyspace.groups]
        """Of each dim-group: whether its rows are trained."""
        self.migrator = Migrator(groups, self.stores, homes, settings.max_migration_bytes, settings.changed)

    def initialise(self, initial: InitialRows) -> None:
        """Set home rows and their state to their initial values."""
        for number, store in enumerate(self.stores):
            self._begin(number, initial)
            if store.tier is None:
                for table in store.group.tables:
                    spec, run = self.keyspace.tables[table], self.homes.run(table, self.rank)
                    fill_initial_rows(
                        store.rows[run.slots], spec.name, run.rows, scale=initial.scales[table], seed=initial.seed
                    )

    @torch.no_grad()
    def regrouped(self, keyspace: KeySpace, initial: InitialRows) -> RankRows:
        """Return the same rows in the dim-groups of ``keyspace``, at the same places, with fresh state where they had
        none. Copies have no values yet.

        Rows of a dim-group that has other tables then are copied; of others all columns are used by both, so that one
        of the two is to be given up.

        Raises:
            SlowMemoryError, RuntimeError: there is no memory for the copies.
        """
        after = RankRows(keyspace, self._groups, self._settings, self)
        old_of = {table: store for store in self.stores for table in store.group.tables}
        for number, store in enumerate(after.stores):
            old = old_of[store.group.tables[0]]
            if store.rows is old.rows:
                if store.state is not old.state and isinstance(store.state, torch.Tensor):
                    store.state.fill_(initial.states[store.group.optimizer])
                continue
            names = [each.tier.name for each in (*self.stores, *after.stores) if each.tier is not None]
            after._begin(number, initial, names)
            for table in store.group.tables:
                self._copy(table, old_of[table], after, store, initial)
        after.migrator.list_as(self.migrator)
        return after

    @torch.no_grad()
    def begin_state(self, names: Sequence[str], states: Mapping[str, float]) -> None:
        """Set the optimizer state of the home rows of trained tables to its initial value.

        Args:
            states: as of ``InitialRows``.

        Raises:
            SlowMemoryError: cold rows cannot be read or written.
        """
        for table in (self.keyspace.index[name] for name in names):
            store, run = self.stores[int(self.keyspace.group_of_table[table])], self.homes.run(table, self.rank)
            for slots in self._windows(run, store.row_bytes):
                values = store.read_homes(slots)[:, : store.value_bytes]
                store.write_homes(store.fitted(values, states[store.group.optimizer]), slots)

    @torch.no_grad()
    def begin_rows(self, addresses: torch.Tensor, states: Mapping[str, float]) -> list[tuple[int, torch.Tensor]]:
        """Set int64 [n] ascending rows to zero and their state to its initial value, wherever this rank holds them.

        Args:
            states: as of ``InitialRows``.

        Returns:
            Of each dim-group that has any, (its number, int64 [m] slots).

        Raises:
            SlowMemoryError: cold rows cannot be read or written.
        """
        changed = []
        sizes = [len(addresses)]
        if len(self.stores) > 1:
            ends = devices.uploaded([store.group.end_key for store in self.stores], addresses.device)
            places = torch.searchsorted(addresses, ends).tolist()
            sizes = [end - first for first, end in pairwise([0, *places])]
        for number, (store, mine) in enumerate(zip(self.stores, addresses.split_with_sizes(sizes), strict=True)):
            if not len(mine):
                continue
            held, slots, _ = store.locate(mine)
            slots = slots[held]
            zeros = torch.zeros((len(slots), store.value_bytes), dtype=torch.uint8, device=store.rows.device)
            begun = store.fitted(zeros, states[store.group.optimizer])
            if store.tier is None:
                store.unpack(begun, slots)
            else:
                at_home = slots < store.home_rows
                store.write_homes(begun[at_home], slots[at_home])
                store.unpack(begun[~at_home], slots[~at_home])
            changed.append((number, slots))
        return changed

    def resize(self) -> None:
        """Give stores that were taken over their cache slots."""
        for store, cache_slots in zip(self.stores, self._cache_slots or (), strict=False):
            if store.tier is not None and cache_slots is not None:
                with suppress(torch.OutOfMemoryError):  # to copy them: they stay as they are
                    store.tier.resize(cache_slots)

    def close_others(self, kept: RankRows) -> None:
        """Release the cold rows that ``kept`` does not use."""
        used = {id(store.tier) for store in kept.stores}
        for store in self.stores:
            if store.tier is not None and id(store.tier) not in used:
                store.tier.close()

    def _begin(self, number: int, initial: InitialRows, names: Sequence[str] = ()) -> None:
        """Set the state of a dim-group's rows to its initial value, and in tiered storage the rows too.

        Args:
            names: of files of cold rows that are in use.
        """
        store = self.stores[number]
        state = initial.states[store.group.optimizer]
        if isinstance(store.state, torch.Tensor):
            store.state.fill_(state)
        elif self._settings.tiered_storage is not None:
            self._settings.tiered_storage.begin(self.stores, number, initial.scales, initial.seed, state, names)

    def _store_before(self, before: RankRows, number: int, replica_slots: int) -> GroupStore | None:
        """Return the store of ``before`` whose columns a dim-group can take over."""
        group, homes = self.homes.groups[number], self.homes
        old = next(store for store in before.stores if group.tables[0] in store.group.tables)
        home_rows = int(homes.home_rows(number)[self.rank])
        alike = (old.group.tables, old.home_rows, old.replica_slots) == (group.tables, home_rows, replica_slots)
        if not alike or any(before.homes.run(t, self.rank) != homes.run(t, self.rank) for t in group.tables):
            return None
        if old.tier is not None:
            return old if old.group.trained == group.trained else None
        return None if self._cache_slots is not None and self._cache_slots[number] < home_rows else old

    def _copy(self, table: int, source: GroupStore, after: RankRows, store: GroupStore, initial: InitialRows) -> None:
        here, there = self.homes.run(table, self.rank), after.homes.run(table, self.rank)
        for slots in self._windows(here, max(source.row_bytes, store.row_bytes)):
            rows = store.fitted(source.read_homes(slots), initial.states[store.group.optimizer])
            store.write_homes(rows, slots + (there.first_slot - here.first_slot))

    def _windows(self, run: HomeRun, row_bytes: int) -> Iterator[torch.Tensor]:
        """Yield int64 [n] slots of a table's home rows, a window's at a time."""
        from flexd.embedding.checkpoint.table_rows import MAX_WINDOW_BYTES

        each, end = max(1, MAX_WINDOW_BYTES // row_bytes), run.first_slot + len(run.rows)
        for first in range(run.first_slot, end, each):
            yield torch.arange(first, min(first + each, end), device=self._settings.device)
