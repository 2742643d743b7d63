"""Routes of look-ups: the rows that each station on the way holds, and the rows that it requests from the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexd.embedding.exchange.hop import Agreement, Counts

COUNT_SHIFT = 44
"""A request is a key in the lower bits and its number of accesses in the bits above."""


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
class Route:
    """Where the rows of one look-up are.

    Attributes:
        stations: ``[station][group]``.
        requested: for the hop after each station, the rows requested from each peer.
        served: for the hop after each station, the rows that each peer requests here.
        agreement: combined over all ranks.
        keys: ``[station][group]`` int64: at the first station the keys of its rows, at later ones the requested keys in
            the order of their arrival.
    """

    stations: tuple[tuple[StationRows, ...], ...]
    requested: tuple[Counts, ...]
    served: tuple[Counts, ...]
    agreement: Agreement
    keys: tuple[tuple[torch.Tensor, ...], ...]


def counts_of_group(group: int, counts: Counts) -> list[int]:
    """Return the counts of one dim-group by peer."""
    return [row[group] for row in counts]


def split_by_peer(column: torch.Tensor, counts: Counts, group: int) -> tuple[torch.Tensor, ...]:
    """Split a tensor of one dim-group that is ordered by peer."""
    return torch.split(column, counts_of_group(group, counts))
