"""Looks the requests of all dim-groups up at one station, with a number of kernels that grows with none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from flexd.embedding import devices
from flexd.embedding.exchange.dedup import Dedup
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.route import COUNT_SHIFT, StationRows
from flexd.embedding.store.listed_rows import ListedRows
from flexd.embedding.store.store import GroupStore

_MAX_COUNT = (1 << (63 - COUNT_SHIFT)) - 1


@dataclass(frozen=True)
class LocatedRows:
    """Distinct rows requested at a station, dim-group by dim-group. The host has not read any number of them.

    A *section* holds rows of one kind: of each dim-group its plain home rows, then its held listed rows; then of each
    dim-group and peer the rows requested from the peer.

    Attributes:
        keys: int64 [m].
        expand: int64 [requests] -> row; None if every row was requested once, in this order.
        accesses: int64 [m] accesses to each row.
        slots, entries: int64 [m]; undefined slot and -1 for a row that is not held, -1 for a plain home row.
        order: int64 [m] rows, section by section.
        sections: int64 [sections] numbers of rows.
        home: bool [m].
        groups: int64 [m] dim-groups; None if there is one.
    """

    keys: torch.Tensor
    expand: torch.Tensor | None
    accesses: torch.Tensor
    slots: torch.Tensor
    entries: torch.Tensor
    order: torch.Tensor
    sections: torch.Tensor
    home: torch.Tensor
    groups: torch.Tensor | None


class StationLookup:
    """Looks requested keys up in the stores of this rank.

    Args:
        dedup: request each row once.
    """

    def __init__(self, stores: Sequence[GroupStore], *, dedup: bool) -> None:
        self.stores = list(stores)
        self.groups = len(self.stores)
        self._deduplicates = dedup
        first, end = stores[0].group.first_key, stores[-1].group.end_key
        device = stores[0].rows.device
        self._dedup = Dedup(first, end - first, device)
        self._world_size, self._rank = stores[0].world_size, stores[0].rank
        self._first_keys = torch.tensor([store.group.first_key for store in stores], device=device)
        turns = [(store.first_home_key - self._rank) // self._world_size for store in stores]
        self._first_turns = torch.tensor(turns, device=device)
        self._first_turn = turns[0]
        self._group_numbers = torch.arange(self.groups, device=device)
        self._listed: ListedRows | None = None

    @property
    def working_bytes(self) -> int:
        """Bytes of the table that finds distinct keys, and of the joined directories."""
        return self._dedup.nbytes + (0 if self._listed is None else self._listed.nbytes)

    @property
    def listed(self) -> ListedRows:
        """The rows that this rank lists now."""
        if self._listed is None or not self._listed.is_of(self.stores):
            self._listed = ListedRows(self.stores)
        return self._listed

    def by_group(self, keys: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Order int64 [n] keys by dim-group: (keys, numbers of each dim-group). Waits for the device."""
        if self.groups == 1:
            return keys, [len(keys)]
        group = self._group_of(keys)
        parts = [keys[group == number] for number in range(self.groups)]
        return torch.cat(parts), [len(part) for part in parts]

    def locate(
        self, ids: torch.Tensor, weights: torch.Tensor | None, hop: Hop | None, *, sort: bool = False
    ) -> LocatedRows:
        """Look int64 [n] requested keys up, dim-group by dim-group, each with its number of accesses (None: 1).

        Waits for the device once, for the number of distinct keys.

        Args:
            hop: the hop to the next station; None at the last one.
            sort: order the keys of each section; they are made distinct in any case.
        """
        if sort:
            keys, expand = torch.unique(ids, return_inverse=True)
        else:
            keys, expand = self._dedup.unique(ids) if self._deduplicates else (ids, None)
        if expand is None:
            accesses = torch.ones_like(keys) if weights is None else weights
        else:
            accesses = devices.sum_by_place(expand, weights, len(keys))
        turns = torch.div(keys, self._world_size, rounding_mode="floor")
        homes = keys - turns * self._world_size
        groups = None if self.groups == 1 else self._group_of(keys)
        firsts = self._first_turn if groups is None else self._first_turns.index_select(0, groups)
        slots, home = turns - firsts, homes == self._rank
        listed = self.listed
        entries = listed.find(turns, homes, groups)
        peers = 1 if hop is None else hop.peers.size
        number: torch.Tensor | int = 0 if groups is None else groups
        away = 2 * self.groups + number * peers
        if hop is not None:
            away = away + hop.destination(homes)
        elif groups is None:
            away = torch.full_like(keys, 2)
        assert isinstance(away, torch.Tensor)  # noqa: S101
        section = torch.where(home, number * 2, away)
        if len(listed):
            found = entries >= 0
            section = torch.where(found, number * 2 + 1, section)
            slots = torch.where(found, listed.slots_at(entries.clamp(min=0)), slots)
        order, sections = devices.ordered(section, (2 + peers) * self.groups)
        accesses = accesses.clamp(max=_MAX_COUNT)
        return LocatedRows(keys, expand, accesses, slots, entries, order, sections, home, groups)

    def accesses_by_tier(self, located: LocatedRows) -> torch.Tensor:
        """Count int64 [3] accesses to rows held at a station, by tier."""
        plain = located.accesses * located.home
        if len(self.listed) == 0:
            return torch.nn.functional.pad(plain.sum().view(1), (0, 2))
        device = self.listed.on_device_tier(located.entries.clamp(min=0)) * 1
        held = torch.where(located.entries >= 0, located.accesses, plain)
        tier = torch.where(located.entries >= 0, device + 1, 0)
        return held.new_zeros(3).scatter_add_(0, tier, held)

    def split_sections(self, sizes: Sequence[int], peers: int) -> tuple[list[int], list[int], list[list[int]]]:
        """Split the numbers of a station's sections: plain and listed by group, requested by group and peer."""
        plain, listed = list(sizes[0 : 2 * self.groups : 2]), list(sizes[1 : 2 * self.groups : 2])
        away = sizes[2 * self.groups :]
        return plain, listed, [list(away[g * peers : (g + 1) * peers]) for g in range(self.groups)]

    def stations(
        self, located: LocatedRows, sizes: Sequence[int], peers: int, requests: Sequence[int]
    ) -> tuple[StationRows, ...]:
        """Return the rows by dim-group, with places counted in each.

        Args:
            sizes: numbers of the sections.
            requests: number of requests of each dim-group, which were located.
        """
        plain, listed, away = self.split_sections(sizes, peers)
        held = [a + b for a, b in zip(plain, listed, strict=True)]
        rows = [a + sum(b) for a, b in zip(held, away, strict=True)]
        order, expand = located.order, located.expand
        of_held = order[: sum(held)]
        if located.groups is not None:
            starts = torch.tensor([0, *accumulate(rows)][:-1], device=order.device)
            local = self._local(located, starts)
            order = local.index_select(0, order)
            expand = None if expand is None else local.index_select(0, expand)
        by_section = torch.split(order, [*held, *map(sum, away)])
        slots = torch.split(located.slots.index_select(0, of_held), held)
        entries = torch.split(located.entries.index_select(0, of_held), held)
        expands = [None] * self.groups if expand is None else torch.split(expand, list(requests))
        return tuple(
            StationRows(rows[g], expands[g], by_section[g], slots[g], entries[g], by_section[self.groups + g], plain[g])
            for g in range(self.groups)
        )

    def requests(self, located: LocatedRows, away: list[list[int]]) -> torch.Tensor:
        """Return int64 [rows requested from the next station]: keys with their accesses, peer by peer."""
        packed = located.keys | (located.accesses << COUNT_SHIFT)
        total = sum(map(sum, away))
        by_group = packed.index_select(0, located.order[len(located.order) - total :])
        return regrouped(by_group, away)

    def _group_of(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(self._first_keys, keys, right=True) - 1

    @staticmethod
    def _local(located: LocatedRows, starts: torch.Tensor) -> torch.Tensor:
        """int64 [m] place of each row in its dim-group. Rows are ordered by dim-group."""
        assert located.groups is not None  # noqa: S101
        return torch.arange(len(located.keys), device=starts.device) - starts.index_select(0, located.groups)


def regrouped(flat: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Transpose the order of the parts of a tensor: those of ``sizes`` [a][b], a by a, become b by b."""
    if len(sizes) == 1 or len(sizes[0]) == 1:
        return flat
    width = len(sizes[0])
    parts = torch.split(flat, [number for row in sizes for number in row])
    return torch.cat([part for b in range(width) for part in parts[b::width]])


def transposed(counts: Sequence[Sequence[int]]) -> list[list[int]]:
    """[a][b] -> [b][a]."""
    return [list(column) for column in zip(*counts, strict=True)]
