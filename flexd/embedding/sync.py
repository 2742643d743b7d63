"""Replica synchronisation: all holders of a replicated row apply the same summed gradient at the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flexd.embedding.groups import ChainGroups, Peers
from flexd.embedding.optimizer import RowOptimizer
from flexd.embedding.route import GroupStop
from flexd.embedding.store import GroupStore
from flexd.embedding.traffic import Kind, Traffic
from flexd.layout import Tier

Landed = list[tuple[GroupStop, torch.Tensor]]
"""Per station: what was held there, and its gradients [held, dim]."""

Touched = list[torch.Tensor]
"""Per dim-group: bool [rows of the directory]."""


@dataclass(frozen=True)
class Summed:
    """Gradients of one step, summed over all ranks: [n, dim] of the rows of dim-group ``group`` at ``slots`` int64 [n],
    unique. The same rows in the same order on every holder of them."""

    group: int
    slots: torch.Tensor
    grads: torch.Tensor


@dataclass(frozen=True)
class _Sparse:
    """Gradients [n, dim] of the rows at ``index`` int64 [n], unique."""

    index: torch.Tensor
    grads: torch.Tensor


def sum_by(index: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n] and [n, dim] -> unique ascending indices and the sums of their gradients."""
    unique, inverse = torch.unique(index, return_inverse=True)
    return unique, grads.new_zeros((len(unique), grads.shape[1])).index_add_(0, inverse, grads)


class ReplicaSync:
    """Turns the gradients that landed on this rank into updates of its rows."""

    def __init__(self, groups: ChainGroups, stores: Sequence[GroupStore], traffic: Traffic) -> None:
        self._groups = groups
        self._stores = list(stores)
        self._traffic = traffic

    def reduce(self, landed: Sequence[Landed], touched: Touched | None = None) -> list[Summed]:
        """Collective. ``landed`` per dim-group -> the gradients of all rows that this rank holds and any rank touched:
        of home rows, then of replicated rows, which every holder has.

        Args:
            touched: by any holder, if that is known already (``union``).
        """
        summed: list[Summed] = []
        replicated: list[_Sparse] = []
        for group, parts in enumerate(landed):
            slots = torch.cat([stop.slots for stop, _ in parts])
            entries = torch.cat([stop.entries for stop, _ in parts])
            grads = torch.cat([grad for _, grad in parts])
            plain = entries < 0
            home = sum_by(slots[plain], grads[plain])
            summed.append(Summed(group, *home))
            replicated.append(_Sparse(*sum_by(entries[~plain], grads[~plain])))
        with self._traffic.kind(Kind.SYNC):
            for tier, peers in ((Tier.NODE, self._groups.rail), (Tier.DEVICE, self._groups.world)):
                summed.extend(self._reduce_tier(tier, peers, replicated, touched))
        return summed

    def union(self, lookups: Sequence[Touched]) -> list[Touched]:
        """Collective. What this rank touches of the replicated rows in each lookup -> what any holder touches."""
        merged = [[torch.zeros_like(mask) for mask in touched] for touched in lookups]
        with self._traffic.kind(Kind.SYNC):
            for tier, holders in ((Tier.NODE, self._groups.rail), (Tier.DEVICE, self._groups.world)):
                positions = [store.directory.positions[tier] for store in self._stores]
                sizes = [len(part) for part in positions]
                if not sum(sizes):
                    continue
                mine = [m.index_select(0, p) for touched in lookups for m, p in zip(touched, positions, strict=True)]
                parts = iter(torch.split(self._union(holders, torch.cat(mine)), sizes * len(lookups)))
                for masks in merged:
                    for mask, places in zip(masks, positions, strict=True):
                        mask[places] = next(parts)
        return merged

    def apply(self, summed: Sequence[Summed], optimizer: RowOptimizer, step: int) -> None:
        """Updates the rows. ``step``: as in ``RowOptimizer.update``."""
        # One call a tier and group with the same rows in the same order on every holder: bit-equal by construction.
        for part in summed:
            store = self._stores[part.group]
            optimizer.update(store.rows, store.state, part.slots, part.grads, step)

    def _reduce_tier(
        self, tier: Tier, holders: Peers, replicated: list[_Sparse], known: Touched | None
    ) -> list[Summed]:
        positions = [store.directory.positions[tier] for store in self._stores]
        listed = sum(len(part) for part in positions)
        if listed == 0:
            return []
        touched = known or [
            torch.zeros(len(store.directory), dtype=torch.bool, device=part.device).index_fill_(0, mine.index, True)
            for store, part, mine in zip(self._stores, positions, replicated, strict=True)
        ]
        union_mask = torch.cat([m.index_select(0, p) for m, p in zip(touched, positions, strict=True)])
        if known is None:
            union_mask = self._union(holders, union_mask)
        union = [
            part[mask].to(torch.int64)
            for part, mask in zip(positions, torch.split(union_mask, [len(part) for part in positions]), strict=True)
        ]
        grads = [
            self._densified(store, mine, rows, tier)
            for store, mine, rows in zip(self._stores, replicated, union, strict=True)
        ]
        for dtype in {grad.dtype: None for grad in grads}:
            same = [grad for grad in grads if grad.dtype == dtype]
            flat = torch.cat([grad.view(-1) for grad in same])
            flat = self._all_reduce(tier, flat)
            for grad, summed in zip(same, torch.split(flat, [grad.numel() for grad in same]), strict=True):
                grad.copy_(summed.view_as(grad))
        return [
            Summed(group, store.directory.slots_at(rows), grad)
            for group, (store, rows, grad) in enumerate(zip(self._stores, union, grads, strict=True))
        ]

    @staticmethod
    def _densified(store: GroupStore, mine: _Sparse, union: torch.Tensor, tier: Tier) -> torch.Tensor:
        """[union, dim] gradients of this rank, zero where it did not touch the row."""
        grads = store.rows.new_zeros((len(union), store.rows.shape[1]))
        of_tier = store.directory.tiers_at(mine.index) == tier
        grads.index_copy_(0, torch.searchsorted(union, mine.index[of_tier]), mine.grads[of_tier])
        return grads

    @staticmethod
    def _union(holders: Peers, touched: torch.Tensor) -> torch.Tensor:
        """bool [n] of this rank -> bool [n], touched on any holder. One bit a row travels."""
        if holders.size == 1:
            return touched
        if touched.is_cuda:
            wide = touched.to(torch.uint8)  # NCCL has no bitwise reduction
            holders.all_reduce(wide, dist.ReduceOp.MAX)
            return wide.bool()
        bits = (2 ** torch.arange(8, device=touched.device)).to(torch.uint8)
        padded = torch.nn.functional.pad(touched, (0, -len(touched) % 8)).view(-1, 8)
        packed = (padded * bits).sum(dim=1, dtype=torch.uint8)
        holders.all_reduce(packed, dist.ReduceOp.BOR)
        return (packed.unsqueeze(1) & bits).ne(0).view(-1)[: len(touched)]

    def _all_reduce(self, tier: Tier, flat: torch.Tensor) -> torch.Tensor:
        """NODE: over the rail. DEVICE: reduced inside the node, over the rail, then spread inside the node again, so
        that a sum crosses the network once a rail. Bit-equal on all holders: each part is summed in one place."""
        node, rail = self._groups.node, self._groups.rail
        if tier == Tier.NODE or node.size == 1:
            rail.all_reduce(flat)
            return flat
        if rail.size == 1:
            node.all_reduce(flat)
            return flat
        numel = flat.numel()
        part = -(-numel // node.size)
        padded = torch.nn.functional.pad(flat, (0, part * node.size - numel))
        counts = [part] * node.size
        mine = node.all_to_all(padded, counts, counts).view(node.size, part).sum(dim=0)
        rail.all_reduce(mine)
        return node.all_gather(mine).view(-1)[:numel]
