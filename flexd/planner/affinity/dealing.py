"""Dealing: samples to nodes in equal numbers, at least cost.

Greedy by regret: each sample asks for its cheapest node with room, and a node that is asked for by too many takes
those that would lose most elsewhere. Then pairs of samples of two nodes are exchanged while that wins: for two nodes
the result is optimal, for more no exchange of two samples improves it.
"""

from __future__ import annotations

import numpy as np

from flexd.core.arrays import Float32Array, Int64Array, first_of_run, places_of_runs

_SWEEPS = 3


def _equal_shares(sizes: Int64Array, nodes: int) -> Int64Array:
    """Return int64 [groups, nodes]: samples of each group for each node, equal but for a remainder.

    The nodes that get one more follow one another from group to group, so that the sums over groups are equal too.
    """
    spare = sizes % nodes
    first = (np.cumsum(spare) - spare) % nodes
    turn = (np.arange(nodes)[None, :] - first[:, None]) % nodes
    shares: Int64Array = (sizes // nodes)[:, None] + (turn < spare[:, None])
    return shares


def deal(costs: Float32Array, groups: Int64Array, sweeps: int = _SWEEPS) -> Int64Array:
    """Return int64 [samples]: the node of each sample.

    Args:
        costs: float32 [samples, nodes] of training a sample in a node.
        groups: int64 [samples], from 0: samples of each group are dealt in equal numbers, as a rank deals its own.
        sweeps: of exchanging pairs, at most.
    """
    shares = _equal_shares(np.bincount(groups, minlength=1), costs.shape[1])
    to = _by_regret(costs, groups, shares)
    _exchange_pairs(costs, groups, to, sweeps)
    return to


def _by_regret(costs: Float32Array, groups: Int64Array, room: Int64Array) -> Int64Array:
    samples, nodes = costs.shape
    to = np.full(samples, -1, dtype=np.int64)
    waiting = np.arange(samples)
    # A node that refuses is full, so this ends after as many rounds as nodes.
    while len(waiting):
        here = groups[waiting]
        open_costs = np.where(room[here] > 0, costs[waiting], np.inf)
        choice = open_costs.argmin(axis=1)
        two = np.partition(open_costs, 1, axis=1)[:, :2] if nodes > 1 else np.zeros((len(waiting), 2))
        regret = two[:, 1] - two[:, 0]
        bucket = here * nodes + choice
        order = np.lexsort((-regret, bucket))
        position = _position_in_runs(bucket[order])
        taken = order[position < room.reshape(-1)[bucket[order]]]
        to[waiting[taken]] = choice[taken]
        room -= np.bincount(bucket[taken], minlength=room.size).reshape(room.shape)
        left = np.ones(len(waiting), dtype=np.bool_)
        left[taken] = False
        waiting = waiting[left]
    return to


def _exchange_pairs(costs: Float32Array, groups: Int64Array, to: Int64Array, sweeps: int) -> None:
    """Exchange samples between pairs of nodes, within groups, while that lowers the cost; changes ``to``."""
    nodes = costs.shape[1]
    for _ in range(sweeps):
        moved = 0
        for first in range(nodes):
            for second in range(first + 1, nodes):
                moved += _exchange(costs, groups, to, first, second)
        if not moved or nodes == 2:
            break


def _exchange(costs: Float32Array, groups: Int64Array, to: Int64Array, first: int, second: int) -> int:
    leaving, place = [], []
    for source, target in ((first, second), (second, first)):
        at = np.flatnonzero(to == source)
        lost = costs[at, target] - costs[at, source]
        order = np.lexsort((lost, groups[at]))
        leaving.append((at[order], lost[order]))
        group = groups[at[order]]
        # Samples of the two nodes with the same group and position are a pair.
        place.append(group * np.int64(len(to) + 1) + _position_in_runs(group))
    _, left, right = np.intersect1d(place[0], place[1], assume_unique=True, return_indices=True)
    wins = leaving[0][1][left] + leaving[1][1][right] < -1e-6
    to[leaving[0][0][left[wins]]], to[leaving[1][0][right[wins]]] = second, first
    return int(wins.sum())


def _position_in_runs(values: Int64Array) -> Int64Array:
    """Return the position of each of the sorted values in its run of equal ones."""
    starts = np.flatnonzero(first_of_run(values))
    return places_of_runs(0, np.diff(starts, append=len(values)))
