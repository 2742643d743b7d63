"""Gather whole tables and compare replicas with their home copies, for tests, exports and health checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flexd.core.layout import Tier
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.store.store import GroupStore


def gather_rows(groups: ChainGroups, store: GroupStore, first_key: int, rows: int) -> torch.Tensor:
    """Collective. Return [rows, dim] home rows of the keys from ``first_key``, on every rank."""
    world_size = groups.layout.world_size
    part = store.rows.new_zeros((-(-store.group.rows // world_size), store.rows.shape[1]))
    part[: store.home_rows] = store.rows[: store.home_rows]
    parts = groups.world.all_gather(part)
    keys = torch.arange(first_key, first_key + rows, device=part.device)
    home = keys % world_size
    first_home_key = store.group.first_key + (home - store.group.first_key) % world_size
    return parts[home, (keys - first_home_key) // world_size]


def replicas_bit_equal(groups: ChainGroups, stores: Sequence[GroupStore]) -> bool:
    """Collective. Return whether all replicas, with optimizer state, equal their home copies bit for bit."""
    equal = True
    for store in stores:
        for tier, holders in ((Tier.NODE, groups.rail), (Tier.DEVICE, groups.world)):
            slots = store.directory.slots_at(store.directory.at_tier(tier))
            equal &= _equal_everywhere(store.pack(slots), holders)
    verdict = torch.tensor([int(equal)], device=stores[0].rows.device)
    groups.world.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict.item())


def _equal_everywhere(packed: torch.Tensor, holders: Peers) -> bool:
    return all(torch.equal(packed, other) for other in holders.all_gather(packed))
