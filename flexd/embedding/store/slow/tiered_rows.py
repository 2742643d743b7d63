"""Rows of a dim-group in tiered storage: cache slots in fast memory, and cold rows behind them.

Code that reads and writes rows by slot sees ``TieredColumn`` where it would see a tensor: rows come into cache slots
for the time of one call and leave when others need the cache slots, so there is one authoritative copy of a row at any
time and results do not depend on where it is. Replicas have slots of their own in fast memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flexd.control.protocol.report import SLOW_TABLE_QUANTITIES
from flexd.core.errors import SlowMemoryError
from flexd.embedding.devices import packed, unpacked
from flexd.embedding.store.slow.cache_slot_table import CacheSlotTable, Leaving, LookAhead
from flexd.embedding.store.slow.cold_rows import ColdRows, SlowTraffic
from flexd.embedding.store.slow.fast_memory import CacheSlotCurve, HalfLife

USED, MISSED, EVICTED, WRITTEN = range(len(SLOW_TABLE_QUANTITIES))


class CacheSlotCounts:
    """Home rows of a dim-group by table and by what became of them (``SlowTableReport``), since its tables were made.

    Counted on the device of the rows; the host reads them when it reports.

    Args:
        first_slots, of_tables: home rows from int64 [r] ascending slots on are of the tables of int64 [r] numbers.
        tables: number of tables.
    """

    def __init__(
        self, device: torch.device, first_slots: torch.Tensor, of_tables: torch.Tensor, tables: int = 1
    ) -> None:
        self._first_slots, self._of_tables = first_slots.to(device), of_tables.to(device)
        self._counted = self._of_tables.new_zeros((len(SLOW_TABLE_QUANTITIES), tables))

    def by_table(self) -> torch.Tensor:
        """Return int64 [t, quantities] so far, in host memory."""
        return self._counted.t().to("cpu", copy=True)

    def clear(self) -> None:
        self._counted.zero_()

    def add(self, quantity: int, slots: torch.Tensor) -> None:
        """Count int64 [n] distinct home slots: ``USED`` by a look-up, ``MISSED`` of those in no cache slot,
        ``EVICTED`` from their cache slots, ``WRITTEN`` of those because they had changed."""
        if self._counted.shape[1] == 1:
            self._counted[quantity] += len(slots)
        elif len(slots):
            of_table = self._of_tables.index_select(0, torch.searchsorted(self._first_slots, slots, right=True) - 1)
            self._counted[quantity].index_add_(0, of_table, torch.ones_like(of_table))


COUNT_BYTES = 8
"""A row's decayed count of uses (float64, log2) travels with it."""


def with_counts(rows: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """Return cold rows of uint8 [n, bytes] packed rows and float64 [n] counts; None: they were never used."""
    each = torch.full((len(rows),), -math.inf, dtype=torch.float64, device=rows.device) if counts is None else counts
    return torch.cat([rows, each.view(-1, 1).view(torch.uint8)], dim=1)


class TieredRows:
    """Home rows of a dim-group in cache slots, and the cold rows behind them. Thread-safe.

    Slots in [0, home_rows) are home rows, those after them replicas.

    Args:
        rows, state: [cache slots + replica slots, width], the cache slots first.
        cache_slots, home_rows: numbers of them.

    Attributes:
        cache_slots: number of them now.
        counts: of what look-ups found since ``begin``.
        used_rows: rows that look-ups needed, each look-up's once.
        name: of the file of cold rows; empty before the first.
    """

    def __init__(self, rows: torch.Tensor, state: torch.Tensor, cache_slots: int, home_rows: int) -> None:
        self.name = ""
        self.rows, self.state = rows, state
        self.home_rows = home_rows
        self.cache_slots = cache_slots
        self.used_rows = 0
        self._lock = threading.RLock()
        self._cold: ColdRows | None = None
        self.row_bytes = sum(column.shape[1] * column.element_size() for column in (rows, state))
        self._forget()

    def _forget(self) -> None:
        device = self.rows.device
        self._failure: SlowMemoryError | None = None
        self._table = CacheSlotTable(self.cache_slots, max(0, self.home_rows - 1), device)
        self._ahead = LookAhead(self._table)
        self._use = HalfLife(self.cache_slots, self.home_rows, device)
        first = torch.zeros(1, dtype=torch.int64)
        self.counts = CacheSlotCounts(device, first, first)

    @property
    def cold(self) -> ColdRows:
        if self._cold is None:
            raise SlowMemoryError("the rows of a closed collection", remedy="make a new collection")
        return self._cold

    @property
    def table_nbytes(self) -> int:
        """Fast memory that finding rows takes, here and in slow memory's index."""
        own = self._table.nbytes + self._use.nbytes + self._ahead.nbytes
        return own + (0 if self._cold is None else self._cold.fast_nbytes)

    def begin(self, make: Callable[[], ColdRows], counts: CacheSlotCounts | None = None) -> None:
        """Use new cold rows, of ``row_bytes`` and ``COUNT_BYTES`` each, in place of those there are, and forget what is
        in the cache slots.

        Args:
            counts: of the tables of the dim-group; None: there is one.
        """
        with self._lock:
            self.close()
            self._cold = make()
            self._forget()
            self.counts = counts or self.counts

    def expect(self, slots: torch.Tensor) -> None:
        """Add the batch after the last one that is known: int64 [n] ascending home slots that it looks up."""
        with self._lock:
            self._ahead.add(slots)

    def begin_batch(self, passes_kept: int) -> None:
        """Begin to fetch the next of the batches that are known.

        Args:
            passes_kept: batches before it whose rows an update still needs.
        """
        with self._lock:
            self._ahead.begin(passes_kept)

    def forget_batches(self) -> None:
        """No batch is known any more."""
        with self._lock:
            self._ahead.end()

    def visit(self, slots: torch.Tensor, *, changes: bool, counts: bool = False) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield (index into ``slots``, int64 [m] places in ``rows`` and ``state``) until all slots have had their turn.

        The places are valid until the next turn.

        Args:
            slots: int64 [n] distinct.
            changes: the rows are written in their turn.
            counts: it is a use of the rows, as look-ups make it.

        Raises:
            SlowMemoryError: slow memory failed, now or in an earlier call. Rows may have been on their way between the
                memories then, so no row is read or written any more.
        """
        with self._lock:
            with self._failing_for_good():
                replicas = slots >= self.home_rows
            if bool(replicas.any()):
                at = replicas.nonzero().view(-1)
                yield at, slots.index_select(0, at) - self.home_rows + self.cache_slots
                homes = (~replicas).nonzero().view(-1)
            else:
                homes = None
            number = len(slots) if homes is None else len(homes)
            if counts:
                self.used_rows += number
                self._use.use(slots if homes is None else slots.index_select(0, homes), self._ahead.known)
            for first in range(0, number, self.cache_slots):
                block: Any = slice(first, min(number, first + self.cache_slots))
                if homes is not None:
                    block = homes[block]
                with self._failing_for_good():
                    cache_slots = self._bring(slots[block], counts=counts)
                try:
                    yield block, cache_slots
                finally:
                    if changes:
                        self._table.changed(cache_slots)
                    self._table.release(cache_slots)

    @contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """Hold the lock, and let every later use fail too if slow memory fails in this one."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                yield
            except SlowMemoryError as error:
                self._failure = error
                raise

    def drain(self) -> tuple[torch.Tensor, SlowTraffic]:
        """Return int64 [t, quantities] of what look-ups found, and the traffic of slow memory, since the call before
        or ``begin``."""
        with self._lock:
            counted, traffic = self.counts.by_table(), self.cold.traffic
            self.counts.clear()
            self.cold.traffic = SlowTraffic()
            return counted, traffic

    def miss_curve(self, steps: int, kept: float, cache_slot_bytes: int) -> CacheSlotCurve:
        """Return the misses of a step by cache slots; arguments as ``UseRanks.curve``."""
        with self._lock:
            return self._use.ranks.curve(steps, kept, cache_slot_bytes)

    def resize(self, cache_slots: int) -> None:
        """Change the number of cache slots, between two steps; the rows that would leave last keep theirs.

        Changed rows that lose their cache slot are written to slow memory. Meanwhile there are the old and the new
        ``rows`` and ``state``, which keep their identity.

        Args:
            cache_slots: held to at least 1 and at most one for each home row.

        Raises:
            SlowMemoryError: rows are in use: nothing has changed. Or slow memory failed, as in ``visit``.
        """
        cache_slots = max(1, min(cache_slots, self.home_rows))
        with self._lock:
            if cache_slots == self.cache_slots:
                return
            table, kept, leaving = self._table.resized(cache_slots)
            replicas = self.rows.shape[0] - self.cache_slots
            # Both before anything changes: there may be no memory for them.
            made = [column.new_zeros((cache_slots + replicas, column.shape[1])) for column in (self.rows, self.state)]
            with self._failing_for_good():
                self._leave(leaving)
            for column, new in zip((self.rows, self.state), made, strict=True):
                torch.index_select(column, 0, kept, out=new[: len(kept)])
                new[cache_slots:] = column[self.cache_slots :]
                if column.is_cuda:
                    torch.cuda.synchronize(column.device)  # other streams may still read what is freed here
                column.set_(new)  # type: ignore[call-overload]
            self._table, self.cache_slots = table, cache_slots
            self._ahead.table, self._use.cache_slots = table, cache_slots

    def slots_at(self, places: torch.Tensor) -> torch.Tensor:
        """int64 [n] places of ``rows`` in use -> int64 [n] slots."""
        cache_slots = self._table.slots_at(places.clamp(max=self.cache_slots - 1))
        return torch.where(places < self.cache_slots, cache_slots, places - self.cache_slots + self.home_rows)

    def read_through(self, slots: torch.Tensor) -> torch.Tensor:
        """Return uint8 [n, bytes of rows and state] of int64 [n] distinct home slots, in host memory.

        Rows that are in no cache slot are read past the cache slots, so that whatever reads a whole table moves
        nothing.

        Raises:
            SlowMemoryError: as ``visit``.
        """
        with self._failing_for_good():
            cache_slots = self._table.find(slots)
            found = torch.empty((len(slots), self.row_bytes), dtype=torch.uint8)
            held = cache_slots >= 0
            cold_slots = slots[~held]
            if len(cold_slots):
                found[~held.cpu()] = self.cold.read(cold_slots.to("cpu"))[:, : self.row_bytes]
            found[held.cpu()] = self._packed(cache_slots[held]).to("cpu")
            return found

    def write_through(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write uint8 [n, bytes of rows and state] to int64 [n] distinct home slots, those in no cache slot past the
        cache slots.

        Raises:
            SlowMemoryError: as ``visit``.
        """
        with self._failing_for_good():
            cache_slots = self._table.find(slots)
            held = cache_slots >= 0
            self._unpack(rows[held.to(rows.device)].to(self.rows.device), cache_slots[held])
            self._table.changed(cache_slots[held])
            cold_slots = slots[~held].to("cpu")
            if len(cold_slots):
                self.cold.write(cold_slots, with_counts(rows[~held.to(rows.device)].to("cpu")))

    def close(self) -> None:
        """Release the cold rows; reads and writes are refused until ``begin``."""
        with self._lock:
            if self._cold is not None:
                self._cold.close()
            self._cold = None

    def _bring(self, slots: torch.Tensor, *, counts: bool) -> torch.Tensor:
        arrivals = self._table.bring(slots)
        self._leave(arrivals.leaving)
        missing = slots.index_select(0, arrivals.missing)
        if counts:
            self.counts.add(USED, slots)
            self.counts.add(MISSED, missing)
        if len(missing):
            cache_slots = arrivals.cache_slots.index_select(0, arrivals.missing)
            # From page-locked memory the host does not wait for the copy: the cache slots are read by the same stream.
            cold = self.cold.read(missing.to("cpu")).to(self.rows.device, non_blocking=True)
            self._unpack(cold, cache_slots)
            known = cold[:, self.row_bytes :].clone(memory_format=torch.contiguous_format).view(torch.float64)
            self._table.remember(cache_slots, known.view(-1))
        if counts:
            self._table.use(arrivals.cache_slots, self._use.clock, ahead=self._ahead.use_of(slots))
        return arrivals.cache_slots

    def _leave(self, leaving: Leaving) -> None:
        """Write the changed rows among those that lose their cache slots to slow memory."""
        if len(leaving.changed):
            rows = with_counts(self._packed(leaving.cache_slots), leaving.counts)
            self.cold.write(leaving.changed.to("cpu"), rows.to("cpu"))
        self.counts.add(EVICTED, leaving.slots)
        self.counts.add(WRITTEN, leaving.changed)

    def _packed(self, cache_slots: torch.Tensor) -> torch.Tensor:
        return packed(self.rows.index_select(0, cache_slots), self.state.index_select(0, cache_slots))

    def _unpack(self, rows: torch.Tensor, cache_slots: torch.Tensor) -> None:
        columns = self.rows, self.state
        for column, values in zip(columns, unpacked(rows, columns), strict=True):
            column.index_copy_(0, cache_slots, values)


class TieredColumn:
    """Rows or state of a dim-group by slot: what code that moves rows needs of a tensor [slots, width]."""

    def __init__(self, tier: TieredRows, column: torch.Tensor, first: int = 0, width: int | None = None) -> None:
        self._tier, self._column = tier, column
        self._part = slice(first, column.shape[1] if width is None else first + width)
        slots = tier.home_rows + column.shape[0] - tier.cache_slots
        self.shape = torch.Size((slots, self._part.stop - self._part.start))
        self.dtype, self.device = column.dtype, column.device

    def __len__(self) -> int:
        return self.shape[0]

    def element_size(self) -> int:
        return self._column.element_size()

    def new_zeros(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return self._column.new_zeros(*arguments, **named)

    def narrow(self, dim: int, first: int, width: int) -> TieredColumn:
        """Return ``width`` columns from ``first`` on, along dimension 1."""
        del dim
        return TieredColumn(self._tier, self._column, self._part.start + first, width)

    def index_select(self, dim: int, slots: torch.Tensor, *, counts: bool = False) -> torch.Tensor:
        """Return [n, width] of int64 [n] slots, repeats allowed; ``counts`` as in ``TieredRows.visit``."""
        del dim
        # Without dedup a station holds a row as often as it was requested.
        distinct, places = torch.unique(slots, return_inverse=True)
        if len(distinct) == len(slots):
            return self._read(slots, counts=counts)
        return self._read(distinct, counts=counts).index_select(0, places)

    def index_copy_(self, dim: int, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write [n, width] to int64 [n] distinct slots."""
        del dim
        for block, places in self._tier.visit(slots, changes=True):
            self._column[places, self._part] = values[block].to(self._column)

    def __getitem__(self, part: slice) -> torch.Tensor:
        return self._read(self._range(part))

    def __setitem__(self, part: slice, values: torch.Tensor) -> None:
        self.index_copy_(0, self._range(part), values)

    def _read(self, slots: torch.Tensor, *, counts: bool = False) -> torch.Tensor:
        found = self._column.new_empty((len(slots), self.shape[1]))
        by_cache_slots: Any = slice(None)
        if not counts:  # nothing that is used soon: a checkpoint, an export, a migration
            homes = slots < self._tier.home_rows
            found[homes] = self._read_through(slots[homes])
            by_cache_slots = (~homes).nonzero().view(-1)
        for block, places in self._tier.visit(slots[by_cache_slots], changes=False, counts=counts):
            found[by_cache_slots[block] if isinstance(by_cache_slots, torch.Tensor) else block] = self._column[
                places, self._part
            ]
        return found

    def _read_through(self, slots: torch.Tensor) -> torch.Tensor:
        """Return [n, width] of int64 [n] distinct home slots; nothing moves into cache slots."""
        columns = self._tier.rows, self._tier.state
        of_column = unpacked(self._tier.read_through(slots), columns)[self._column is self._tier.state]
        return of_column.to(self.device)[:, self._part]

    def _range(self, part: slice) -> torch.Tensor:
        return torch.arange(*part.indices(len(self)), device=self.device)


RowColumn = torch.Tensor | TieredColumn
"""[slots, width]: a tensor, or what stands for it where rows are in tiered storage."""
