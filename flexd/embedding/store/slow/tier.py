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

from flexd.core.errors import SlowMemoryError
from flexd.core.fast_memory import CacheSlotCurve
from flexd.embedding.store.slow.cache_slot_counts import EVICTED, MISSED, USED, WRITTEN, CacheSlotCounts
from flexd.embedding.store.slow.cache_slot_table import CacheSlotTable, LookAhead
from flexd.embedding.store.slow.cold_rows import ColdRows, FreshRows
from flexd.embedding.store.slow.half_life import HalfLife

COUNT_BYTES = 8
"""A row's decayed count of uses (float64, log2) travels with it."""
_FILLED_ROWS = 1 << 16


class Tier:
    """Home rows of a dim-group in cache slots, and the cold rows behind them. Thread-safe.

    Slots in [0, home_rows) are home rows, those after them replicas.

    Args:
        rows, state: [cache slots + replica slots, width], the cache slots first.
        cache_slots, home_rows: numbers of them.

    Attributes:
        cache_slots: number of them now.
        counts: of what look-ups found since ``begin``.
        begun: calls of ``begin``.
        used_rows: rows that look-ups needed, each look-up's once.
    """

    def __init__(self, rows: torch.Tensor, state: torch.Tensor, cache_slots: int, home_rows: int) -> None:
        self.rows, self.state = rows, state
        self.home_rows = home_rows
        self.cache_slots = cache_slots
        self.counts = CacheSlotCounts(rows.device)
        self.begun = self.used_rows = 0
        self._lock = threading.RLock()
        self._slow: ColdRows | None = None
        self._table = self._new_table()
        self._ahead = LookAhead(self._table)
        self._half_life = HalfLife(cache_slots, home_rows, rows.device)
        self._failure: SlowMemoryError | None = None
        self._row_bytes = rows.shape[1] * rows.element_size()
        self._state_bytes = state.shape[1] * state.element_size()

    @property
    def packed_bytes(self) -> int:
        """Bytes of a slow row: its values, its optimizer state and its count."""
        return self._row_bytes + self._state_bytes + COUNT_BYTES

    @property
    def slow(self) -> ColdRows:
        if self._slow is None:
            raise SlowMemoryError("the rows of a closed collection", remedy="make a new collection")
        return self._slow

    @property
    def table_nbytes(self) -> int:
        """Fast memory that finding rows takes, here and in slow memory's index."""
        own = self._table.nbytes + self._half_life.nbytes + self._ahead.nbytes
        return own + (0 if self._slow is None else self._slow.fast_nbytes)

    def begin(
        self,
        make: Callable[[], ColdRows],
        tables: int = 1,
        first_slots: torch.Tensor | None = None,
        of_tables: torch.Tensor | None = None,
    ) -> None:
        """Use new cold rows in place of those there are, and forget what is in the cache slots.

        Args:
            tables, first_slots, of_tables: as ``CacheSlotCounts.begin``; default: there is one table.
        """
        with self._lock:
            self.close()
            self.begun += 1
            one = torch.zeros(1, dtype=torch.int64)
            self.counts.begin(
                tables, one if first_slots is None else first_slots, one if of_tables is None else of_tables
            )
            self._slow, self._table, self._failure = make(), self._new_table(), None
            self._half_life = HalfLife(self.cache_slots, self.home_rows, self.rows.device)
            self._ahead = LookAhead(self._table)

    def packed_fresh(self, make: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> FreshRows:
        """Return what makes packed rows from int64 [n] slots -> ([n, dim] rows, [n, s] state), in host memory."""

        def fresh(slots: torch.Tensor) -> torch.Tensor:
            rows, state = make(slots)
            counts = torch.full((len(slots), 1), -math.inf, dtype=torch.float64)
            return _packed(rows, state, counts)

        return fresh

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
            if self._failure is not None:
                raise self._failure
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
                self._half_life.use(slots if homes is None else slots.index_select(0, homes), self._ahead.known)
            for first in range(0, number, self.cache_slots):
                block: Any = slice(first, min(number, first + self.cache_slots))
                if homes is not None:
                    block = homes[block]
                try:
                    cache_slots = self._bring(slots[block], counts=counts)
                except SlowMemoryError as error:
                    self._failure = error
                    raise
                try:
                    yield block, cache_slots
                finally:
                    if changes:
                        self._table.changed(cache_slots)
                    self._table.release(cache_slots)

    def miss_curve(self, steps: int, kept: float, cache_slot_bytes: int) -> CacheSlotCurve:
        """Return the misses of a step by cache slots; arguments as ``UseRanks.curve``."""
        with self._lock:
            return self._half_life.ranks.curve(steps, kept, cache_slot_bytes)

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
            if self._failure is not None:
                raise self._failure
            if cache_slots == self.cache_slots:
                return
            resized = self._table.resized(cache_slots)
            replicas = self.rows.shape[0] - self.cache_slots
            # Both before anything changes: there may be no memory for them.
            made = [column.new_zeros((cache_slots + replicas, column.shape[1])) for column in (self.rows, self.state)]
            try:
                if len(resized.evicted_slots):
                    self._write(resized.evicted_slots, resized.evicted_cache_slots, resized.evicted_counts)
            except SlowMemoryError as error:
                self._failure = error
                raise
            self.counts.add(EVICTED, resized.left_slots)
            self.counts.add(WRITTEN, resized.evicted_slots)
            for column, new in zip((self.rows, self.state), made, strict=True):
                torch.index_select(column, 0, resized.kept, out=new[: len(resized.kept)])
                new[cache_slots:] = column[self.cache_slots :]
                if column.is_cuda:
                    torch.cuda.synchronize(column.device)  # other streams may still read what is freed here
                column.set_(new)  # type: ignore[call-overload]
            self._table, self.cache_slots = resized.table, cache_slots
            self._ahead.use_table(resized.table)
            self._half_life.resize(cache_slots)

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
        with self._reading_through():
            cache_slots = self._table.find(slots)
            packed = torch.empty((len(slots), self._row_bytes + self._state_bytes), dtype=torch.uint8)
            held = cache_slots >= 0
            cold = ~held
            cold_slots = slots[cold]
            if len(cold_slots):
                packed[cold.cpu()] = self.slow.read(cold_slots.to("cpu"))[:, : packed.shape[1]]
            at = cache_slots[held]
            if len(at):
                rows, state = self.rows.index_select(0, at), self.state.index_select(0, at)
                packed[held.cpu()] = _packed(rows, state).to("cpu")
            return packed

    def read_column(self, slots: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Return [n, width] of ``column``, which is ``rows`` or ``state``, as ``read_through``, on its device."""
        packed = self.read_through(slots)
        of_column = packed[:, : self._row_bytes] if column is self.rows else packed[:, self._row_bytes :]
        if not column.shape[1]:
            return column.new_empty((len(slots), 0))
        return _numbers(of_column, column.dtype).to(column.device)

    def write_through(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        """Write uint8 [n, bytes of rows and state] to int64 [n] distinct home slots, those in no cache slot past the
        cache slots.

        Raises:
            SlowMemoryError: as ``visit``.
        """
        with self._reading_through():
            cache_slots = self._table.find(slots)
            held = cache_slots >= 0
            cold = ~held
            at = cache_slots[held]
            if len(at):
                of_cache_slots = packed[held.to(packed.device)].to(self.rows.device)
                self.rows.index_copy_(0, at, _numbers(of_cache_slots[:, : self._row_bytes], self.rows.dtype))
                if self._state_bytes:
                    self.state.index_copy_(0, at, _numbers(of_cache_slots[:, self._row_bytes :], self.state.dtype))
                self._table.changed(at)
            cold_slots = slots[cold].to("cpu")
            if len(cold_slots):
                counts = torch.full((len(cold_slots), 1), -math.inf, dtype=torch.float64).view(torch.uint8)
                self.slow.write(cold_slots, torch.cat([packed[cold.to(packed.device)].to("cpu"), counts], dim=1))

    @contextmanager
    def _reading_through(self) -> Iterator[None]:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                yield
            except SlowMemoryError as error:
                self._failure = error
                raise

    def close(self) -> None:
        """Let go of the cold rows; reads and writes are refused until ``begin``."""
        with self._lock:
            if self._slow is not None:
                self._slow.close()
            self._slow = None

    def _new_table(self) -> CacheSlotTable:
        return CacheSlotTable(self.cache_slots, max(0, self.home_rows - 1), self.rows.device, half_life=1.0)

    def _bring(self, slots: torch.Tensor, *, counts: bool) -> torch.Tensor:
        arrivals = self._table.bring(slots)
        if len(arrivals.evicted_slots):
            self._write(arrivals.evicted_slots, arrivals.evicted_cache_slots, arrivals.evicted_counts)
        self.counts.add(EVICTED, arrivals.left_slots)
        self.counts.add(WRITTEN, arrivals.evicted_slots)
        missing = slots.index_select(0, arrivals.missing)
        if counts:
            self.counts.add(USED, slots)
            self.counts.add(MISSED, missing)
        if len(missing):
            cache_slots = arrivals.cache_slots.index_select(0, arrivals.missing)
            known = self._read(missing, cache_slots)
            self._table.remember(cache_slots, known)
        if counts:
            self._table.use(arrivals.cache_slots, self._half_life.clock, ahead=self._ahead.use_of(slots))
        return arrivals.cache_slots

    def _read(self, slots: torch.Tensor, cache_slots: torch.Tensor) -> torch.Tensor:
        """Read rows into cache slots, and return float64 [n] their counts."""
        # From page-locked memory the host does not wait for the copy: the cache slots are read by the same stream.
        packed = self.slow.read(slots.to("cpu")).to(self.rows.device, non_blocking=True)
        ends = (self._row_bytes, self._row_bytes + self._state_bytes)
        self.rows.index_copy_(0, cache_slots, _numbers(packed[:, : ends[0]], self.rows.dtype))
        if self._state_bytes:
            self.state.index_copy_(0, cache_slots, _numbers(packed[:, ends[0] : ends[1]], self.state.dtype))
        return _numbers(packed[:, ends[1] :], torch.float64).view(-1)

    def _write(self, slots: torch.Tensor, cache_slots: torch.Tensor, counts: torch.Tensor) -> None:
        packed = _packed(
            self.rows.index_select(0, cache_slots), self.state.index_select(0, cache_slots), counts.view(-1, 1)
        )
        self.slow.write(slots.to("cpu"), packed.to("cpu"))


class TieredColumn:
    """Rows or state of a dim-group by slot: what code that moves rows needs of a tensor [slots, width]."""

    def __init__(self, tier: Tier, column: torch.Tensor, first: int = 0, width: int | None = None) -> None:
        self._tier, self._column = tier, column
        self._part = slice(first, column.shape[1] if width is None else first + width)
        replicas = column.shape[0] - tier.cache_slots
        self.shape = torch.Size((tier.home_rows + replicas, self._part.stop - self._part.start))
        self.dtype, self.device = column.dtype, column.device

    def __len__(self) -> int:
        return self.shape[0]

    def element_size(self) -> int:
        return self._column.element_size()

    def fill_(self, value: float) -> None:
        """Write one value everywhere."""
        for first in range(0, len(self), _FILLED_ROWS):
            part = slice(first, min(len(self), first + _FILLED_ROWS))
            self[part] = self._column.new_full((part.stop - first, self.shape[1]), value)

    def new_empty(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return self._column.new_empty(*arguments, **named)

    def new_zeros(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return self._column.new_zeros(*arguments, **named)

    def narrow(self, first: int, width: int) -> TieredColumn:
        """Return the columns from ``first`` on."""
        return TieredColumn(self._tier, self._column, self._part.start + first, width)

    def index_select(self, dim: int, slots: torch.Tensor, *, counts: bool = False) -> torch.Tensor:
        """Return [n, width] of int64 [n] slots, repeats allowed; ``counts`` as in ``Tier.visit``."""
        if dim != 0:
            raise AssertionError("rows are selected along dimension 0")
        # Without dedup a station holds a row as often as it was requested.
        distinct, places = torch.unique(slots, return_inverse=True)
        if len(distinct) == len(slots):
            return self._read(slots, counts=counts)
        return self._read(distinct, counts=counts).index_select(0, places)

    def index_copy_(self, dim: int, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write [n, width] to int64 [n] distinct slots."""
        if dim != 0:
            raise AssertionError("rows are written along dimension 0")
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
            found[homes] = self._tier.read_column(slots[homes], self._column)[:, self._part]
            by_cache_slots = (~homes).nonzero().view(-1)
        for block, places in self._tier.visit(slots[by_cache_slots], changes=False, counts=counts):
            found[by_cache_slots[block] if isinstance(by_cache_slots, torch.Tensor) else block] = self._column[
                places, self._part
            ]
        return found

    def _range(self, part: slice) -> torch.Tensor:
        return torch.arange(*part.indices(len(self)), device=self.device)


RowColumn = torch.Tensor | TieredColumn
"""[slots, width]: a tensor, or what stands for it where rows are in tiered storage."""


def _packed(*columns: torch.Tensor) -> torch.Tensor:
    parts = [part.contiguous().view(torch.uint8) for part in columns if part.shape[1]]
    return torch.cat(parts, dim=1)


def _numbers(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A copy: part of a row may begin at an offset that is invalid for a wider dtype.
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)
