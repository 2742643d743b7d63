"""One station of a look-up: which of the requested rows a rank holds, and whom the others are asked of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flexd.embedding.exchange.dedup import Dedup
from flexd.embedding.exchange.hop import Agreement, Counts, Hop
from flexd.embedding.replicas.replica_sync import Touched
from flexd.embedding.store.store import GroupStore

COUNT_SHIFT = 44
"""Bits of a key in a request; the accesses behind it are told in those above."""
_MAX_COUNT = (1 << (63 - COUNT_SHIFT)) - 1
_FEW_PEERS = 8


@dataclass(frozen=True)
class GroupStop:
    """One dim-group at one station. All tensors are int64 on the store's device.

    Attributes:
        rows: distinct rows dealt with here.
        expand: [requests] -> row; None if every row was requested once, in this order.
        held, slots, entries: rows held here, where they are in the store, and their directory position (-1: a
            plain home row).
        asked: rows asked of the next station, in the order in which they are sent.
    """

    rows: int
    expand: torch.Tensor | None
    held: torch.Tensor
    slots: torch.Tensor
    entries: torch.Tensor
    asked: torch.Tensor


@dataclass(frozen=True)
class Route:
    """``stops[station][group]``; ``asked[station]``, ``asked_of_me[station]`` for the hop after each station.

    Attributes:
        requests: ``[station][group]`` int64 keys: at the first station those of its rows, at later ones those asked of
            this rank, as they arrived.
        touched: the replicated rows it reads, if it was found for training and there are any.
    """

    stops: list[list[GroupStop]]
    asked: list[Counts]
    asked_of_me: list[Counts]
    agreement: Agreement
    requests: list[list[torch.Tensor]]
    touched: Touched | None = None


class Stations:
    """The stores of a rank, asked as a station is.

    Args:
        dedup: ask for each row once.
    """

    def __init__(self, stores: Sequence[GroupStore], *, dedup: bool) -> None:
        self.stores = list(stores)
        self._dedup = dedup
        self._distinct = [Dedup(store.group.first_key, store.group.rows, store.rows.device) for store in stores]

    @property
    def working_bytes(self) -> int:
        """Of the tables that find distinct keys."""
        return sum(distinct.nbytes for distinct in self._distinct)

    def stop(
        self, group: int, ids: torch.Tensor, weights: torch.Tensor | None, *, dedup: bool | None = None
    ) -> tuple[GroupStop, torch.Tensor, torch.Tensor]:
        """Looks requested keys up in this rank's store -> (stop, without order of what is asked; int64 [rows] keys;
        int64 [rows] accesses behind each)."""
        store = self.stores[group]
        keys, expand = self._distinct[group].find(ids) if self._dedup or dedup else (ids, None)
        if expand is None:
            counts = torch.ones_like(keys) if weights is None else weights
        elif weights is None:
            counts = torch.bincount(expand, minlength=len(keys))
        else:
            counts = torch.zeros_like(keys).scatter_add_(0, expand, weights)
        held, slots, entries = store.locate(keys)
        where, absent = held.nonzero().view(-1), (~held).nonzero().view(-1)
        slots, entries = slots.index_select(0, where), entries.index_select(0, where)
        return GroupStop(len(keys), expand, where, slots, entries, absent), keys, counts.clamp_(max=_MAX_COUNT)

    def by_peer(
        self, hop: Hop, stops: Sequence[GroupStop], keys: Sequence[torch.Tensor], *, in_order: bool = False
    ) -> tuple[list[GroupStop], torch.Tensor]:
        """The stops with what is asked ordered by peer (and key, if ``in_order``), and int64 [peers, groups] how
        many."""
        ordered, sizes = [], []
        for stop, of_group in zip(stops, keys, strict=True):
            asked = stop.asked
            if in_order:
                asked = asked.index_select(0, torch.argsort(of_group.index_select(0, asked)))
            peer = hop.destination(of_group.index_select(0, asked))
            if hop.peers.size <= _FEW_PEERS:
                order = torch.cat([(peer == number).nonzero().view(-1) for number in range(hop.peers.size)])
            else:
                order = torch.argsort(peer, stable=True)
            ordered.append(replace(stop, asked=asked.index_select(0, order)))
            sizes.append(torch.bincount(peer, minlength=hop.peers.size))
        return ordered, torch.stack(sizes, dim=1)


def rows_of(group: int, counts: Counts) -> list[int]:
    """Of one dim-group, by peer."""
    return [row[group] for row in counts]


def split(column: torch.Tensor, counts: Counts, group: int) -> tuple[torch.Tensor, ...]:
    """What is ordered by peer, peer by peer."""
    return torch.split(column, rows_of(group, counts))
