"""Gather whole tables and compare replicas with their home copies, for tests, exports and health checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from flexd.core.layout import Tier
from flexd.embedding import devices
from flexd.embedding.checkpoint.blocks import MAX_WINDOW_BYTES, TableHomes
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.store.store import GroupStore

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tier import RowColumn


def gather_rows(
    world: Peers, homes: TableHomes, held: RowColumn, device: torch.device | str | None = None
) -> torch.Tensor:
    """Collective. Return [rows, c] of a whole table on every rank; ``held`` is [slots, c].

    Windows of the table are gathered one after another, so that beside the result only a window is in memory.

    Args:
        device: of the result; default that of ``held``, on which the collectives are.
    """
    width = held.shape[1]
    table = torch.empty((homes.rows, width), dtype=held.dtype, device=device or held.device)
    each = max(1, MAX_WINDOW_BYTES // (max(1, width * held.element_size()) * world.size)) * homes.sharing
    for first in range(0, homes.rows, each):
        window = range(first, min(first + each, homes.rows))
        table[window.start : window.stop] = gather_block(world, homes, held, window)
    return table


def gather_block(world: Peers, homes: TableHomes, held: RowColumn, block: range) -> torch.Tensor:
    """Collective. Return [n, c] of n consecutive rows of a table on every rank, with one all-gather."""
    mine = homes.read(held, block)
    part = held.new_zeros((homes.most_rows(block), held.shape[1]))
    part[: len(mine)] = mine
    gathered = world.all_gather(part)
    if homes.spread:
        # The block's first row is the first of the rank that is its home, the next row of the next rank.
        by_offset = gathered.roll(-((homes.first_key + block.start) % world.size), dims=0)
        return by_offset.transpose(0, 1).reshape(-1, held.shape[1])[: len(block)]
    home = homes.home_of(torch.arange(block.start, block.stop, device=held.device))
    order, counts = devices.ordered(home, world.size)
    rows = torch.cat([of_rank[:count] for of_rank, count in zip(gathered, counts.tolist(), strict=True)])
    return rows.new_empty(rows.shape).index_copy_(0, order, rows)


def replicas_bit_equal(groups: ChainGroups, stores: Sequence[GroupStore]) -> bool:
    """Collective. Return whether all replicas, with optimizer state, equal their home copies bit for bit."""
    equal = True
    for number, store in enumerate(stores):
        for tier, holders in ((Tier.NODE, groups.rail), (Tier.DEVICE, groups.world)):
            slots = store.directory.slots_at(store.directory.at_tier(number, tier))
            equal &= _equal_everywhere(store.pack(slots), holders)
    verdict = torch.tensor([int(equal)], device=stores[0].rows.device)
    groups.world.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict.item())


def _equal_everywhere(packed: torch.Tensor, holders: Peers) -> bool:
    return all(torch.equal(packed, other) for other in holders.all_gather(packed))
