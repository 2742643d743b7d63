"""Carry whole tables between the homes of their rows and the one rank that saves each.

Thousands of ranks that each save a block of thousands of tables would write millions of blocks of a few rows. A table
that fits a window is therefore saved by one rank, its *owner*, to which the homes send their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flexd.embedding import devices
from flexd.embedding.checkpoint import blocks
from flexd.embedding.checkpoint.blocks import TableHomes
from flexd.embedding.exchange.collectives import Peers

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tier import RowColumn


def assign_owners(table_bytes: Sequence[int], world_size: int) -> list[int | None]:
    """Spread the tables evenly, by bytes, over owners in ascending order. None: too large for a window; it has none."""
    fits = [size <= blocks.MAX_WINDOW_BYTES for size in table_bytes]
    total = sum(size for size, owned in zip(table_bytes, fits, strict=True) if owned)
    owners: list[int | None] = []
    before = 0
    for size, owned in zip(table_bytes, fits, strict=True):
        owners.append(min(before * world_size // max(1, total), world_size - 1) if owned else None)
        before += size if owned else 0
    return owners


def to_owner(
    world: Peers, homes: TableHomes, columns: Sequence[RowColumn], owner: int, device: torch.device
) -> list[torch.Tensor] | None:
    """Collective. Return the whole columns of a table on ``device`` at its owner, None on the other ranks.

    Args:
        columns: [slots, c] of this rank.
    """
    is_mine, every = owner == homes.rank, range(homes.rows)
    packed = torch.cat([homes.read(column, every).contiguous().view(torch.uint8) for column in columns], dim=1)
    width = packed.shape[1]
    counts = [homes.count(rank, every) * width if is_mine else 0 for rank in range(world.size)]
    send = [packed.numel() if rank == owner else 0 for rank in range(world.size)]
    received = world.all_to_all(packed.view(-1), send, counts).view(-1, width)
    if not is_mine:
        return None
    order = devices.ordered(homes.home_of(torch.arange(homes.rows, device=received.device)), world.size)[0]
    whole = torch.empty_like(received).index_copy_(0, order, received)
    return [
        part.clone(memory_format=torch.contiguous_format).view(column.dtype).to(device)
        for part, column in zip(torch.split(whole, _row_bytes(columns), dim=1), columns, strict=True)
    ]


def from_owner(
    world: Peers, homes: TableHomes, columns: Sequence[RowColumn], owner: int, whole: Sequence[torch.Tensor] | None
) -> None:
    """Collective. Write the ``whole`` columns that the owner has to the homes; the inverse of ``to_owner``."""
    every, row_bytes, device = range(homes.rows), _row_bytes(columns), columns[0].device
    width = sum(row_bytes)
    mine = homes.count(homes.rank, every) * width
    send, counts = torch.empty(0, dtype=torch.uint8, device=device), [0] * world.size
    if whole is not None:
        given = [
            column.to(device, held.dtype).contiguous().view(torch.uint8)
            for column, held in zip(whole, columns, strict=True)
        ]
        order, of_homes = devices.ordered(homes.home_of(torch.arange(homes.rows, device=device)), world.size)
        send = torch.cat(given, dim=1).index_select(0, order).view(-1)
        counts = [number * width for number in of_homes.tolist()]
    received = world.all_to_all(send, counts, [mine if rank == owner else 0 for rank in range(world.size)])
    for part, held in zip(torch.split(received.view(-1, width), row_bytes, dim=1), columns, strict=True):
        homes.write(held, every, part.clone(memory_format=torch.contiguous_format).view(held.dtype))


def _row_bytes(columns: Sequence[RowColumn]) -> list[int]:
    return [column.shape[1] * column.element_size() for column in columns]
