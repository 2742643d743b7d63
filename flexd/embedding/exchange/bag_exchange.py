"""Pools features at the owner: ids travel to the homes of their rows bag by bag, and one vector per bag comes back.

A home looks the ids up that arrive as if they were its own, so that tiers, prefetch pipeline, tiered storage,
accumulation and optimizers are those of every other look-up. Bags take the hops of rows from the last to the first, so
that the sums of a node are added before they leave it::

    rail   every rank sends the ids of each bag to the rank of equal local rank in the node of their homes
    node   that rank sends them on to the homes, which add up the rows of each bag
    back   that rank adds the sums of its node: one vector for each bag and node that has any id crosses the network

The gradient of a bag takes the way of its ids. Received vectors are added in the order of the peers, those of the rank
itself last. A message has one word per id: its key, or the complement of its key where a bag ends, so that no lengths
travel.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch.nn import functional

from flexd.core.step_phases import StepPhase
from flexd.embedding import devices
from flexd.embedding.exchange.calls import in_phase
from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.column import Column, add_columns, joined_columns
from flexd.embedding.exchange.hop import AGREEMENT_NUMBERS, Agreement, Counts, Hop, host_numbers, with_parts_transposed
from flexd.embedding.exchange.route import (
    BagIds,
    BagLeg,
    BagRoute,
    FeatureKeys,
    LookedUpRows,
    Route,
    StationRows,
    counts_of_group,
)
from flexd.embedding.exchange.router import Router
from flexd.embedding.replicas.touched_rows import TouchedRows
from flexd.embedding.store.store import GroupStore

_NARROW_KEYS = 2**31


class SummingRouter(Router):
    """Sends the ids of bags to the homes of their rows before a look-up, and looks up the ids that arrive with it.

    Every look-up exchanges sizes and ids of bags, also on ranks that have none, so that
    look-ups of all ranks meet. Sums of bags travel in the dtype of rows, and are added in ``wide``.
    """

    def __init__(
        self, stores: Sequence[GroupStore], hops: Sequence[Hop], traffic: Traffic, comm_dtype: str | None = None
    ) -> None:
        super().__init__(stores, hops, traffic, comm_dtype)
        self._groups = len(self.wire)
        self._world_size = stores[0].world_size
        # Keys below 2^31 travel in 4 bytes.
        self._word = torch.int32 if stores[-1].group.end_key <= _NARROW_KEYS else torch.int64
        none = torch.empty(0, dtype=torch.int64, device=stores[0].rows.device)
        self._no_ids = BagIds(none, none, [0] * self._groups, [0] * self._groups)

    def find(
        self,
        found: FeatureKeys,
        agreement: Agreement,
        touched: TouchedRows | None = None,
        changed: torch.Tensor | None = None,
    ) -> Route:
        """As ``Router.find``; the requests of each dim-group are its keys, then the ids of bags that arrived."""
        arrived, route, met = self.send_bags(found.bags, agreement)
        if met.diverged:
            return Route((), (), (), met, ())
        own = found.keys.split_with_sizes(found.numbers)
        pairs = zip(own, arrived.split_with_sizes(list(route.numbers)), strict=True)
        both = torch.cat([part for pair in pairs for part in pair])
        totals = [own + of_bags for own, of_bags in zip(found.numbers, route.numbers, strict=True)]
        addresses = (found.keys, (found.bags or self._no_ids).keys)
        looked_up = LookedUpRows(addresses, None, sum(map(len, addresses)))
        found = replace(found, keys=both, numbers=totals)
        return replace(super().find(found, agreement, touched, changed), bags=route, looked_up=looked_up)

    def meet(self, agreement: Agreement) -> Agreement:
        """As ``Router.meet``; a look-up begins with the sizes of bags."""
        none = torch.zeros(self._groups, dtype=torch.int64, device=self._no_ids.keys.device)
        for hop in reversed(self.hops):
            sizes = none.repeat(hop.peers.size)
            _, _, agreement = self._exchange_sizes(hop, sizes, sizes, agreement)
        return agreement

    @in_phase(StepPhase.IDS)
    def send_bags(self, ids: BagIds | None, agreement: Agreement) -> tuple[torch.Tensor, BagRoute, Agreement]:
        """Send the ids of bags to the homes of their rows. The bags may be any numbers if the look-up is given up.

        Args:
            ids: None: this rank has no bag.

        Returns:
            (int64 [n] keys of the ids that arrived, dim-group by dim-group; their route; the agreement of all ranks if
            they make different calls, nothing is sent then).
        """
        ids = ids or self._no_ids
        legs = []
        for hop in reversed(self.hops):
            leg, ids, agreement = self._over(hop, ids, agreement)
            legs.append(leg)
        return ids.keys, BagRoute(tuple(legs), ids.bag, ids.numbers, ids.bags), agreement

    def _over(self, hop: Hop, ids: BagIds, agreement: Agreement) -> tuple[BagLeg, BagIds, Agreement]:
        peers, groups = hop.peers.size, self._groups
        section = hop.destination(ids.keys % self._world_size)
        bag = ids.bag
        if groups > 1:
            firsts = _of_groups([range(0, groups * peers, peers), _starts(ids.bags)], ids.numbers, bag.device)
            section, bag = section + firsts[0], bag - firsts[1]
        order, sizes = devices.ordered(section, groups * peers)
        keys, bag, section = (column.index_select(0, order) for column in (ids.keys, bag, section))
        last = torch.ones_like(keys, dtype=torch.bool)
        torch.ne(bag[1:], bag[:-1], out=last[:-1])
        last[:-1] |= section[1:] != section[:-1]
        ends = last.to(torch.int64)
        part_sizes = devices.sum_by_place(section, ends, groups * peers)
        (sent, sent_parts), (received, received_parts), met = self._exchange_sizes(hop, sizes, part_sizes, agreement)
        if met.diverged:
            return BagLeg([0] * groups, [], sent_parts, received_parts), self._no_ids, met
        words = torch.where(last, ~keys, keys).to(self._word)
        # Ordered by dim-group, and sent peer by peer.
        flat = with_parts_transposed(words, sent.T) if words.shape[0] else words
        column = Column(flat.view(-1, 1), None, sent.sum(axis=1).tolist(), received.sum(axis=1).tolist(), self._word)
        arrived = hop.exchange([column])[0].whole(self._word).view(-1)
        words = with_parts_transposed(arrived, received)
        ended = words < 0
        ends_in = ended.to(torch.int64)
        places = bag.new_empty(int(sent_parts.sum())).scatter_(0, ends.cumsum(0) - ends, bag)
        of_groups = places.split_with_sizes(sent_parts.sum(axis=0).tolist())
        leg = BagLeg(ids.bags, of_groups, sent_parts, received_parts)
        arrived_ids = BagIds(
            torch.where(ended, ~words, words).to(torch.int64),
            ends_in.cumsum(0) - ends_in,
            received.sum(axis=0).tolist(),
            received_parts.sum(axis=0).tolist(),
        )
        return leg, arrived_ids, met

    def _exchange_sizes(
        self, hop: Hop, ids: torch.Tensor, parts: torch.Tensor, agreement: Agreement
    ) -> tuple[tuple[Counts, Counts], tuple[Counts, Counts], Agreement]:
        """Exchange int64 [groups x peers] numbers of ids and of parts, each of which comes back as a vector.

        Returns:
            (int64 [peers, dim-groups] numbers of ids and of parts that are sent, those that are received, the combined
            agreement of the peers).
        """
        peers, groups = hop.peers.size, self._groups
        words = devices.uploaded(agreement.pack(), ids.device).unsqueeze(1).expand(AGREEMENT_NUMBERS, peers)
        sent = torch.cat([ids.view(groups, peers), parts.view(groups, peers), words]).t().reshape(-1)
        width = 2 * groups + AGREEMENT_NUMBERS
        received = hop.peers.all_to_all(sent, [width] * peers, [width] * peers, is_first=True)
        rows = host_numbers(torch.cat([sent, received])).reshape(2, peers, width)
        numbers = rows[:, :, : 2 * groups].reshape(2, peers, 2, groups)
        met = Agreement.combined(rows[1, :, 2 * groups :].tolist())
        return (numbers[0, :, 0], numbers[0, :, 1]), (numbers[1, :, 0], numbers[1, :, 1]), met

    @in_phase(StepPhase.ROWS)
    def sums(self, route: Route, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Add up the rows of the bags that arrived; return per dim-group [bags, dim] sums of this rank's
        bags, in the dtype of the tables.

        Args:
            rows: as ``fetch`` returned them without ``expand``.
        """
        bags = route.bags
        if bags is None:
            return []
        offsets = _offsets(devices.sum_by_place(bags.bag, None, sum(bags.bags)), bags.bags, bags.numbers)
        totals = [
            functional.embedding_bag(index, of_rows.to(wide), ends, mode="sum", include_last_offset=True)
            for index, of_rows, wide, ends in zip(
                _requests_of_bags(bags, route.stations[0]), rows, self.wide, offsets, strict=True
            )
        ]
        for leg, hop in zip(reversed(bags.legs), self.hops, strict=True):
            columns = [
                Column(total, None, counts_of_group(g, leg.received), counts_of_group(g, leg.sent), wire)
                for g, (total, wire) in enumerate(zip(totals, self.wire, strict=True))
            ]
            arrived = hop.exchange(columns)
            shapes = [(number, total.shape[1]) for number, total in zip(leg.bags, totals, strict=True)]
            totals = devices.zeros(shapes, self.wide, totals[0].device)
            add_columns(arrived, totals, leg.places)
        return [total.to(store.values_dtype) for total, store in zip(totals, self._stores, strict=True)]

    @in_phase(StepPhase.PUSH)
    def spread(self, passes: Sequence[tuple[Route, Sequence[torch.Tensor] | None]]) -> list[list[torch.Tensor]]:
        """Collective. Carry the gradients of the bags of several passes to the homes, in one message a hop.

        Args:
            passes: routes with per dim-group [bags, dim] gradients of this rank's bags; None: zero.

        Returns:
            Of each pass per dim-group [rows of its first station, dim] gradients of the rows that it added up.
        """
        routes = [route.bags for route, _ in passes if route.bags is not None]
        grads = [
            self._zeros(bags.legs[0].bags if bags.legs else bags.bags)
            if of_pass is None
            else [grad.to(wide) for grad, wide in zip(of_pass, self.wide, strict=True)]
            for bags, (_, of_pass) in zip(routes, passes, strict=True)
        ]
        for number, hop in enumerate(reversed(self.hops)):
            columns = []
            for bags, of_pass in zip(routes, grads, strict=True):
                leg = bags.legs[number]
                columns += [
                    Column(grad, at, counts_of_group(g, leg.sent), counts_of_group(g, leg.received), wire)
                    for g, (grad, at, wire) in enumerate(zip(of_pass, leg.places, self.wire, strict=True))
                ]
            joined = joined_columns(hop.exchange(columns))
            arrived = [rows.to(wide) for rows, wide in zip(joined, self.wide * len(passes), strict=True)]
            grads = [arrived[at : at + self._groups] for at in range(0, len(arrived), self._groups)]
        return [
            self._of_rows(bags, route.stations[0], of_pass)
            for bags, (route, _), of_pass in zip(routes, passes, grads, strict=True)
        ]

    def _of_rows(
        self, route: BagRoute, first: Sequence[StationRows], grads: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return per dim-group [rows, dim] gradients of rows whose sums have [bags, dim] gradients: the sum over the
        bags of each row, in their order."""
        rows = [of_group.rows for of_group in first]
        index, bag = torch.cat(_requests_of_bags(route, first)), route.bag
        if self._groups > 1:
            firsts = _of_groups([_starts(rows), _starts(route.bags)], route.numbers, bag.device)
            index, bag = index + firsts[0], bag - firsts[1]
        order = torch.sort(index, stable=True).indices
        return [
            functional.embedding_bag(bags, grad, ends, mode="sum", include_last_offset=True)
            for bags, grad, ends in zip(
                bag.index_select(0, order).split_with_sizes(list(route.numbers)),
                grads,
                _offsets(devices.sum_by_place(index, None, sum(rows)), rows, route.numbers),
                strict=True,
            )
        ]


def _starts(numbers: Sequence[int]) -> list[int]:
    """Return the sum of the numbers before each."""
    return list(accumulate(numbers, initial=0))[:-1]


def _requests_of_bags(route: BagRoute, first: Sequence[StationRows]) -> list[torch.Tensor]:
    """Return per dim-group int64 [ids that arrived] rows of the first station."""
    requests = [rows.row_of_request for rows in first]
    return [each[each.shape[0] - number :] for each, number in zip(requests, route.numbers, strict=True)]


def _of_groups(numbers: Sequence[Sequence[int]], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """Repeat [k][dim-groups] numbers as often as each dim-group has ids: int64 [k, ids]."""
    both = devices.uploaded([*map(list, numbers), list(sizes)], device)
    return both[:-1].repeat_interleave(both[-1], dim=1, output_size=sum(sizes))


def _offsets(counts: torch.Tensor, sizes: Sequence[int], numbers: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return of each dim-group int64 [size + 1] offsets, from 0 on, of int64 [sum of sizes] counts that sum to its
    number."""
    return joined_offsets([[part] for part in counts.split_with_sizes(list(sizes))], numbers)


def joined_offsets(lengths: Sequence[Sequence[torch.Tensor]], numbers: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return int64 offsets of each list of lengths, from 0 on; the lengths of each sum to its number. Two kernels and
    an upload serve any number of lists."""
    if not lengths:
        return []
    # A sum over all lengths begins again at 0 for each list, since the ids of the one before are subtracted there.
    firsts = [0, *(-number for number in numbers[:-1])]
    begins = torch.split(devices.uploaded(firsts, lengths[0][0].device), 1)
    pieces = [piece for begin, of_list in zip(begins, lengths, strict=True) for piece in (begin, *of_list)]
    sums = torch.cat(pieces).cumsum(0)
    return sums.split_with_sizes([1 + sum(piece.shape[0] for piece in of_list) for of_list in lengths])
