"""From gradients that landed on a rank to updates of its rows: the same on all holders of a row, at the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexd.core.layout import Tier
from flexd.embedding.exchange.dedup import Dedup
from flexd.embedding.exchange.route import Router
from flexd.embedding.exchange.station import GroupStop, Route
from flexd.embedding.replicas.replica_sync import Touched
from flexd.embedding.row_optimizers import RowOptimizer
from flexd.embedding.store.store import GroupStore

Landed = list[tuple[GroupStop, torch.Tensor]]
"""Per station: what was held there, and its gradients [held, dim]."""


@dataclass(frozen=True)
class Summed:
    """Gradients of one step, summed over all ranks: [n, dim] of the rows of dim-group ``group`` at ``slots`` int64 [n],
    unique, as wide as they are added (``Router.wide``). The same rows in the same order on every holder of them."""

    group: int
    slots: torch.Tensor
    grads: torch.Tensor


def sum_by(index: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n] and [n, dim] -> unique ascending indices and the sums of their gradients."""
    unique, inverse = torch.unique(index, return_inverse=True)
    return unique, grads.new_zeros((len(unique), grads.shape[1])).index_add_(0, inverse, grads)


class ReplicaSync:
    """Turns the gradients that landed on this rank into updates of its rows."""

    def __init__(self, stores: Sequence[GroupStore], router: Router) -> None:
        self._stores = list(stores)
        self._router = router
        self._distinct = [Dedup(0, store.home_rows, store.rows.device) for store in self._stores]

    @property
    def working_bytes(self) -> int:
        """Of the tables that find distinct slots."""
        return sum(distinct.nbytes for distinct in self._distinct)

    def push(self, passes: Sequence[tuple[Route, list[torch.Tensor]]], touched: Touched | None) -> list[Summed]:
        """Collective. Carries the gradients of a step's passes to their rows, each row's once.

        Args:
            passes: routes, and per dim-group [rows of the first station, dim] gradients.
            touched: the replicated rows that any rank has gradients of; None if there are none.

        Returns:
            The gradients of all rows that this rank holds and any rank touched: of plain home rows, then of replicated
            rows, which every holder has.
        """
        replicas = None if touched is None else self._router.sums(touched)
        landed = self._router.push(*self._router.merged(passes), replicas)
        summed = [Summed(group, *self._at_home(group, parts)) for group, parts in enumerate(landed)]
        if replicas is not None and touched is not None:
            self._router.spread(replicas)
            for group, store in enumerate(self._stores):
                positions = touched.positions(group)
                tiers, slots = store.directory.tiers_at(positions), store.directory.slots_at(positions)
                for tier in (Tier.NODE, Tier.DEVICE):
                    at, grads = replicas.at(group, tiers, tier)
                    summed.append(Summed(group, slots.index_select(0, at), grads))
        return summed

    def apply(self, summed: Sequence[Summed], optimizer: RowOptimizer, step: int) -> None:
        """Updates the rows. ``step``: as in ``RowOptimizer.update``."""
        # One call a tier and group with the same rows in the same order on every holder: bit-equal by construction.
        for part in summed:
            store = self._stores[part.group]
            optimizer.update(store.rows, store.state, part.slots, part.grads, step)

    def _at_home(self, group: int, parts: Landed) -> tuple[torch.Tensor, torch.Tensor]:
        """Of plain home rows, which land at the first station from this rank and at later ones from others."""
        slots, grads = [], []
        listed = len(self._stores[group].directory) > 0
        for stop, grad in parts:
            plain = (stop.entries < 0).nonzero().view(-1) if listed else None
            slots.append(stop.slots if plain is None else stop.slots.index_select(0, plain))
            grads.append(grad if plain is None else grad.index_select(0, plain))
        distinct, places = self._distinct[group].find(torch.cat(slots))
        if places is None:
            total = torch.cat(grads) if len(grads) > 1 else grads[0]
        else:
            total = grads[0].new_zeros((len(distinct), grads[0].shape[1]))
            for at, grad in zip(torch.split(places, [len(part) for part in slots]), grads, strict=True):
                total.index_add_(0, at, grad)
        # As rounded as the sum that copies of a replicated row are given: what is learned must not show the placement.
        return distinct, total.to(self._router.wire[group]).to(total.dtype)
