"""Users to nodes, for loaders that can send the samples of a user to one node."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexd.planner.affinity.homes import level
from flexd.planner.affinity.partition import NodeHomes
from flexd.planner.affinity.sample_rows import SampleRows

Int64Array = npt.NDArray[np.int64]


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
