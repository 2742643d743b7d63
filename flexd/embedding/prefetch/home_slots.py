"""Tells the homes which of their rows batches ahead look up, before these are located.

Ids go straight to their homes, once a rank and batch. What arrives is used to keep rows in fast memory (``LookAhead``)
and by nothing else, so a placement that changes in between does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.features import FeatureKeys
from flexd.embedding.store.store import GroupStore


class HomeSlots:
    """Exchanges the home slots of batches.

    Args:
        world: all ranks.
    """

    def __init__(self, stores: Sequence[GroupStore], world: Peers) -> None:
        self._stores = list(stores)
        self._world = world

    def exchange(self, found: FeatureKeys | None) -> list[torch.Tensor]:
        """Collective. Return of each dim-group int64 [n] ascending slots of this rank's home rows that any rank's batch
        looks up.

        Args:
            found: the keys of this rank's batch; None: it has none.
        """
        mine = self._by_home(found)
        if self._world.size == 1:
            return [of_group[0] for of_group in mine]
        counts = [[len(slots) for slots in of_group] for of_group in mine]
        device = self._stores[0].rows.device
        # Peer by peer, in each dim-group by dim-group.
        sent = torch.tensor(counts, dtype=torch.int64, device=device).T.contiguous()
        each = [len(mine)] * self._world.size
        arrived_counts = self._world.all_to_all(sent.view(-1), each, each).view(-1, len(mine))
        received = arrived_counts.tolist()
        message = torch.cat([of_group[peer] for peer in range(self._world.size) for of_group in mine]).to(torch.int32)
        arrived = self._world.all_to_all(message, sent.sum(dim=1).tolist(), [sum(of_peer) for of_peer in received])
        parts = arrived.split_with_sizes([number for of_peer in received for number in of_peer])
        return [
            torch.cat(parts[group :: len(mine)]).to(torch.int64).unique()  # type: ignore[no-untyped-call]
            for group in range(len(mine))
        ]

    def _by_home(self, found: FeatureKeys | None) -> list[list[torch.Tensor]]:
        """``[group][home]``: int64 ascending slots at their homes."""
        world, device = self._world.size, self._stores[0].rows.device
        if found is None:
            return [[torch.empty(0, dtype=torch.int64, device=device)] * world for _ in self._stores]
        result = []
        for store, keys in zip(self._stores, found.keys.split_with_sizes(found.numbers), strict=True):
            distinct = keys.unique()  # type: ignore[no-untyped-call]
            home = distinct % world
            order = home.argsort(stable=True)
            slots = torch.div(distinct - store.group.first_key, world, rounding_mode="floor").index_select(0, order)
            result.append(list(slots.split_with_sizes(torch.bincount(home, minlength=world).tolist())))
        return result
