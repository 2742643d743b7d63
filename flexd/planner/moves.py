"""Rows of a plan that live in other nodes than their homes: which of those wanted fit, and the plan with them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array
from flexd.core.keyspace import KeySpace
from flexd.core.placement import MAX_REHOMED_NODES, REHOMED, Placement, RankLayout, is_rehomed
from flexd.core.sharding_types import ROW_WISE
from flexd.planner.affinity.outlook import rule_nodes
from flexd.planner.affinity.partition import NodeHomes
from flexd.planner.plan import Plan, moved_bytes, plan_delta


class MoveRoom:
    """Replica slots that rows which move may take, and which rows may move.

    Args:
        slots: of a rank, by dim-group, beside those of copies.
        copies: a placement without re-homed rows, whose rows do not move.
        excluded: tables whose rows do not move, by name.
    """

    def __init__(
        self,
        keyspace: KeySpace,
        layout: RankLayout,
        slots: Sequence[int],
        copies: Placement,
        excluded: frozenset[str] = frozenset(),
    ) -> None:
        self._keyspace, self._layout, self._copies = keyspace, layout, copies
        self._slots = np.array(slots, dtype=np.int64)
        self._movable = np.array([spec.sharding == ROW_WISE and spec.name not in excluded for spec in keyspace.tables])

    def fit(self, homes: NodeHomes) -> NodeHomes:
        """Return the homes with the moves that fit, those first that save most; all other rows are at their rule."""
        rule = rule_nodes(homes.keys, self._layout)
        gain = homes.absent[np.arange(len(rule)), rule] - homes.absent[np.arange(len(rule)), homes.home]
        stays = np.ones(len(rule), dtype=np.bool_)
        stays[self._fitting(homes.keys, homes.home, rule, gain.astype(np.float64))] = False
        return replace(homes, home=np.where(stays, rule, homes.home))

    def fit_placement(self, moved: Placement) -> Placement:
        """Return the re-homed rows of a placement that fit."""
        nodes = moved.tiers.astype(np.int64) - REHOMED
        kept = self._fitting(moved.keys, nodes, rule_nodes(moved.keys, self._layout), np.zeros(len(moved)))
        return Placement.of(moved.keys[kept], moved.tiers[kept], moved.version)

    def _fitting(self, keys: Int64Array, home: Int64Array, rule: Int64Array, gain: Float64Array) -> Int64Array:
        """Return int64 [m] places of the rows that may move and fit, ascending."""
        layout = self._layout
        wanted = (home != rule) & (home < MAX_REHOMED_NODES) & self._movable[self._keyspace.table_of(keys)]
        wanted &= self._copies.tiers_of(keys) == 0
        rows = np.flatnonzero(wanted)
        rank = home[rows] * layout.local_ranks + keys[rows] % layout.local_ranks
        cell = self._keyspace.group_of(keys[rows]) * layout.world_size + rank
        order = np.lexsort((keys[rows], -gain[rows], cell))
        ordered = cell[order]
        place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
        return np.sort(rows[order[place < self._slots[ordered // layout.world_size]]])


def rehomed_placement(homes: NodeHomes, layout: RankLayout) -> Placement:
    """Return the rows of homes that are in another node than by their rule."""
    moved = np.flatnonzero(homes.home != rule_nodes(homes.keys, layout))
    return Placement.of(homes.keys[moved], (REHOMED + homes.home[moved]).astype(np.uint8))


def placed_homes(homes: NodeHomes, live: Placement, layout: RankLayout) -> NodeHomes:
    """Return homes with each row in the node in which it lives in a placement."""
    tiers = live.tiers_of(homes.keys)
    moved = is_rehomed(tiers)
    return replace(homes, home=np.where(moved, tiers.astype(np.int64) - REHOMED, rule_nodes(homes.keys, layout)))


def with_moves(
    plan: Plan,
    moved: Placement,
    live: Placement,
    keyspace: KeySpace,
    layout: RankLayout,
    slots: Sequence[int],
    saved_seconds: float = 0.0,
    live_fits: bool = True,
) -> Plan:
    """Return a plan of copies with rows that live in other nodes.

    A row that is to go from one node to another comes home with this plan, and goes with the next: any prefix of the
    changes fits the slots then.

    Args:
        moved: rows that fit beside the copies (``MoveRoom``).
        live: with its re-homed rows.
        slots: of a rank, by dim-group, of copies and moves together.
        saved_seconds: what the moves save a step.
        live_fits: whether all re-homed rows of ``live`` may stay. If not, the plan is needed whatever it saves.
    """
    before = live.tiers_of(moved.keys)
    goes = ~is_rehomed(before) | (before == moved.tiers)
    moved = Placement(moved.keys[goes], moved.tiers[goes])
    target = Placement.of(
        np.concatenate([plan.target.keys, moved.keys]), np.concatenate([plan.target.tiers, moved.tiers]), live.version
    )
    gains = np.full(len(target), max(0.0, saved_seconds) / max(1, len(moved)))
    gains[np.searchsorted(target.keys, plan.target.keys)] = plan.gains
    delta = plan_delta(live, target, gains, keyspace, layout, slots)
    return replace(
        plan, target=target, gains=gains, delta=delta, slots=tuple(slots), moves_save_seconds=saved_seconds,
        live_fits=plan.live_fits and live_fits, row_bytes=moved_bytes(delta, keyspace, layout),
    )  # fmt: skip
