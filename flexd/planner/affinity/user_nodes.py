"""The node of each user, learnt from a trace while homes of rows stay where the rule puts them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ConfigError
from flexd.core.layout import RankLayout
from flexd.core.node_map import NodeMap
from flexd.planner.affinity.partition import learn_homes
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.planner.affinity.traffic import crossing_rows, rule_nodes
from flexd.planner.affinity.users import assign_users
from flexd.stream.trace import Trace

Int64Array = npt.NDArray[np.int64]

_JUDGED = 0.25
"""Share of the global batches that judges what the others taught."""
_MIN_BATCHES = 4


@dataclass(frozen=True)
class UserNodes:
    """Users by node.

    Attributes:
        users: learnt from all samples.
        samples: number of them.
        rows_ratio: rows between nodes in the last batches, with users where the batches before them say, over those
            with users in random nodes; None of too few batches.
    """

    users: NodeMap
    samples: int
    rows_ratio: float | None


def learn_user_nodes(trace: Trace, layout: RankLayout, batch: int, history: int) -> UserNodes:
    """Return the node of each user.

    Args:
        batch: samples of a global batch.
        history: events of a user that make a sample; what is left of a user makes none.

    Raises:
        ConfigError: the trace has no users, or no user has so many events.
    """
    samples, user = _samples_of(trace, history)
    number = np.arange(len(user)) // batch
    batches = int(number.max()) + 1
    ratio = None
    if batches >= _MIN_BATCHES:
        first = batches - max(1, round(_JUDGED * batches))
        known, judged = np.flatnonzero(number < first), np.flatnonzero(number >= first)
        users = _learn(samples.select(known).compact(), user[known], number[known], layout)
        after = samples.select(judged).compact()
        home = rule_nodes(after.keys, layout)
        of_batch = number[judged] - first
        at_random = np.random.default_rng(0).integers(0, layout.nodes, int(user.max()) + 1)
        dealt, drawn = (
            crossing_rows(after, of_batch, to, home, layout.nodes)
            for to in (users.node_of(user[judged]), at_random[user[judged]])
        )
        ratio = dealt / max(1, drawn)
    return UserNodes(_learn(samples, user, number, layout), len(user), ratio)


def _learn(samples: SampleRows, user: Int64Array, number: Int64Array, layout: RankLayout) -> NodeMap:
    by_rule = rule_nodes(samples.keys, layout)
    learnt = learn_homes(samples, number, by_rule, layout.nodes)
    ids, node = assign_users(samples, user, replace(learnt, home=by_rule), by_rule)
    return NodeMap(ids, node, layout.nodes)


def _samples_of(trace: Trace, history: int) -> tuple[SampleRows, Int64Array]:
    if trace.user is None:
        raise ConfigError("the trace has no users", remedy="give an array user, or deal by rows: NodeSampler")
    first = np.concatenate([[0], np.cumsum(trace.table_rows)])
    keys = trace.row + first[trace.table]
    order = np.argsort(trace.user, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(trace.user[order]) != 0]))
    sizes = np.diff(np.concatenate([starts, [len(keys)]]))
    position = np.arange(len(keys)) - np.repeat(starts, sizes)
    full = position < np.repeat(sizes // history * history, sizes)
    pieces = order[full].reshape(-1, history)
    if not len(pieces):
        raise ConfigError(f"no user has {history} events", remedy="give a smaller --history")
    pieces = pieces[np.argsort(pieces[:, -1], kind="stable")]
    made = SampleRows.of(np.repeat(np.arange(len(pieces)), history), keys[pieces.reshape(-1)])
    return made, trace.user[pieces[:, 0]]
