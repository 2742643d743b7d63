"""Carry whole tables between the homes of their rows and the one rank that saves each.

Thousands of ranks that each save a block of thousands of tables would write millions of blocks of a few rows. A table
that fits a window is therefore saved by one rank, its *owner*. Every rank sends an owner equally many bytes, so a table
arrives as rows of equal length and is put in order without a loop over ranks; tables travel together, in rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexd.embedding.checkpoint import blocks
from flexd.embedding.checkpoint.blocks import TableHomes
from flexd.embedding.exchange.collectives import Peers
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
    return found


def from_owners(world: Peers, tables: Sequence[OwnedTable], whole: Sequence[Sequence[torch.Tensor] | None]) -> None:
    """Collective. Write the columns that ``whole`` has for the tables of this rank to their homes; the inverse of
    ``to_owners``."""
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
            mine = table.homes.homed(table.homes.rank, range(table.homes.rows))
            for held, size in zip(table.columns, table.sent_bytes, strict=True):
                rows = received[at : at + size].clone().view(held.dtype).view(-1, held.shape[1])
                held[table.homes.slots(mine)] = rows[: len(mine)]
                at += size


def _rounds(tables: Sequence[OwnedTable]) -> list[list[int]]:
    """Return the indices of the tables of each round."""
    rounds: list[list[int]] = [[] for _ in range(1 + max((table.owned[1] for table in tables), default=-1))]
    for i, table in enumerate(tables):
        rounds[table.owned[1]].append(i)
    return rounds


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
    mine = table.homes.homed(table.homes.rank, range(table.homes.rows))
    part = column.new_zeros((table.each, column.shape[1]))
    part[: len(mine)] = column[table.homes.slots(mine)]
    return part


def _flat_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1).view(torch.uint8)
