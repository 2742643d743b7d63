"""Count the bytes of bags that are answered by sums, exactly as ``flexd.embedding`` counts the bytes that it sends.

The ids of each bag travel to the homes of their rows, over the rail and then inside the node (``BagExchange``); one
vector comes back from each peer with ids of the bag, and its gradient goes the way of the ids. Homes look the ids up
that arrive without sending anything, so these bytes are added to those of the rows of the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.homes import Homes
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.planner.model.row_bytes import Exchange
from flexd.simulate.byte_counter import INTER, INTRA, CollectiveBytes, StepPart
from flexd.topology.cluster import Collective

Int64Array = npt.NDArray[np.int64]

_NARROW_KEYS = 2**31


@dataclass(frozen=True)
class StepBags:
    """Ids of all bags of one micro-batch.

    Attributes:
        rank: int64 [n] rank that has the bag.
        bag: int64 [n] bag of each id, counted over ranks and features.
        keys: int64 [n].
        weighted: ids travel with factors.
    """

    rank: Int64Array
    bag: Int64Array
    keys: Int64Array
    weighted: bool = False

    @staticmethod
    def of(bags: Sequence[Sequence[tuple[Int64Array, Int64Array]]], *, weighted: bool = False) -> StepBags:
        """``bags``: by rank the (int64 [n] keys, lengths that sum to n) of each feature."""
        rank, bag, keys, number = [], [], [], 0
        for at, of_rank in enumerate(bags):
            for ids, lengths in of_rank:
                rank.append(np.full(len(ids), at, dtype=np.int64))
                bag.append(number + np.repeat(np.arange(len(lengths)), lengths))
                keys.append(np.asarray(ids, dtype=np.int64))
                number += len(lengths)
        none = np.empty(0, dtype=np.int64)
        ranks, of_ids, all_keys = (np.concatenate([none, *some]) for some in (rank, bag, keys))
        return StepBags(ranks, of_ids, all_keys, weighted)


class BagByteCounter:
    """Counts for one key space and layout."""

    def __init__(self, keyspace: KeySpace, layout: RankLayout) -> None:
        self._keyspace = keyspace
        self._layout = layout
        self._homes = Homes(keyspace, layout)
        specs = [keyspace.tables[group.tables[0]] for group in keyspace.groups]
        self._row_bytes = np.array([spec.row_bytes for spec in specs], dtype=np.int64)
        self._id_bytes = 4 if self._homes.groups[-1].end_key <= _NARROW_KEYS else 8
        self._weight_bytes = 8 if any(spec.dtype == "float64" for spec in specs) else 4
        self._node_of = np.arange(layout.world_size) // layout.local_ranks

    def step(self, passes: Sequence[StepBags], exchange: Exchange) -> list[CollectiveBytes]:
        """Return the collectives of one training step: of each micro-batch sizes, ids and sums, then the gradients of
        all of them in one collective a hop."""
        found: list[CollectiveBytes] = []
        gradients: list[_Vectors] = []
        for bags in passes:
            hops = self._hops(bags, exchange)
            found += [part for hop in hops for part in (hop.sizes, hop.ids)]
            found += [hop.vectors.collective(StepPart.FORWARD) for hop in reversed(hops)]
            of_pass = [hop.vectors for hop in hops]
            gradients = [a.plus(b) for a, b in zip(gradients, of_pass, strict=True)] if gradients else of_pass
        return [*found, *(vectors.collective(StepPart.BACKWARD) for vectors in gradients)]

    def _hops(self, bags: StepBags, exchange: Exchange) -> list[_Hop]:
        layout = self._layout
        nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
        home = self._homes.home_rank(bags.keys)
        group = self._keyspace.group_of(bags.keys)
        ways: list[tuple[int, int, Int64Array]] = []
        if exchange is Exchange.CHAIN:
            over_rail = self._node_of[home] * local + bags.rank % local
            ways += [(INTER, nodes, over_rail), (INTRA, local, home)]
        else:
            ways.append((INTER if nodes > 1 else INTRA, world, home))
        found = []
        source, bag = bags.rank, bags.bag
        each = self._id_bytes + (self._weight_bytes if bags.weighted else 0)
        for link, peers, target in ways:
            if peers == 1:
                continue
            # A bag has one dim-group, and at every station one rank.
            _, first, part = np.unique(bag * world + target, return_index=True, return_inverse=True)
            ids_out, ids_in = self._by_rank(source, target, np.full(len(source), each))
            vectors = self._by_rank(source[first], target[first], self._row_bytes[group[first]])
            found.append(
                _Hop(
                    self._sizes(link, peers, exchange),
                    CollectiveBytes(StepPart.IDS, Collective.ALL_TO_ALL, link, ids_out, _peak(ids_out, ids_in)),
                    _Vectors(link, *vectors),
                )
            )
            source, bag = target, part
        return found

    def _by_rank(self, source: Int64Array, target: Int64Array, size: Int64Array) -> tuple[Int64Array, Int64Array]:
        """int64 [ranks, 2] bytes that ranks send to others, and that they receive, by link."""
        away = source != target
        far = self._node_of[source] != self._node_of[target]
        world = self._layout.world_size
        sent, received = (
            np.bincount(ranks[away] * 2 + far[away], weights=size[away], minlength=2 * world)
            .astype(np.int64)
            .reshape(world, 2)
            for ranks in (source, target)
        )
        return sent, received

    def _sizes(self, link: int, peers: int, exchange: Exchange) -> CollectiveBytes:
        to_one = (2 * len(self._row_bytes) + 1) * 8
        sent = np.zeros((self._layout.world_size, 2), dtype=np.int64)
        if exchange is Exchange.CHAIN:
            sent[:, link] = (peers - 1) * to_one
        else:
            sent[:, INTRA] = (self._layout.local_ranks - 1) * to_one
            sent[:, INTER] = (peers - self._layout.local_ranks) * to_one
        return CollectiveBytes(StepPart.IDS, Collective.ALL_TO_ALL, link, sent, sent.max(axis=0))


@dataclass(frozen=True)
class _Vectors:
    """Vectors of bags over one hop, in the direction of the gradients: int64 [ranks, 2] bytes."""

    link: int
    sent: Int64Array
    received: Int64Array

    def plus(self, other: _Vectors) -> _Vectors:
        return _Vectors(self.link, self.sent + other.sent, self.received + other.received)

    def collective(self, part: StepPart) -> CollectiveBytes:
        sent = self.received if part is StepPart.FORWARD else self.sent
        return CollectiveBytes(part, Collective.ALL_TO_ALL, self.link, sent, _peak(self.sent, self.received))


@dataclass(frozen=True)
class _Hop:
    sizes: CollectiveBytes
    ids: CollectiveBytes
    vectors: _Vectors


def _peak(sent: Int64Array, received: Int64Array) -> Int64Array:
    peak: Int64Array = np.maximum(sent.max(axis=0), received.max(axis=0))
    return peak
