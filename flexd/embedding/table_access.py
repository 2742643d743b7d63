"""Tables as wholes: read, loaded and saved, beside the look-ups of a collection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.embedding.devices import allocated_device
from flexd.embedding.engine import RowEngine
from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.store.store import TORCH_DTYPES, GroupStore

if TYPE_CHECKING:
    from flexd.embedding.checkpoint.blocks import TableHomes


class DeferredTables(nn.Module):
    """Makes tables at once, or when ``to_empty`` moves the module from ``meta`` to the device of the tables.

    Attributes:
        device: of the tables; ``meta`` until they are made.
    """

    made_with_tables: ClassVar[frozenset[str]] = frozenset()
    """Attributes that do not exist on ``meta``."""

    def __init__(self, device: torch.device | str | None) -> None:
        super().__init__()
        self.device = allocated_device(device)
        self._make: Callable[[], None] | None = None

    @property
    def has_tables(self) -> bool:
        """False until the tables are made."""
        return self._make is None

    def make_or_defer(self, make: Callable[[], None]) -> None:
        """Collective if the device is not ``meta``. Call ``make``, which makes the tables on ``self.device``."""
        self._make = make
        if self.device.type != "meta":
            self._make_now(make)

    def _make_now(self, make: Callable[[], None]) -> None:
        # The innermost of such contexts holds: no other tensor is made on the caller's default device.
        with torch.device("cpu"):
            make()
        self._make = None

    def __getattr__(self, name: str) -> Any:
        if name in self.made_with_tables and self.__dict__.get("_make") is not None:
            raise EmbeddingError(
                "the tables are on meta, without values", remedy="call to_empty(device=...) on every rank"
            )
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Make tables that are on ``meta`` on the device of ``to_empty``, and refuse every other move at once.

        ``model.half()`` does not change the tables, which have their own dtype.
        """
        try:
            target = fn(torch.empty(0, dtype=torch.int64, device=self.device)).device
        except NotImplementedError as error:
            raise EmbeddingError(
                "the tables are on meta, without values", remedy="call to_empty(device=...) instead of to(device)"
            ) from error
        if target != self.device:
            if self._make is None:
                raise EmbeddingError(
                    f"the tables are on {self.device} and cannot be moved to {target}",
                    remedy="construct the collection with device=",
                )
            self.device = target
            try:
                self._make_now(self._make)
            except BaseException:
                self.device = torch.device("meta")
                raise
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class TableAccess(DeferredTables):
    """What a collection does with whole tables. Its attributes are those of ``EmbeddingCollection``."""

    keyspace: KeySpace
    layout: RankLayout
    rank: int
    engine: RowEngine
    traffic: Traffic
    _groups: ChainGroups

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a table's rows."""
        return TORCH_DTYPES[self.tables[self.keyspace.index[name]].dtype]

    @torch.no_grad()
    def load_rows(self, name: str, first_row: int, values: torch.Tensor | None, *, source: int | None = None) -> None:
        """Collective. Set rows of a table, starting at ``first_row``, to ``values`` [n, dim], for instance pretrained
        vectors.

        Every rank gives the same values, which is checked by a hash of their bits in the table's dtype; or rank
        ``source`` gives them and sends each row to its home. Replicas are copied again before the next pass. The
        optimizer's state does not change.

        Args:
            values: may be None on other ranks than ``source``.

        Raises:
            EmbeddingError: on every rank: the values do not fit the table on one, or ranks gave different values,
                rows or tables. Nothing is loaded. On this rank: the table or the source is unknown.
        """
        from flexd.embedding.checkpoint.given_rows import agree_on_rows, send_rows

        if name not in self.keyspace.index:
            raise EmbeddingError(f"no table {name!r}", remedy=f"one of {', '.join(self.keyspace.index)}")
        if source is not None and not 0 <= source < self.layout.world_size:
            raise EmbeddingError(f"source={source}", remedy=f"a rank below {self.layout.world_size}, or None")
        table = self.keyspace.index[name]
        store, homes = self._homes(table)
        self.engine.settle()
        with self.traffic.uncounted():
            rows = agree_on_rows(
                self._groups.world, table, self.keyspace.tables[table], first_row, values, source, store.rows
            )
            if source is None and values is not None:
                self.set_rows(name, first_row, values)
                return
            self._before_load(store, homes, rows)
            send_rows(self._groups.world, homes, store.rows, source or 0, rows, values)

    @torch.no_grad()
    def set_rows(self, name: str, first_row: int, values: torch.Tensor) -> None:
        """As ``load_rows`` with values that are known to be equal and to fit: it communicates only to finish a running
        ``flexd.prefetch`` exchange."""
        store, homes = self._homes(self.keyspace.index[name])
        rows = range(first_row, first_row + values.shape[0])
        self._before_load(store, homes, rows)
        homes.write_table(store.rows, first_row, values)

    def _before_load(self, store: GroupStore, homes: TableHomes, rows: range) -> None:
        """Tell the engine that the rows are about to be replaced."""
        slots = homes.run(rows).slots
        changed = torch.arange(slots.start, slots.stop, device=store.rows.device)
        self.engine.before_rows_load((self.engine.stores.index(store), changed))

    def gather_table(self, name: str, device: torch.device | str | None = None) -> torch.Tensor:
        """Collective. Return [rows, dim] of a whole table on every rank, for small tables, tests and exports.

        Args:
            device: of the result; default that of the tables. With "cpu" an accelerator holds one window at a time.
        """
        from flexd.embedding.checkpoint.whole_tables import gather_rows

        store, homes = self._homes(self.keyspace.index[name])
        self.engine.settle()
        with self.traffic.uncounted():
            return gather_rows(self._groups.world, homes, store.rows, device)

    def _homes(self, table: int) -> tuple[GroupStore, TableHomes]:
        from flexd.embedding.checkpoint.blocks import TableHomes

        store = next(store for store in self.engine.stores if table in store.group.tables)
        return store, TableHomes(self.engine.homes, table, self.rank)

    def replicas_bit_equal(self) -> bool:
        """Collective. Return whether all replicas, with optimizer state, equal their home copies bit for bit."""
        from flexd.embedding.checkpoint.whole_tables import replicas_bit_equal

        self.engine.hooks.wait()
        self.engine.migrator.complete()
        with self.traffic.uncounted():
            return replicas_bit_equal(self._groups, self.engine.stores)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        from flexd.embedding.checkpoint.local_state import save_local

        save_local(self.engine, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        from flexd.embedding.checkpoint.local_state import load_local

        load_local(self.engine, state_dict, prefix, *args[2:5])
