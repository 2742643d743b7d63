"""Bytes of bags that are answered by sums, counted hop by hop as ``flexd.embedding`` sends them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexd.core.keyspace import Homes, KeySpace
from flexd.core.placement import RankLayout
from flexd.planner.model.prices import Exchange

IDS, SUMS, GRADIENTS = range(3)


def bytes_of_bags(
    keyspace: KeySpace,
    layout: RankLayout,
    bags: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
    exchange: Exchange,
) -> np.ndarray:
    """Return int64[ranks, 3, 2] bytes of one forward and backward pass, by link and without the sizes exchange.

    Args:
        bags: by rank the (int64[n] keys, lengths that sum to n) of each feature.
    """
    homes, local, world = Homes(keyspace, layout), layout.local_ranks, layout.world_size
    specs = [keyspace.tables[group.tables[0]] for group in keyspace.groups]
    features = [(rank, *feature) for rank, of_rank in enumerate(bags) for feature in of_rank]
    key = np.concatenate([np.empty(0, np.int64), *(keys for _, keys, _ in features)])
    source = np.repeat([rank for rank, _, _ in features], [len(keys) for _, keys, _ in features]).astype(np.int64)
    lengths = np.concatenate([np.empty(0, np.int64), *(each for _, _, each in features)])
    bag = np.repeat(np.arange(len(lengths)), lengths)
    vector = np.array([spec.row_bytes for spec in specs])[keyspace.group_of(key)]
    home = homes.home_rank(key)
    over_rail = home // local * local + source % local
    sent = np.zeros((world, 3, 2), dtype=np.int64)
    for target in (over_rail, home) if exchange is Exchange.CHAIN else (home,):
        # One vector comes back from each rank that has ids of the bag.
        first = np.zeros(len(key), dtype=np.bool_)
        first[np.unique(bag * world + target, return_index=True)[1]] = True
        away, far = source != target, (source // local != target // local).astype(np.int64)
        np.add.at(sent, (source[away], IDS, far[away]), 4)
        once = away & first
        np.add.at(sent, (target[once], SUMS, far[once]), vector[once])
        np.add.at(sent, (source[once], GRADIENTS, far[once]), vector[once])
        source = target
    return sent


def bytes_of_sizes(keyspace: KeySpace, layout: RankLayout, exchange: Exchange) -> np.ndarray:
    """Return int64[2] bytes that a rank sends in the sizes exchanges of a pass, by link."""
    between = layout.nodes - 1 if exchange is Exchange.CHAIN else layout.world_size - layout.local_ranks
    return 2 * len(keyspace.groups) * 8 * np.array([layout.local_ranks - 1, between])
