"""Count the bytes of one step from its id sets, exactly as ``flexd.embedding`` counts the bytes that it sends.

A step is a sequence of collectives. For each, the bytes that every rank sends to other ranks are counted by link; rows
that a rank has itself cost nothing.

The sizes exchange that precedes the ids is counted too (8 bytes per peer and dim-group, and 16 for
the agreement).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import BoolArray, Int64Array, UInt8Array
from flexd.core.keyspace import Homes, KeySpace
from flexd.core.placement import Delta, Placement, RankLayout, Tier
from flexd.planner.model.prices import ID_BYTES, Exchange, TrafficPhase
from flexd.planner.model.workload import TrainingShape
from flexd.simulate.accesses import StepKeys, StepPasses
from flexd.topology.cluster import INTER, INTRA, Collective

MIGRATION = len(TrafficPhase)
"""The phase after those of a step without one: rows and optimizer state copied to new replicas."""
PHASES = MIGRATION + 1
_WORD_BITS = 64


class BitWords:
    """Counts the 64-bit words of touched bits (``flexd.embedding.store.directory``) by home rank.

    The listed rows of a tier, dim-group and home rank have words of their own.
    Rows that leave make room for others, but leave their words; renumbering, which is rare, is left out.
    """

    def __init__(self, keyspace: KeySpace, layout: RankLayout) -> None:
        self._keyspace = keyspace
        self._homes = Homes(keyspace, layout)
        self._world = layout.world_size
        shape = (len(keyspace.groups), len(Tier), self._world)
        self._rows = np.zeros(shape, dtype=np.int64)
        self._words = np.zeros(shape, dtype=np.int64)

    @staticmethod
    def of(keyspace: KeySpace, layout: RankLayout, placement: Placement) -> BitWords:
        """Return those of a placement that was made by one chunk."""
        made = BitWords(keyspace, layout)
        made.apply(Placement.empty().delta_to(placement))
        return made

    def apply(self, chunk: Delta) -> None:
        """Change the tiers of rows: old numbers are freed before new ones are given."""
        self._rows -= self._count(chunk.keys, chunk.old_tiers)
        added = self._count(chunk.keys, chunk.new_tiers)
        missing = np.maximum(0, self._rows + added - _WORD_BITS * self._words)
        self._words += -(-missing // _WORD_BITS)
        self._rows += added

    def bytes_by_home(self, *tiers: Tier) -> Int64Array:
        """Return int64 [ranks] bytes of the bits of all listed rows of some tiers, by their home rank."""
        words: Int64Array = 8 * self._words[:, list(tiers)].sum(axis=(0, 1))
        return words

    def _count(self, keys: Int64Array, tiers: UInt8Array) -> Int64Array:
        """int64 [groups, tiers, ranks], HOME not counted."""
        listed = tiers != Tier.HOME
        keys = keys[listed]
        groups = self._keyspace.group_of(keys) if len(self._keyspace.groups) > 1 else np.zeros(len(keys), np.int64)
        at = (groups * len(Tier) + tiers[listed]) * self._world + self._homes.home_rank(keys)
        return np.bincount(at, minlength=self._rows.size).reshape(self._rows.shape)


AGREEMENT_NUMBERS = 3
"""Chunk version and fault, which travel with the sizes."""


@dataclass(frozen=True)
class CollectiveBytes:
    """One collective.

    Attributes:
        phase: which part of the step, a ``TrafficPhase`` or ``MIGRATION``.
        collective: whose bandwidth curve prices it.
        link: the farthest link it takes, whose latency it has.
        sent, received: int64 [ranks, 2], bytes sent to other ranks and received from them, by link.
        piggybacked: it travels in another collective's message, and has no latency of its own.
    """

    phase: int
    collective: Collective
    link: int
    sent: Int64Array
    received: Int64Array
    piggybacked: bool = False

    @property
    def peak(self) -> Int64Array:
        """int64 [2], by link, the most that any rank sends or receives."""
        peak: Int64Array = np.maximum(self.sent.max(axis=0), self.received.max(axis=0))
        return peak


def _on_link(
    phase: int, link: int, sent: Int64Array, received: Int64Array, *, piggybacked: bool = False
) -> CollectiveBytes:
    """An all-to-all over one link: int64 [ranks] bytes sent and received."""
    by_link = np.zeros((2, len(sent), 2), dtype=np.int64)
    by_link[:, :, link] = sent, received
    return CollectiveBytes(phase, Collective.ALL_TO_ALL, link, by_link[0], by_link[1], piggybacked)


class StepByteCounter:
    """Counts for one key space and layout."""

    def __init__(self, keyspace: KeySpace, layout: RankLayout) -> None:
        shape = TrainingShape()
        self._keyspace = keyspace
        self._layout = layout
        self._homes = Homes(keyspace, layout)
        specs = [keyspace.tables[group.tables[0]] for group in keyspace.groups]
        self._row_bytes = np.array([spec.row_bytes for spec in specs], dtype=np.int64)
        self._moved_bytes = np.array([spec.row_bytes + spec.state_bytes for spec in specs], dtype=np.int64)
        self._dtypes = np.array([spec.dtype for spec in specs])
        self._at_home = np.array([shape.narrow_wire(spec) for spec in specs])
        ranks = np.arange(layout.world_size)
        self._farthest = INTER if layout.nodes > 1 else INTRA
        self._node_of, self._local_of = ranks // layout.local_ranks, ranks % layout.local_ranks

    def step(
        self,
        step: StepPasses,
        placement: Placement,
        exchange: Exchange,
        words: BitWords | None = None,
        *,
        merges_passes: bool = True,
        dedup: bool = True,
    ) -> list[CollectiveBytes]:
        """Return the collectives of one training step: forward, backward, synchronisation.

        Args:
            words: of the chunks that led to the placement; by default as if one chunk had.
            merges_passes: the gradients of several passes are merged, each row's sent once, as a flexd collection does;
                False: every pass pushes its own, as fused optimizers do.
            dedup: a rank requests each row of a direct exchange once; False: for every look-up.
        """
        words = words or BitWords.of(self._keyspace, self._layout, placement)
        merges_passes &= len(step.each) > 1
        found: list[CollectiveBytes] = []
        for keys in step.each:
            hops = self._hops(keys, placement.tiers_of(keys.rows), exchange, dedup)
            found += [part for hop in hops for part in (hop.sizes, hop.ids)]
            found += [hop.rows for hop in reversed(hops)]
            if not merges_passes:
                found += [hop.grads for hop in hops]
        tiers = placement.tiers_of(step.whole.rows)
        if merges_passes:
            # Merged passes have each row once, whatever the exchange does with a single pass.
            found += [hop.grads for hop in self._hops(step.whole, tiers, exchange, dedup=True)]
        return [*found, *self._sync(step.whole, tiers, placement, words, len(step.each))]

    def _hops(self, keys: StepKeys, tiers: UInt8Array, exchange: Exchange, dedup: bool) -> list[_Hop]:
        if exchange is Exchange.CHAIN:
            return self._chain(keys, tiers)
        return self._direct(keys, tiers, dedup=dedup)

    def _chain(self, keys: StepKeys, tiers: UInt8Array) -> list[_Hop]:
        """``Router.find``, ``fetch`` and ``push`` over the hops to the node owner and to the home."""
        layout = self._layout
        nodes, local_ranks, world = layout.nodes, layout.local_ranks, layout.world_size
        home_of, local_of = self._homes.home_rank(keys.rows), self._homes.rail(keys.rows)
        row, tier = keys.pair_row, tiers[keys.pair_row]
        held = (home_of[row] == keys.rank) | ((tier == Tier.DEVICE) & (world > 1))
        held |= (tier == Tier.NODE) & (nodes > 1) & (local_of[row] == self._local_of[keys.rank])
        asked = np.flatnonzero(~held)
        hops: list[_Hop] = []
        if local_ranks > 1:
            source = keys.rank[asked]
            owner = self._node_of[source] * local_ranks + local_of[row[asked]]
            hops.append(self._hop(source, owner, row[asked], keys, INTRA, local_ranks))
        if nodes > 1:
            # The node owner merges the requests of its node (with one rank a node it is the rank itself). A HOME row
            # that is homed elsewhere was held by no rank of the node, so every such node pair has come to its owner.
            owner = keys.node * local_ranks + local_of[keys.node_row]
            wanted = (home_of[keys.node_row] != owner) & (tiers[keys.node_row] == Tier.HOME)
            row = keys.node_row[wanted]
            hops.append(self._hop(owner[wanted], home_of[row], row, keys, INTER, nodes))
        return hops

    def _direct(self, keys: StepKeys, tiers: UInt8Array, *, dedup: bool) -> list[_Hop]:
        """One all-to-all over the world: each rank requests a row from the nearest rank that has a copy."""
        layout = self._layout
        world, local_ranks = layout.world_size, layout.local_ranks
        if world == 1:
            return []
        key, tier = keys.rows[keys.pair_row], tiers[keys.pair_row]
        target = self._homes.home_rank(key)
        at_node = (tier == Tier.NODE) & (layout.nodes > 1)
        target[at_node] = self._node_of[keys.rank[at_node]] * local_ranks + self._homes.rail(key[at_node])
        target[tier == Tier.DEVICE] = keys.rank[tier == Tier.DEVICE]
        asked = np.flatnonzero(target != keys.rank)
        weight = np.ones(len(asked), dtype=np.int64) if dedup else keys.count[asked]
        return [self._hop(keys.rank[asked], target[asked], keys.pair_row[asked], keys, None, world, weight)]

    def _hop(
        self,
        source: Int64Array,
        target: Int64Array,
        row: Int64Array,
        keys: StepKeys,
        link: int | None,
        peers: int,
        weight: Int64Array | None = None,
    ) -> _Hop:
        """Requests int64 [n] from ``source`` to ``target`` ranks for ``row`` (index into the step's rows).

        Args:
            link: of all of them; None where it depends on the ranks.
            peers: ranks in the collective.
            weight: int64 [n], how often each is sent; default once.
        """
        away = source != target
        source, target, row = source[away], target[away], row[away]
        weight = np.ones(len(row), dtype=np.int64) if weight is None else weight[away]
        far = self._node_of[source] != self._node_of[target]
        rows = weight * self._row_bytes[self._group_of(keys.rows[row])]
        ids_out, ids_in = (self._by_rank(side, far, weight * ID_BYTES) for side in (source, target))
        rows_out, rows_in = (self._by_rank(side, far, rows) for side in (source, target))
        sizes = self._sizes(link, peers)
        all_to_all, farthest = Collective.ALL_TO_ALL, self._farthest if link is None else link
        return _Hop(
            sizes=CollectiveBytes(TrafficPhase.FORWARD_IDS, all_to_all, farthest, sizes, sizes),
            ids=CollectiveBytes(TrafficPhase.FORWARD_IDS, all_to_all, farthest, ids_out, ids_in),
            rows=CollectiveBytes(TrafficPhase.FORWARD_ROWS, all_to_all, farthest, rows_in, rows_out),
            grads=CollectiveBytes(TrafficPhase.BACKWARD_ROWS, all_to_all, farthest, rows_out, rows_in),
        )

    def _sizes(self, link: int | None, peers: int) -> Int64Array:
        """int64 [ranks, 2]: the sizes exchange."""
        to_one = (len(self._row_bytes) + AGREEMENT_NUMBERS) * 8
        near = self._layout.local_ranks - 1
        by_link = [near, peers - 1 - near] if link is None else [0, 0]
        if link is not None:
            by_link[link] = peers - 1
        return np.tile(np.array(by_link, dtype=np.int64) * to_one, (self._layout.world_size, 1))

    def _group_of(self, keys: Int64Array) -> Int64Array:
        if len(self._row_bytes) == 1:
            return np.zeros(len(keys), dtype=np.int64)
        return self._keyspace.group_of(keys)

    def _by_rank(self, rank: Int64Array, far: BoolArray, size: Int64Array) -> Int64Array:
        """int64 [ranks, 2] sums of ``size`` by rank and link."""
        world = self._layout.world_size
        # Sums of integers below 2^53 are exact in float64.
        flat = np.bincount(rank * 2 + far, weights=size, minlength=2 * world)
        return flat.astype(np.int64).reshape(world, 2)

    def _sync(
        self, keys: StepKeys, tiers: UInt8Array, placement: Placement, words_of: BitWords, passes: int
    ) -> Iterator[CollectiveBytes]:
        """``ReplicaSums``: gradients of touched rows climb to the node owner, are all-reduced over its rail (or go to
        the home, and the sums come back), and the sums go to the copies in each node; before that, a bit a listed row
        climbs with the ids, and the union comes back with the rows, in every pass. Bits and what climbs ride along."""
        layout = self._layout
        nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
        on_device = placement.tiers == Tier.DEVICE
        device = (tiers == Tier.DEVICE) & (world > 1)
        if local > 1 and device.any() | on_device.any():
            # Inside the node: every rank and the owner of each DEVICE row, which all ranks list.
            words = words_of.bytes_by_home(Tier.DEVICE).reshape(nodes, local).sum(axis=0)[self._local_of]
            others = words.reshape(nodes, local).sum(axis=1)[self._node_of] - words
            yield self._masks(INTRA, passes * words, passes * others, local - 1)
            row = keys.pair_row
            owner = self._node_of[keys.rank] * local + self._homes.rail(keys.rows[row])
            up = np.flatnonzero(device[row] & (owner != keys.rank))
            yield self._rows(INTRA, keys.rank[up], owner[up], row[up], keys)
            yield self._spread(INTRA, keys, device, local - 1, every_node=True)
        on_rail = device | ((tiers == Tier.NODE) & (nodes > 1))
        listed = on_device | (placement.tiers == Tier.NODE)
        if nodes > 1 and listed.any():
            words = words_of.bytes_by_home(Tier.NODE, Tier.DEVICE)
            rail = words.reshape(nodes, local).sum(axis=0)[self._local_of]
            yield self._masks(INTER, passes * words, passes * (rail - words), nodes - 1)
            at_home = on_rail & self._at_home[self._group_of(keys.rows)]
            if self._at_home.any():
                row = keys.node_row
                owner = keys.node * local + self._homes.rail(keys.rows[row])
                home = self._homes.home_rank(keys.rows[row])
                up = np.flatnonzero(at_home[row] & (owner != home))
                yield self._rows(INTER, owner[up], home[up], row[up], keys)
                yield self._spread(INTER, keys, at_home, nodes - 1, every_node=False)
            yield from self._all_reduces(keys, on_rail & ~at_home)

    def _all_reduces(self, keys: StepKeys, chosen: BoolArray) -> Iterator[CollectiveBytes]:
        """The chosen rows of the step over their rails; one collective for the dim-groups of a dtype."""
        nodes, local = self._layout.nodes, self._layout.local_ranks
        rows = keys.rows[np.flatnonzero(chosen)]
        group = self._group_of(rows)
        for dtype in np.unique(self._dtypes[~self._at_home]):
            of_dtype = self._dtypes[group] == dtype
            size = self._row_bytes[group[of_dtype]]
            of_rail = np.bincount(self._homes.rail(rows[of_dtype]), weights=size, minlength=local).astype(np.int64)
            sent = np.zeros((self._layout.world_size, 2), dtype=np.int64)
            sent[:, INTER] = (2 * of_rail * (nodes - 1) // nodes)[self._local_of]
            yield CollectiveBytes(TrafficPhase.SYNC_ROWS, Collective.ALL_REDUCE, INTER, sent, sent)

    def _masks(self, link: int, of_mine: Int64Array, of_others: Int64Array, peers: int) -> CollectiveBytes:
        """Touched bits go to the peers that serve the rows, and their union comes back to every peer."""
        both = of_others + peers * of_mine
        return _on_link(TrafficPhase.SYNC_MASK, link, both, both, piggybacked=True)

    def _rows(
        self, link: int, source: Int64Array, target: Int64Array, row: Int64Array, keys: StepKeys
    ) -> CollectiveBytes:
        """Gradients int64 [n] from ``source`` to ``target`` ranks of ``row`` (index into the step's rows)."""
        far = np.full(len(row), link == INTER)
        size = self._row_bytes[self._group_of(keys.rows[row])]
        sent, received = (self._by_rank(side, far, size) for side in (source, target))
        return CollectiveBytes(TrafficPhase.SYNC_ROWS, Collective.ALL_TO_ALL, link, sent, received, piggybacked=True)

    def _spread(self, link: int, keys: StepKeys, chosen: BoolArray, peers: int, *, every_node: bool) -> CollectiveBytes:
        """Sums of the chosen rows of the step, from their homes (or from the owner in every node) to all peers."""
        rows = keys.rows[np.flatnonzero(chosen)]
        by_home, by_rail = self._by_home(rows, self._row_bytes[self._group_of(rows)])
        held = by_rail if every_node else by_home
        among = np.full(len(held), int(by_home.sum())) if every_node else by_rail
        return _on_link(TrafficPhase.SYNC_SUMS, link, held * peers, among - held)

    def _by_home(self, keys: Int64Array, size: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return int64 [ranks] sums of ``size`` by the home of each key, and of all homes of each rank's rail."""
        home = self._homes.home_rank(keys)
        by_home = np.bincount(home, weights=size, minlength=self._layout.world_size).astype(np.int64)
        return by_home, by_home.reshape(self._layout.nodes, -1).sum(axis=0)[self._local_of]

    def migration(self, chunk: Delta) -> list[CollectiveBytes]:
        """Return the copies of one chunk (``RowCarrier``): rows and state in the messages of a look-up's rows, from the
        homes over the rails, then from the owners inside the nodes. A chunk above the cap of a step is taken to be
        copied in one piece, and without the all-gathers of its own that it has then."""
        layout, size = self._layout, self._moved_bytes[self._group_of(chunk.keys)]
        from_home = (chunk.old_tiers == Tier.HOME) & (chunk.new_tiers != Tier.HOME)
        by_home, by_rail = self._by_home(chunk.keys[from_home], size[from_home])
        to_all = (chunk.old_tiers != Tier.DEVICE) & (chunk.new_tiers == Tier.DEVICE)
        owners = self._homes.rail(chunk.keys[to_all])
        of_owners = np.bincount(owners, weights=size[to_all], minlength=layout.local_ranks).astype(np.int64)
        in_node = of_owners[self._local_of]
        return [
            _on_link(MIGRATION, link, held * (peers - 1), among - held, piggybacked=True)
            for link, peers, held, among in (
                (INTER, layout.nodes, by_home, by_rail),
                (INTRA, layout.local_ranks, in_node, np.full(layout.world_size, of_owners.sum())),
            )
            if peers > 1 and held.any()
        ]


@dataclass(frozen=True)
class _Hop:
    sizes: CollectiveBytes
    ids: CollectiveBytes
    rows: CollectiveBytes
    grads: CollectiveBytes


def sent_bytes(collectives: Sequence[CollectiveBytes], world_size: int) -> Int64Array:
    """int64 [ranks, phases, 2]: what each rank sends to others, by phase and link."""
    sent = np.zeros((world_size, PHASES, 2), dtype=np.int64)
    for collective in collectives:
        sent[:, collective.phase] += collective.sent
    return sent
