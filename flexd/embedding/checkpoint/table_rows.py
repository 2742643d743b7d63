"""Bring the home rows of a table to the ranks that ask for consecutive ones, and back.

Homes are cyclic, so that popular rows spread; a checkpoint has consecutive rows, so that it is valid for any number of
ranks and any sharding type. Arithmetic determines which rows a rank sends to another, so only values are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexd.core.keyspace import HomeRun, Homes
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.store.packing import packed, unpacked

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tiered_rows import RowColumn

MAX_WINDOW_BYTES = 32 * 2**20
"""Bytes that each rank sends at once, and receives at once."""


@dataclass(frozen=True)
class TableHomes:
    """Homes and blocks of the rows of one table.

    Attributes:
        rank: this rank.
    """

    homes: Homes
    table: int
    rank: int

    @property
    def rows(self) -> int:
        return self.homes.keyspace.tables[self.table].rows

    @property
    def world_size(self) -> int:
        return self.homes.layout.world_size

    def blocks(self) -> list[range]:
        """Return consecutive rows for each rank, equal to those of ``torch.chunk`` and DTensor's ``Shard``."""
        each = -(-self.rows // self.world_size)
        ends = [min(rank * each, self.rows) for rank in range(self.world_size + 1)]
        return [range(ends[rank], ends[rank + 1]) for rank in range(self.world_size)]

    def only(self, rank: int, rows: range | None = None) -> list[range]:
        """Return the rows, default all, for one rank, and none for the others."""
        wanted = range(self.rows) if rows is None else rows
        return [wanted if each == rank else range(0) for each in range(self.world_size)]

    def run(self, rows: range) -> HomeRun:
        """Return those of consecutive rows that have their home here, ascending."""
        return self.homes.run(self.table, self.rank, rows)

    def write(self, held: RowColumn, first_row: int, values: torch.Tensor) -> None:
        """Write those of [n, c] rows from ``first_row`` on that have their home here; ``held`` is [slots, c]."""
        run = self.run(range(first_row, first_row + values.shape[0]))
        if run.rows:
            mine = values[run.rows.start - first_row : run.rows.stop - first_row : run.rows.step]
            held[run.slots] = mine.to(held.device, held.dtype)

    def by_home(self, rows: range, device: torch.device) -> tuple[torch.Tensor, list[int]]:
        """Return int64 [n] places of consecutive rows ordered by their homes, and how many have each rank as home."""
        part = self.homes.part_of(self.table)
        first_key = int(self.homes.keyspace.first_key[self.table])
        home = torch.arange(first_key + rows.start, first_key + rows.stop, device=device) % part.span + part.first_rank
        counts = [len(self.homes.run(self.table, rank, rows).rows) for rank in range(self.world_size)]
        return torch.sort(home, stable=True).indices, counts

    def windows(self, row_bytes: int, wanted: Sequence[range]) -> Iterator[list[range]]:
        """Cut what each rank wants into windows in which no rank sends or receives more than ``MAX_WINDOW_BYTES``."""
        # A row's place has 8 bytes.
        takers, most = max(1, sum(map(bool, wanted))), MAX_WINDOW_BYTES // max(8, row_bytes)
        # Of so many consecutive rows a home has one.
        each = max(1, min(most, most // takers * self.homes.part_of(self.table).span))
        for first in range(0, max(map(len, wanted)), each):
            yield [rows[first : first + each] for rows in wanted]


def collect(
    world: Peers, homes: TableHomes, columns: Sequence[RowColumn], wanted: Sequence[range], device: torch.device
) -> list[torch.Tensor]:
    """Collective. Return of each column [n, c] the n rows that this rank wants, on ``device``.

    Args:
        columns: [slots, c] of the home rows here; as many as are to travel together.
        wanted: consecutive rows of each rank, equal on all ranks.
    """
    row_bytes = sum(column.shape[1] * column.element_size() for column in columns)
    whole = [torch.empty((len(wanted[homes.rank]), c.shape[1]), dtype=c.dtype, device=device) for c in columns]
    first = 0
    for window in homes.windows(row_bytes, wanted):
        order, received = homes.by_home(window[homes.rank], columns[0].device)
        parts = {rows: packed(*(column[homes.run(rows).slots] for column in columns)) for rows in window}
        counts = [len(parts[rows]) for rows in window]
        sent = torch.cat([parts[rows] for rows in window])
        # Of what is as large as a window no more than two are in memory at once.
        del parts
        arrived = _exchanged(world, sent, counts, received)
        del sent
        ordered = torch.empty_like(arrived).index_copy_(0, order, arrived)
        del arrived
        for column, part in zip(whole, unpacked(ordered, columns), strict=True):
            column[first : first + len(order)] = part
        first += len(order)
    return whole


def distribute(
    world: Peers,
    homes: TableHomes,
    columns: Sequence[RowColumn],
    given: Sequence[range],
    values: Sequence[torch.Tensor],
) -> None:
    """Collective. Write the rows that ranks give to their homes; the inverse of ``collect``.

    Args:
        values: of each column [n, c], the n rows that this rank gives; ignored if it gives none.
    """
    row_bytes, device = sum(column.shape[1] * column.element_size() for column in columns), columns[0].device
    first = 0
    for window in homes.windows(row_bytes, given):
        order, sent = homes.by_home(window[homes.rank], device)
        rows = torch.empty((0, row_bytes), dtype=torch.uint8, device=device)
        if len(order):
            parts = [part[first : first + len(order)] for part in values]
            rows = packed(*(part.to(device, held.dtype) for part, held in zip(parts, columns, strict=True)))
        first += len(order)
        runs = [homes.run(rows) for rows in window]
        received = [len(run.rows) for run in runs]
        rows = rows.index_select(0, order)
        arrived = _exchanged(world, rows, sent, received)
        del rows
        for held, part in zip(columns, unpacked(arrived, columns), strict=True):
            for run, of_run in zip(runs, part.split_with_sizes(received), strict=True):
                held[run.slots] = of_run


def gather_table(
    world: Peers, homes: TableHomes, held: RowColumn, device: torch.device | str | None = None
) -> torch.Tensor:
    """Collective. Return [rows, c] of a whole table on every rank; ``held`` is [slots, c].

    Args:
        device: of the result; default that of ``held``, on which the collectives are.
    """
    everything = [range(homes.rows)] * homes.world_size
    return collect(world, homes, [held], everything, held.device if device is None else torch.device(device))[0]


def _exchanged(world: Peers, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Collective. Send uint8 [n, bytes] rows, so many to each rank, and return those that arrive."""
    width = rows.shape[1]
    arrived = world.all_to_all(rows.view(-1), [n * width for n in sent], [n * width for n in received])
    return arrived.view(-1, width)
