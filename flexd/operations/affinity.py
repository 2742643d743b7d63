"""Homes by affinity, learnt anew from the co-access sample whenever a plan is made."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.planner.affinity.outlook import AffinityOutlook
from flexd.planner.affinity.sampled_window import sampled_window
from flexd.planner.affinity.streaming import AffinityPlan, plan_affinity
from flexd.planner.model.row_bytes import TrafficLink
from flexd.planner.plan import Plan
from flexd.sketch.coaccess import CoAccess


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

    @property
    def outlook(self) -> AffinityOutlook | None:
        """What the newest homes would win; None before the first, without a sample, and with one node."""
        return self._outlook

    def refresh(
        self, plan: Plan, layout: RankLayout, accesses_per_step: float, horizon_steps: float
    ) -> AffinityOutlook | None:
        """Learn homes from the sample as it is now, on from those before, and return what they would win.

        Args:
            plan: made just now; its chain without copies prices the bytes that are saved.
            accesses_per_step: of the whole job.
        """
        with self._lock:
            self._outlook = None
            sampled = self._coaccess() if layout.nodes > 1 else None
            if sampled is None:
                self._plan = None
                return None
            window = sampled_window(
                sampled, self._keyspace, horizon_steps=horizon_steps, accesses_per_step=accesses_per_step
            )
            before = self._plan if layout == self._layout else None
            self._plan, self._layout = plan_affinity(window, layout, before), layout
            chain_seconds = float(plan.baselines["two_hop"].transfer_seconds[:, :, TrafficLink.INTER_NODE].sum())
            self._outlook = AffinityOutlook.of(self._plan, sampled.samples, chain_seconds)
            return self._outlook

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
