"""A router of look-ups in which some features are pooled at the homes of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flexd.embedding.exchange.bag_exchange import BagExchange, BagIds
from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.hop import Agreement, Hop
from flexd.embedding.exchange.route import Route
from flexd.embedding.exchange.router import LookupPiggyback, Router
from flexd.embedding.store.store import GroupStore


class SummingRouter(Router):
    """Sends the ids of bags to the homes of their rows before a look-up, and looks up the ids that arrive with it.

    Every look-up exchanges sizes and ids of bags, also on ranks that have none, so that
    look-ups of all ranks meet.

    Args:
        hops: of rows.
        bag_hops: of bags, from the rank that has them to the home.
        comm_dtype: as in ``Router``.
    """

    def __init__(
        self,
        stores: Sequence[GroupStore],
        hops: Sequence[Hop],
        traffic: Traffic,
        *,
        bag_hops: Sequence[Hop],
        comm_dtype: str | None = None,
    ) -> None:
        super().__init__(stores, hops, traffic, comm_dtype=comm_dtype)
        self.bags = BagExchange(
            bag_hops,
            traffic,
            self.wire,
            self.wide,
            world_size=stores[0].world_size,
            end_key=stores[-1].group.end_key,
            device=stores[0].rows.device,
        )

    def change_hops(self, hops: Sequence[Hop], bag_hops: Sequence[Hop] = ()) -> None:
        super().change_hops(hops)
        self.bags.hops = list(bag_hops)

    def find(
        self,
        keys: torch.Tensor,
        agreement: Agreement,
        piggyback: LookupPiggyback | None = None,
        faulty: torch.Tensor | None = None,
        numbers: Sequence[int] | None = None,
        bags: BagIds | None = None,
        changed: torch.Tensor | None = None,
    ) -> Route:
        """As ``Router.find``; the requests of each dim-group are its keys, then the ids of bags that arrived."""
        arrived, route = self.bags.send(bags)
        if numbers is None:
            keys, numbers = self._lookup.by_group(keys)
        pairs = zip(keys.split_with_sizes(list(numbers)), arrived.split_with_sizes(list(route.numbers)), strict=True)
        both = torch.cat([part for pair in pairs for part in pair])
        totals = [own + of_bags for own, of_bags in zip(numbers, route.numbers, strict=True)]
        return replace(super().find(both, agreement, piggyback, faulty, totals, changed=changed), bags=route)

    def sums(self, route: Route, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Return per dim-group [bags, dim] sums of this rank's bags, in the dtype of the tables.

        Args:
            rows: as ``fetch`` returned them without ``expand``.
        """
        if route.bags is None:
            return []
        totals = self.bags.sums(route.bags, route.stations[0], rows)
        return [total.to(store.dtype) for total, store in zip(totals, self._stores, strict=True)]

    def spread(self, passes: Sequence[tuple[Route, Sequence[torch.Tensor] | None]]) -> list[list[torch.Tensor]]:
        """Collective. Return of each pass per dim-group [rows of station 0, dim] gradients of the rows of its bags.

        Args:
            passes: routes with per dim-group [bags, dim] gradients of this rank's bags; None: zero.
        """
        given = []
        for route, grads in passes:
            if route.bags is None:
                raise AssertionError("a route without bags")
            given.append((route.bags, route.stations[0], self._no_grads(route) if grads is None else grads))
        return self.bags.spread(given)

    def _no_grads(self, route: Route) -> list[torch.Tensor]:
        assert route.bags is not None  # noqa: S101
        return self._zeros(route.bags.legs[0].bags if route.bags.legs else route.bags.bags)
