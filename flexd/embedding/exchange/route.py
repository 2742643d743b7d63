"""Routes of look-ups: the rows that each station on the way holds, and the rows that it requests from the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexd.embedding.exchange.hop import Agreement, Counts

COUNT_SHIFT = 44
"""A request is a key in the lower bits and its number of accesses in the bits above."""


@dataclass(frozen=True)
class BagIds:
    """Ids of bags, dim-group by dim-group and in each bag by bag.

    Attributes:
        keys: int64 [n].
        bag: int64 [n], ascending: the bag of each id, counted over all dim-groups.
        numbers: number of ids of each dim-group.
        bags: number of bags of each dim-group, empty ones among them.
    """

    keys: torch.Tensor
    bag: torch.Tensor
    numbers: Sequence[int]
    bags: Sequence[int]


@dataclass(frozen=True)
class FeatureKeys:
    """Ids of a batch as addresses (``flexd.core.keyspace``), which of tables spread over all ranks are keys.

    Attributes:
        order: names of the features whose rows are fetched, dim-group by dim-group.
        keys: int64 [n] addresses, feature by feature in this order. Ids out of range are moved into it.
        faulty: bool [] on the device: an id is out of range, or lengths do not fit the ids. None: cannot be.
        numbers: number of keys of each dim-group.
        bags: ids of the other features, pooled at the owner; None: there are none.
    """

    order: list[str]
    keys: torch.Tensor
    faulty: torch.Tensor | None
    numbers: list[int]
    bags: BagIds | None = None


@dataclass(frozen=True)
class StationRows:
    """Rows of one dim-group at one station. All tensors are int64 on the store's device.

    Rows are numbered so that none has to be moved: first the plain home rows, then the other rows that this rank holds,
    then those requested from the next station, in the order in which they are sent.

    Attributes:
        rows: number of distinct rows requested at the station.
        expand: [requests] -> row; None if every row was requested once, in this order.
        held: number of rows that this rank holds.
        slots: [held] their slots in the store.
        entries: [held] their entries in the ``Directory``; for a plain home row their number.
        plain: number of plain home rows.
    """

    rows: int
    expand: torch.Tensor | None
    held: int
    slots: torch.Tensor
    entries: torch.Tensor
    plain: int


@dataclass(frozen=True)
class BagLeg:
    """One hop of the bags. A *part* is what a bag has with one peer: its ids out, and one vector back.

    Attributes:
        bags: number of bags of each dim-group at the sender.
        places: per dim-group int64 [parts sent] bag in the dim-group of each part, peer by peer.
        sent, received: parts to and from each peer.
    """

    bags: Sequence[int]
    places: Sequence[torch.Tensor]
    sent: Counts
    received: Counts


@dataclass(frozen=True)
class BagRoute:
    """Where the ids of the bags of one look-up went, and the ids that this rank adds up.

    Attributes:
        legs: hop after hop.
        bag: int64 [ids that arrived], ascending: bag of each id, counted over all dim-groups.
        numbers: number of those ids of each dim-group; they are the last requests of the route's first station.
        bags: number of bags that this rank adds up, of each dim-group.
    """

    legs: tuple[BagLeg, ...]
    bag: torch.Tensor
    numbers: Sequence[int]
    bags: Sequence[int]


@dataclass(frozen=True)
class Route:
    """Where the rows of one look-up are.

    Attributes:
        stations: ``[station][group]``.
        requested: for the hop after each station, the rows requested from each peer.
        served: for the hop after each station, the rows that each peer requests here.
        agreement: combined over all ranks.
        keys: ``[station][group]`` int64: at the first station the keys of its rows, at later ones the requested keys in
            the order of their arrival.
        bags: of bags that are pooled at the owner; None: the collection has none.
    """

    stations: tuple[tuple[StationRows, ...], ...]
    requested: tuple[Counts, ...]
    served: tuple[Counts, ...]
    agreement: Agreement
    keys: tuple[tuple[torch.Tensor, ...], ...]
    bags: BagRoute | None = None


def counts_of_group(group: int, counts: Counts) -> list[int]:
    """Return the counts of one dim-group by peer."""
    found: list[int] = counts[:, group].tolist()
    return found
