"""Carry whole tables between the homes of their rows and the one rank that saves each.

Thousands of ranks that each save a block of thousands of tables would write millions of blocks of a few rows. A table
that fits a window is therefore saved by one rank, its *owner*. Every rank sends an owner equally many bytes, so a table
arrives as rows of equal length and is put in order without a loop over ranks; tables travel together, in rounds. Those
of other home rules than "all" travel one by one after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexd.embedding import devices
from flexd.embedding.checkpoint import blocks
from flexd.embedding.checkpoint.blocks import TableHomes
from flexd.embedding.exchange.collectives import Peers

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tier import RowColumn

Owned = tuple[int, int]
"""The owner of a table, and the round in which it travels."""


def assign_owners(table_bytes: Sequence[int], world_size: int) -> list[Owned | None]:
    """Spread the tables evenly, by bytes, over owners in ascending order. None: too large for a window; it is saved in
    blocks by all ranks. Equal on all ranks."""
    most = blocks.MAX_WINDOW_BYTES
    total = sum(size for size in table_bytes if size <= most)
    owned: list[Owned | None] = []
    before, owner, of_owner = 0, 0, 0
    for size in table_bytes:
        if size > most:
            owned.append(None)
            continue
        following = min(before * world_size // max(1, total), world_size - 1)
        if following != owner:
            owner, of_owner = following, 0
        owned.append((owner, of_owner // max(1, most)))
        before, of_owner = before + size, of_owner + size
    return owned


@dataclass(frozen=True)
class OwnedTable:
    """A table that one rank saves.

    Attributes:
        columns: [slots, c] values and parts of the state, as this rank holds them.
    """

    homes: TableHomes
    columns: Sequence[RowColumn]
    owned: Owned

    @property
    def each(self) -> int:
        """Rows that every rank sends, of which the last may be padding."""
        return -(-self.homes.rows // self.homes.world_size)

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes that every rank sends, by column."""
        return [self.each * column.shape[1] * column.element_size() for column in self.columns]

    @property
    def is_mine(self) -> bool:
        return self.owned[0] == self.homes.rank

    def empty(self, device: torch.device) -> list[torch.Tensor]:
        """Return zeros of the shapes of the whole table."""
        return [
            torch.zeros((self.homes.rows, column.shape[1]), dtype=column.dtype, device=device)
            for column in self.columns
        ]


def to_owners(world: Peers, tables: Sequence[OwnedTable], device: torch.device) -> list[list[torch.Tensor] | None]:
    """Collective. Return the whole columns of the tables that this rank owns, on ``device``; None for the others.

    Args:
        tables: in ascending order of their owners.
    """
    found: list[list[torch.Tensor] | None] = [None] * len(tables)
    for of_round in _rounds(tables):
        sent = [_flat_bytes(_padded(tables[i], column)) for i in of_round for column in tables[i].columns]
        mine = [i for i in of_round if tables[i].is_mine]
        received = _exchange(world, sent, *_counts(world, tables, of_round))
        at = 0
        for i in mine:
            table = tables[i]
            whole = []
            for column, size in zip(table.columns, table.sent_bytes, strict=True):
                parts = received.view(world.size, -1)[:, at : at + size].contiguous().view(column.dtype)
                by_rank = parts.view(world.size, table.each, column.shape[1])
                # Row 0 is the first of the rank that is its home, row 1 of the next rank.
                by_offset = by_rank.roll(-(table.homes.first_key % world.size), dims=0).transpose(0, 1)
                whole.append(by_offset.reshape(-1, column.shape[1])[: table.homes.rows].to(device))
                at += size
            found[i] = whole
    for i, table in enumerate(tables):
        if not table.homes.spread:
            found[i] = _to_owner(world, table, device)
    return found


def from_owners(world: Peers, tables: Sequence[OwnedTable], whole: Sequence[Sequence[torch.Tensor] | None]) -> None:
    """Collective. Write the columns that ``whole`` has for the tables of this rank to their homes; the inverse of
    ``to_owners``."""
    for table, columns in zip(tables, whole, strict=True):
        if not table.homes.spread:
            _from_owner(world, table, columns)
    for of_round in _rounds(tables):
        sent = []
        for i in of_round:
            table, columns = tables[i], whole[i]
            if columns is None:
                continue
            for column, held in zip(columns, table.columns, strict=True):
                padded = held.new_zeros((table.each * world.size, held.shape[1]))
                padded[: table.homes.rows] = column
                by_offset = padded.view(table.each, world.size, held.shape[1]).transpose(0, 1)
                by_rank = by_offset.roll(table.homes.first_key % world.size, dims=0)
                sent.append(by_rank.contiguous().view(torch.uint8).view(world.size, -1))
        counts, own_counts = _counts(world, tables, of_round)
        device = tables[of_round[0]].columns[0].device
        flat = torch.cat(sent, dim=1).view(-1) if sent else torch.empty(0, dtype=torch.uint8, device=device)
        received = _exchange(world, [flat], own_counts, counts)
        at = 0
        for i in of_round:
            table = tables[i]
            every = range(table.homes.rows)
            mine = table.homes.count(table.homes.rank, every)
            for held, size in zip(table.columns, table.sent_bytes, strict=True):
                rows = received[at : at + size].clone().view(held.dtype).view(-1, held.shape[1])
                table.homes.write(held, every, rows[:mine])
                at += size


def _to_owner(world: Peers, table: OwnedTable, device: torch.device) -> list[torch.Tensor] | None:
    """Collective. As ``to_owners``, for one table of any home rule."""
    homes, every = table.homes, range(table.homes.rows)
    packed = torch.cat([homes.read(column, every).contiguous().view(torch.uint8) for column in table.columns], dim=1)
    width = packed.shape[1]
    counts = [homes.count(rank, every) * width if table.is_mine else 0 for rank in range(world.size)]
    send = [packed.numel() if rank == table.owned[0] else 0 for rank in range(world.size)]
    received = world.all_to_all(packed.view(-1), send, counts).view(-1, width)
    if not table.is_mine:
        return None
    order = devices.ordered(homes.home_of(torch.arange(homes.rows, device=received.device)), world.size)[0]
    whole = torch.empty_like(received).index_copy_(0, order, received)
    parts = torch.split(whole, _row_bytes(table), dim=1)
    return [
        part.clone(memory_format=torch.contiguous_format).view(column.dtype).to(device)
        for part, column in zip(parts, table.columns, strict=True)
    ]


def _from_owner(world: Peers, table: OwnedTable, columns: Sequence[torch.Tensor] | None) -> None:
    """Collective. The inverse of ``_to_owner``."""
    homes, every = table.homes, range(table.homes.rows)
    device, width = table.columns[0].device, sum(_row_bytes(table))
    mine = homes.count(homes.rank, every) * width
    send, counts = torch.empty(0, dtype=torch.uint8, device=device), [0] * world.size
    if columns is not None:
        given = [
            column.to(device, held.dtype).contiguous().view(torch.uint8)
            for column, held in zip(columns, table.columns, strict=True)
        ]
        order, of_homes = devices.ordered(homes.home_of(torch.arange(homes.rows, device=device)), world.size)
        send = torch.cat(given, dim=1).index_select(0, order).view(-1)
        counts = [number * width for number in of_homes.tolist()]
    received = world.all_to_all(send, counts, [mine if rank == table.owned[0] else 0 for rank in range(world.size)])
    parts = torch.split(received.view(-1, width), _row_bytes(table), dim=1)
    for part, held in zip(parts, table.columns, strict=True):
        homes.write(held, every, part.clone(memory_format=torch.contiguous_format).view(held.dtype))


def _row_bytes(table: OwnedTable) -> list[int]:
    return [column.shape[1] * column.element_size() for column in table.columns]


def _rounds(tables: Sequence[OwnedTable]) -> list[list[int]]:
    """Return the indices of the spread tables of each round."""
    spread = [(i, table.owned[1]) for i, table in enumerate(tables) if table.homes.spread]
    rounds: list[list[int]] = [[] for _ in range(1 + max((number for _, number in spread), default=-1))]
    for i, number in spread:
        rounds[number].append(i)
    return [of_round for of_round in rounds if of_round]


def _counts(world: Peers, tables: Sequence[OwnedTable], of_round: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (bytes that a rank sends to each owner, bytes that this rank receives from each)."""
    counts = [0] * world.size
    for i in of_round:
        counts[tables[i].owned[0]] += sum(tables[i].sent_bytes)
    return counts, [counts[world.index]] * world.size


def _exchange(
    world: Peers, parts: Sequence[torch.Tensor], send_counts: list[int], receive_counts: list[int]
) -> torch.Tensor:
    return world.all_to_all(torch.cat(list(parts)), send_counts, receive_counts)


def _padded(table: OwnedTable, column: RowColumn) -> torch.Tensor:
    mine = table.homes.read(column, range(table.homes.rows))
    part = column.new_zeros((table.each, column.shape[1]))
    part[: len(mine)] = mine
    return part


def _flat_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1).view(torch.uint8)
