"""Routes of look-ups: the rows that each station on the way holds, and the rows that it requests from the next."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexd.core.arrays import Int64Array
from flexd.embedding import devices
from flexd.embedding.exchange.hop import Agreement, Counts, Hop
from flexd.embedding.store.directory import NOT_REHOMED
from flexd.embedding.store.store import GroupStore

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
class UnresolvedIds:
    """Ids of tables of unbounded ids, whose rows their homes know.

    Attributes:
        ids: int64 [n].
        numbers: int64 [n], the table of each in ``IdSets.tables``.
        places: int64 [n] places in the keys of the batch, those of bags after the others; there is the key of the
            shared row of the table.
        sizes: number of ids of each table in ``IdSets.tables``.
    """

    ids: torch.Tensor
    numbers: torch.Tensor
    places: torch.Tensor
    sizes: Sequence[int]


@dataclass(frozen=True)
class FeatureKeys:
    """Ids of a batch as addresses (``flexd.core.keyspace``), which of tables spread over all ranks are keys.

    Attributes:
        order: names of the features whose rows are fetched, dim-group by dim-group.
        keys: int64 [n] addresses, feature by feature in this order. Ids out of range are moved into it.
        faulty: bool [] on the device: an id is out of range, or lengths do not fit the ids. None: cannot be.
        numbers: number of keys of each dim-group.
        bags: ids of the other features, pooled at the owner; None: there are none.
        unresolved: ids whose rows are not known yet; None: there are none.
    """

    order: list[str]
    keys: torch.Tensor
    faulty: torch.Tensor | None
    numbers: list[int]
    bags: BagIds | None = None
    unresolved: UnresolvedIds | None = None


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

    def none(self) -> "StationRows":
        """Return no rows."""
        return StationRows(0, None, 0, self.slots[:0], self.entries[:0], 0)

    @property
    def row_of_request(self) -> torch.Tensor:
        """int64 [requests] -> row."""
        return torch.arange(self.rows, device=self.slots.device) if self.expand is None else self.expand


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

    def only(self, kept: Sequence[bool]) -> "BagRoute":
        """Return the route of the bags of some dim-groups."""
        legs = tuple(
            BagLeg(
                _only(leg.bags, kept),
                [places if keep else places[:0] for places, keep in zip(leg.places, kept, strict=True)],
                leg.sent * np.array(kept),
                leg.received * np.array(kept),
            )
            for leg in self.legs
        )
        parts, before = [self.bag[:0]], 0
        for part, bags, keep in zip(self.bag.split_with_sizes(list(self.numbers)), self.bags, kept, strict=True):
            if keep:
                parts.append(part - before)
            else:
                before += bags
        return BagRoute(legs, torch.cat(parts), _only(self.numbers, kept), _only(self.bags, kept))


def _only(numbers: Sequence[int], kept: Sequence[bool]) -> list[int]:
    return [number if keep else 0 for number, keep in zip(numbers, kept, strict=True)]


@dataclass(frozen=True)
class LookedUpRows:
    """The rows that a rank looks up for itself in one pass, without the ids of bags that arrive from other ranks.

    Attributes:
        addresses: int64 [m], in one part or several.
        accesses: int64 [m] look-ups of each address of the only part; None: one each, and addresses repeat.
        total: number of look-ups.
    """

    addresses: tuple[torch.Tensor, ...]
    accesses: torch.Tensor | None
    total: int


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
        looked_up: for a tap; None in a part of a route.
    """

    stations: tuple[tuple[StationRows, ...], ...]
    requested: tuple[Counts, ...]
    served: tuple[Counts, ...]
    agreement: Agreement
    keys: tuple[tuple[torch.Tensor, ...], ...]
    bags: BagRoute | None = None
    looked_up: LookedUpRows | None = None

    def only(self, kept: Sequence[bool]) -> "Route":
        """Return the route of the rows of some dim-groups. Local: every rank keeps the same."""
        if all(kept):
            return self
        of_groups = np.array(kept)
        return Route(
            tuple(
                tuple(rows if keep else rows.none() for rows, keep in zip(of_station, kept, strict=True))
                for of_station in self.stations
            ),
            tuple(counts * of_groups for counts in self.requested),
            tuple(counts * of_groups for counts in self.served),
            self.agreement,
            tuple(
                tuple(keys if keep else keys[:0] for keys, keep in zip(of_station, kept, strict=True))
                for of_station in self.keys
            ),
            None if self.bags is None else self.bags.only(kept),
        )


def counts_of_group(group: int, counts: Counts) -> list[int]:
    """Return the counts of one dim-group by peer."""
    found: list[int] = counts[:, group].tolist()
    return found


_MAX_COUNT = (1 << (63 - COUNT_SHIFT)) - 1
# Bit of the sign of a place in the directory.
_SIGN = 31
# Sections of a dim-group that are held: plain home rows, NODE and DEVICE rows.
_HELD = 3


@dataclass(frozen=True)
class LocatedRows:
    """Distinct rows requested at a station, dim-group by dim-group. The host has not read any number of them.

    A *section* holds rows of one kind: of each dim-group its plain home rows (with those that have moved here), its
    NODE and its DEVICE rows that are listed here; then of each dim-group and peer the rows requested from the peer.

    Attributes:
        keys: int64 [m].
        expand: int64 [requests] -> row; None if every row was requested once, in this order.
        accesses: int64 [m] accesses to each row.
        sent_accesses: the same, at most as many as travel with a request.
        held_accesses: int64 [dim-groups x 3] accesses to plain home rows, NODE and DEVICE rows.
        section: int64 [m].
        slots, entries: int64 [m]; undefined slot of a row that is not held; ``Directory.entries`` if it is not listed.
        order: int64 [m] rows, section by section.
        sections: int64 [sections] numbers of rows.
    """

    keys: torch.Tensor
    expand: torch.Tensor | None
    accesses: torch.Tensor
    sent_accesses: torch.Tensor
    held_accesses: torch.Tensor
    section: torch.Tensor
    slots: torch.Tensor
    entries: torch.Tensor
    order: torch.Tensor
    sections: torch.Tensor


class StationLookup:
    """Looks requested keys up in the stores of this rank."""

    def __init__(self, stores: Sequence[GroupStore]) -> None:
        self.stores = list(stores)
        self.groups = len(self.stores)
        self.listed = self.stores[0].directory
        """The rows that this rank lists."""
        self.deduplicates = True
        """True if each row is requested once; False as sharded modules without dedup do, for comparisons."""
        first, end = stores[0].group.first_key, stores[-1].group.end_key
        device = stores[0].rows.device
        self._numbers = devices.Numbers(device)
        self._dedup = Dedup(first, end - first, device, self._numbers)
        layout = self.listed.layout
        self._world_size, self._rank = layout.world_size, stores[0].rank
        self._local_ranks = layout.local_ranks
        self._inner_keys = torch.tensor([store.group.first_key for store in stores[1:]], device=device)
        self._first_turns = [(store.first_home_address - self._rank) // self._world_size for store in stores]
        self._cells: dict[Hop | None, torch.Tensor] = {}

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
            keys, expand = self._dedup.unique(ids) if self.deduplicates else (ids, None)
        sections = (_HELD + (1 if hop is None else hop.peers.size)) * self.groups
        zeros = keys.new_zeros(2 * sections + len(keys)).split_with_sizes([sections, sections, len(keys)])
        if expand is None:
            accesses = torch.ones_like(keys) if weights is None else weights
        else:
            accesses = devices.sum_by_place(expand, weights, len(keys), zeros[2])
        turns = torch.div(keys, self._world_size, rounding_mode="floor")
        cells = torch.sub(keys, turns, alpha=self._world_size)
        moved = places_here = None
        if len(self.listed.rehomed):
            moved = self.listed.rehomed.find(keys)
            places_here = (moved >= 0) & (moved != NOT_REHOMED)
            elsewhere = (-1 - moved.to(torch.int64)).mul_(self._local_ranks).add_(cells.remainder(self._local_ranks))
            cells = torch.where(moved < 0, elsewhere, cells.masked_fill_(places_here, self._rank))
        groups = None if self.groups == 1 else torch.searchsorted(self._inner_keys, keys, right=True)
        if groups is not None:
            cells = torch.add(cells, groups, alpha=self._world_size)
        section, shifts, of_listed = self._of_cells(hop).index_select(1, cells)
        slots = turns + shifts
        if moved is not None and places_here is not None:
            slots = torch.where(places_here, moved, slots)
        listed = self.listed
        if len(listed):
            entries = listed.find(keys)
            found = entries < listed.entries
            places = listed.places_at(entries)
            at_device = places >> _SIGN  # -1 or 0
            section = torch.where(found, of_listed - at_device, section)
            slots = torch.where(found, places ^ at_device, slots)
        else:
            entries = torch.full_like(keys, listed.entries)
        order, sizes = devices.ordered(section, sections, zeros[0])
        sent = accesses
        # Without weights none is above the number of ids.
        if hop is not None and expand is not None and (weights is not None or len(ids) > _MAX_COUNT):
            sent = accesses.clamp(max=_MAX_COUNT)
        held = devices.sum_by_place(section, accesses, sections, zeros[1])[: _HELD * self.groups]
        return LocatedRows(keys, expand, accesses, sent, held, section, slots, entries, order, sizes)

    def forget_hops(self) -> None:
        """Drop what is kept of hops: later look-ups go over others."""
        self._cells.clear()

    def _of_cells(self, hop: Hop | None) -> torch.Tensor:
        """Return int64 [3, dim-groups x world size], of the rows of each dim-group and home: the section of those that
        are not listed, what is added to their turn for the slot, and the section of those at NODE that are listed."""
        known = self._cells.get(hop)
        if known is None:
            homes = torch.arange(self._world_size)
            peers = 1 if hop is None else hop.peers.size
            reached = torch.zeros_like(homes) if hop is None else hop.destination(homes)
            rows = []
            for g, turn in enumerate(self._first_turns):
                away = _HELD * self.groups + g * peers + reached
                section = torch.where(homes == self._rank, _HELD * g, away)
                rows.append(
                    torch.stack([section, torch.full_like(homes, -turn), torch.full_like(homes, _HELD * g + 1)])
                )
            known = torch.cat(rows, dim=1).to(self._inner_keys.device)
            self._cells[hop] = known
        return known

    def away_sizes(self, located: LocatedRows, hop: Hop) -> torch.Tensor:
        """Return int64 [peers, groups] numbers of the rows requested from each peer."""
        return located.sections[_HELD * self.groups :].view(self.groups, hop.peers.size).t()

    def split_sections(self, sizes: Int64Array, peers: int) -> tuple[Int64Array, Int64Array]:
        """Split the int64 [sections] numbers of rows of a station.

        Returns:
            int64 [groups, 3] numbers of plain home rows, of NODE and of DEVICE rows; int64 [groups, peers].
        """
        held = _HELD * self.groups
        return sizes[:held].reshape(-1, _HELD), sizes[held:].reshape(self.groups, peers)

    def stations(
        self, located: LocatedRows, sizes: Int64Array, peers: int, requests: Sequence[int]
    ) -> tuple[StationRows, ...]:
        """Return the rows by dim-group, numbered in each.

        Args:
            sizes: int64 [sections], their numbers of rows.
            requests: number of requests of each dim-group, which were located.
        """
        held_sizes, away_sizes = self.split_sections(sizes, peers)
        of_held = held_sizes.sum(axis=1)
        rows: list[int] = (of_held + away_sizes.sum(axis=1)).tolist()
        held, plain = of_held.tolist(), held_sizes[:, 0].tolist()
        order = located.order[: sum(held)]
        slots = located.slots.index_select(0, order).split_with_sizes(held)
        entries = located.entries.index_select(0, order).split_with_sizes(held)
        expands: Sequence[torch.Tensor | None] = [None] * self.groups
        numbered = _numbered(located, held_sizes, away_sizes, self._numbers.first(len(located.order)))
        if numbered is not None:
            expands = numbered.split_with_sizes(list(requests))
        return tuple(
            StationRows(rows[g], expands[g], held[g], slots[g], entries[g], plain[g]) for g in range(self.groups)
        )

    def numbered_keys(self, located: LocatedRows, stations: Sequence[StationRows]) -> tuple[torch.Tensor, ...]:
        """Return the keys of each dim-group's rows in the order of their numbers."""
        rows, held = [of_group.rows for of_group in stations], [of_group.held for of_group in stations]
        order = located.order
        if self.groups > 1:
            away = [a - b for a, b in zip(rows, held, strict=True)]
            pieces = order.split_with_sizes([*held, *away])
            order = torch.cat([piece for g in range(self.groups) for piece in pieces[g :: self.groups]])
        return located.keys.index_select(0, order).split_with_sizes(rows)

    def requests(self, located: LocatedRows, requested: Counts) -> torch.Tensor:
        """Return int64 [rows requested from the next station]: keys with their accesses, by dim-group and peer."""
        packed = torch.add(located.keys, located.sent_accesses, alpha=1 << COUNT_SHIFT)
        return packed.index_select(0, located.order[len(located.order) - int(requested.sum()) :])


def _numbered(
    located: LocatedRows, held_sizes: Int64Array, away_sizes: Int64Array, number: torch.Tensor
) -> torch.Tensor | None:
    """Return int64 [requests]: the number of each requested row in its dim-group; None if every row was requested once,
    in the order of the numbers.

    Args:
        held_sizes, away_sizes: as ``StationLookup.split_sections``.
        number: int64 [m] 0, 1, 2 ...
    """
    groups = len(held_sizes)
    sections = (held_sizes > 0).sum(axis=1) + (away_sizes > 0).sum(axis=1)
    if sections.max() <= 1 and (located.expand is None or groups == 1):
        return located.expand
    numbers = torch.empty_like(number).scatter_(0, located.order, number)
    if groups > 1:
        held, away = held_sizes.sum(axis=1), away_sizes.sum(axis=1)
        both = np.concatenate([held, away])
        shifts = np.concatenate([np.zeros_like(held), held]) - (np.cumsum(both) - both)
        widths = np.repeat([_HELD, away_sizes.shape[1]], groups)
        of_section = devices.uploaded(np.repeat(shifts, widths), number.device)
        numbers += of_section.index_select(0, located.section)
    return numbers if located.expand is None else numbers.index_select(0, located.expand)


MAX_TABLE_ROWS = 2**23
"""``Dedup`` sorts where there are more rows: its table (8 bytes per row) would take too much memory."""


class Dedup:
    """Finds the distinct keys of a range, without sorting where a table of its rows is small enough.

    Args:
        first, rows: keys lie in [first, first + rows).
        numbers: of the device.
    """

    def __init__(self, first: int, rows: int, device: torch.device, numbers: devices.Numbers) -> None:
        self._first = first
        self._numbers = numbers
        # Its content between calls is irrelevant: every place is written before it is read.
        self._table = torch.empty(rows, dtype=torch.int64, device=device) if rows <= MAX_TABLE_ROWS else None

    def unique(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 [n] keys -> (int64 [m] distinct keys, int64 [n] place of each key among them).

        The places are None if all keys are distinct; then the distinct keys are the keys as given.
        """
        if self._table is None:
            distinct, places = torch.unique(keys, return_inverse=True)
            return (keys, None) if len(distinct) == len(keys) else (distinct, places)
        at = keys - self._first if self._first else keys
        number = self._numbers.first(len(keys))
        # The last writer among equal keys represents them all.
        self._table.scatter_(0, at, number)
        chosen = (self._table.index_select(0, at) == number).nonzero().view(-1)
        if len(chosen) == len(keys):
            return keys, None
        distinct = keys.index_select(0, chosen)
        self._table.scatter_(0, distinct - self._first if self._first else distinct, number[: len(chosen)])
        return distinct, self._table.index_select(0, at)
