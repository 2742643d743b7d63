"""Rows that cross between nodes, with homes by rule and with homes by affinity, and samples dealt by the loader or sent
to the node of their user."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flexd.core.arrays import Float32Array, Float64Array, Int64Array
from flexd.core.node_map import NodeMap
from flexd.core.placement import RankLayout
from flexd.planner.affinity.dealing import deal
from flexd.planner.affinity.partition import NodeHomes, level
from flexd.planner.affinity.window import SampledWindow, SampleRows, sorted_distinct
from flexd.sketch.coaccess import NO_USER

MIN_SAVING = 0.02
"""Share of the chain's bytes between nodes below which affinity does not pay."""
_USER_SLACK = 0.02
"""Samples above the mean that a node may have, as share of the mean. A user is not divided, so one with more samples
than that is where her rows are."""
NodesOfSamples = Callable[[SampledWindow, Int64Array], Int64Array]
"""(one batch, the nodes that read its samples) -> the nodes that train them."""


def rule_nodes(keys: Int64Array, layout: RankLayout) -> Int64Array:
    """Return int64 [n]: the node of each key's home rank by the rule ``key % world_size``."""
    nodes: Int64Array = keys % layout.world_size // layout.local_ranks
    return nodes


def crossing_rows(samples: SampleRows, to: Int64Array, home: Int64Array, weight: Float32Array) -> float:
    """Return the rows of one batch that cross: the distinct rows of each node that are not at home there.

    Args:
        to: int64 [samples], the node that trains it.
        home: int64 [rows], the node of the home of each of ``samples.keys``.
        weight: float32 [rows], of a row that crosses.
    """
    node, row = np.divmod(
        sorted_distinct(to[samples.samples] * np.int64(len(samples.keys)) + samples.rows), len(samples.keys)
    )
    return float(weight[row[home[row] != node]].sum(dtype=np.float64))


def crossings(
    window: SampledWindow,
    homes: NodeHomes,
    layout: RankLayout,
    node_of: NodesOfSamples,
) -> tuple[Float64Array, Float64Array]:
    """Return (float64 [batches], float64 [batches]): rows that cross, by weight, with these homes, and those of the
    chain with homes by rule and samples trained where they are read.

    Samples of a batch are read by the ranks in turn.

    Args:
        node_of: of the samples.
    """
    sent, chain = np.zeros((2, window.batches))
    for number in range(window.batches):
        one = window.of_batches(number, number + 1)
        read_in = rule_nodes(np.arange(len(one.rows)), layout)
        by_rule, weight = rule_nodes(one.rows.keys, layout), one.costs.weight
        home = homes.home_of(one.rows.keys, by_rule)
        sent[number] = crossing_rows(one.rows, node_of(one, read_in), home, weight)
        chain[number] = crossing_rows(one.rows, read_in, by_rule, weight)
    return sent, chain


def dealt_nodes(homes: NodeHomes, layout: RankLayout) -> NodesOfSamples:
    """Return ``node_of`` of a loader that deals. It knows the rows of a sample and what was learnt of them, not the
    rest of the batch."""

    def node_of(one: SampledWindow, _: Int64Array) -> Int64Array:
        row_costs = homes.row_costs(one.rows.keys, rule_nodes(one.rows.keys, layout)) * one.costs.weight[:, None]
        return deal(np.asarray(one.rows.matrix() @ row_costs, dtype=np.float32), one.batch)

    return node_of


def users_of_window(window: SampledWindow, homes: NodeHomes, layout: RankLayout) -> NodeMap | None:
    """Return the node of each user whose samples the window has: where their rows cross least; None without ids of
    users."""
    known = np.flatnonzero(window.user != NO_USER)
    if not len(known):
        return None
    samples, nodes = window.rows.select(known), homes.nodes
    ids, of = np.unique(window.user[known], return_inverse=True)
    costs = samples.matrix() @ homes.row_costs(samples.keys, rule_nodes(samples.keys, layout))
    by_user = np.stack([np.bincount(of.reshape(-1), costs[:, node], len(ids)) for node in range(nodes)], axis=1)
    count = np.bincount(of.reshape(-1), minlength=len(ids)).astype(np.float64)
    node = by_user.argmin(axis=1)
    level(-by_user.astype(np.float32), node, count, np.full(nodes, (1 + _USER_SLACK) * count.sum() / nodes))
    return NodeMap(ids, node, layout.nodes)


def nodes_of_users(users: NodeMap) -> NodesOfSamples:
    """Return ``node_of`` of producers that send a user's samples to her node. Samples of no user are where they are
    read, those of unknown users as ``NodeMap`` says."""
    return lambda one, read_in: np.where(one.user == NO_USER, read_in, users.node_of(one.user))
