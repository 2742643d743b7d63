"""The node of each user, for loaders that can send the samples of a user to one node."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout
from flexd.core.node_map import NodeMap
from flexd.planner.affinity.partition import NodeHomes, level
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.planner.affinity.sampled_window import SampledWindow
from flexd.planner.affinity.traffic import crossing_rows, rule_nodes
from flexd.sketch.coaccess import NO_USER

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


def assign_users(
    samples: SampleRows, user: Int64Array, homes: NodeHomes, by_rule: Int64Array, slack: float = 0.02
) -> tuple[Int64Array, Int64Array]:
    """Return (int64 [users] ascending ids, int64 [users] their nodes): where their samples' rows cross least.

    Args:
        user: int64 [samples], the user of each sample.
        by_rule: int64 [rows], the node by rule of each of ``samples.keys``.
        slack: how many samples above the mean a node may have, as share of the mean. A user is not divided, so one
            with more samples than that is where her rows are.
    """
    ids, of = np.unique(user, return_inverse=True)
    costs = samples.matrix() @ homes.row_costs(samples.keys, by_rule)
    by_user = np.stack([np.bincount(of.reshape(-1), costs[:, node], len(ids)) for node in range(homes.nodes)], axis=1)
    count = np.bincount(of.reshape(-1), minlength=len(ids)).astype(np.float64)
    node = by_user.argmin(axis=1)
    level(-by_user.astype(np.float32), node, count, np.full(homes.nodes, (1 + slack) * count.sum() / homes.nodes))
    return ids, node


def users_of_window(window: SampledWindow, homes: NodeHomes, layout: RankLayout) -> NodeMap | None:
    """Return the node of each user whose samples the window has; None without ids of users."""
    known = np.flatnonzero(window.user != NO_USER)
    if not len(known):
        return None
    by_rule = rule_nodes(window.rows.keys, layout)
    return NodeMap(*assign_users(window.rows.select(known), window.user[known], homes, by_rule), layout.nodes)


def crossing_by_user(
    users: NodeMap, newest: SampledWindow, homes: NodeHomes, layout: RankLayout
) -> tuple[Float64Array, Float64Array]:
    """Return (float64 [batches], float64 [batches]): rows that cross, by weight, with each user's samples in her node,
    and those of the chain. Samples of no user are where they are read, those of unknown users as ``NodeMap`` says.
    """
    sent, chain = np.zeros(newest.batches), np.zeros(newest.batches)
    for number in range(newest.batches):
        one = newest.of_batches(number, number + 1)
        read_in = np.arange(len(one.rows)) % layout.world_size // layout.local_ranks
        to = np.where(one.user == NO_USER, read_in, users.node_of(one.user))
        by_rule, weight = rule_nodes(one.rows.keys, layout), one.costs.weight
        home = homes.home_of(one.rows.keys, by_rule)
        sent[number] = crossing_rows(one.rows, one.batch, to, home, layout.nodes, weight)
        chain[number] = crossing_rows(one.rows, one.batch, read_in, by_rule, layout.nodes, weight)
    return sent, chain
