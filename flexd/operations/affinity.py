"""Homes by affinity, learnt anew from the co-access sample whenever a plan is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.planner.affinity.outlook import AffinityOutlook
from flexd.planner.affinity.partition import NodeHomes
from flexd.planner.affinity.sampled_window import sampled_window
from flexd.planner.affinity.streaming import CONTINUE_WITHIN, AffinityPlan, plan_affinity
from flexd.planner.affinity.traffic import MIN_SAVING
from flexd.planner.model.row_bytes import TrafficLink
from flexd.planner.moves import MoveRoom, moved_placement, placed_homes
from flexd.planner.plan import Plan
from flexd.sketch.coaccess import CoAccess


@dataclass(frozen=True)
class WantedMoves:
    """Rows that are to live in other nodes than their homes.

    Attributes:
        moved: all of them.
        saved_seconds: exposed seconds of a step that this saves against where rows live now, with samples dealt by the
            ranks: what the sample's newest batches send less, at the prices of the chain.
    """

    moved: Placement
    saved_seconds: float


def _anywhere(homes: NodeHomes) -> NodeHomes:
    return homes


class AffinityMonitor:
    """Keeps the newest homes by affinity and what they would win. Thread-safe.

    Args:
        coaccess: returns the co-access sample; None if none is kept.
    """

    def __init__(self, keyspace: KeySpace, coaccess: Callable[[], CoAccess | None]) -> None:
        self._keyspace = keyspace
        self._coaccess = coaccess
        self._lock = threading.Lock()
        self._plan: AffinityPlan | None = None
        self._layout: RankLayout | None = None
        self._outlook: AffinityOutlook | None = None
        self._moves: WantedMoves | None = None

    @property
    def outlook(self) -> AffinityOutlook | None:
        """What the newest homes would win; None before the first, without a sample, and with one node."""
        return self._outlook

    def refresh(
        self,
        plan: Plan,
        layout: RankLayout,
        accesses_per_step: float,
        horizon_steps: float,
        live: Placement | None = None,
        room: MoveRoom | None = None,
    ) -> AffinityOutlook | None:
        """Learn homes from the sample as it is now, on from those before, and return what they would win.

        Args:
            plan: made just now; its chain without copies prices the bytes that are saved.
            accesses_per_step: of the whole job.
            live: the placement, if rows move; None: all are where their rule puts them.
            room: for rows that move; None: every row may.
        """
        with self._lock:
            self._outlook = self._moves = None
            sampled = self._coaccess() if layout.nodes > 1 else None
            if sampled is None:
                self._plan = None
                return None
            window = sampled_window(
                sampled, self._keyspace, horizon_steps=horizon_steps, accesses_per_step=accesses_per_step
            )
            before = self._plan if layout == self._layout else None
            if before is not None and live is not None:
                before = replace(before, homes=placed_homes(before.homes, live, layout))
            found = plan_affinity(
                window, layout, before, in_place=live is not None, fit=room.fit if room is not None else _anywhere
            )
            self._plan, self._layout = found, layout
            chain = plan.baselines["two_hop"]
            chain_seconds = float(chain.transfer_seconds[:, :, TrafficLink.INTER_NODE].sum())
            self._outlook = AffinityOutlook.of(found, sampled.samples, chain_seconds)
            if live is not None:
                exposed = chain_seconds * chain.exposed_seconds / chain.total_seconds
                self._moves = self._wanted(found, live, layout, exposed)
            return self._outlook

    def _wanted(
        self, found: AffinityPlan, live: Placement, layout: RankLayout, exposed_seconds: float
    ) -> WantedMoves | None:
        """Return where rows are to live: where they are now unless the homes just learnt save ``CONTINUE_WITHIN`` more,
        and all at home where dealing alone sends less than either."""
        if found.ranks is None or found.placed is None or found.dealing is None:
            return None
        placed, learnt, alone = found.placed.expected, found.ranks.expected, found.dealing.expected
        if placed - learnt >= (CONTINUE_WITHIN if len(live.moved) else MIN_SAVING) and found.moves_pay():
            return WantedMoves(moved_placement(found.homes, layout), exposed_seconds * (placed - learnt))
        if placed <= alone:
            return WantedMoves(live.moved, 0.0)
        return WantedMoves(Placement.empty(), exposed_seconds * (placed - alone))

    @property
    def wanted(self) -> WantedMoves | None:
        """Where rows are to live, of the newest homes; None if they are not learnt to move rows, or not known."""
        with self._lock:
            return self._moves

    def home_of(self, key: int) -> tuple[int, float] | None:
        """Return (node in which a row would live, share of its touches that come from there); None if not sampled."""
        with self._lock:
            plan = self._plan
        if plan is None:
            return None
        homes = plan.homes
        at = int(np.searchsorted(homes.keys, key))
        if at == len(homes.keys) or int(homes.keys[at]) != key:
            return None
        touches = 1.0 - homes.absent[at].astype(np.float64)
        node, total = int(homes.home[at]), float(touches.sum())
        return (node, float(touches[node]) / total) if total > 0 else None
