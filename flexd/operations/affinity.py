"""Homes by affinity, learnt from the co-access sample in a thread beside the plans."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flexd.core.keyspace import KeySpace
from flexd.core.placement import Placement, RankLayout
from flexd.core.supervision import Supervisor
from flexd.planner.affinity.outlook import CONTINUE_WITHIN, MIN_SAVING, AffinityOutlook, AffinityPlan, plan_affinity
from flexd.planner.affinity.partition import NodeHomes
from flexd.planner.affinity.window import sampled_window
from flexd.planner.moves import MoveRoom, placed_homes, rehomed_placement
from flexd.planner.plan import Plan
from flexd.sketch.coaccess import CoAccess
from flexd.topology.cluster import INTER

PLAN_WAITS_SECONDS = 2.0
"""Longest time that a plan waits for homes; those of a longer learning are in the next plan."""


@dataclass(frozen=True)
class WantedMoves:
    """Rows that are to live in other nodes than their homes.

    Attributes:
        moved: all of them.
        saved_seconds: exposed seconds of a step that this saves against where rows live now, with a loader that deals:
            what the sample's newest batches send less, at the prices of the chain.
    """

    moved: Placement
    saved_seconds: float


@dataclass(frozen=True)
class LearntHomes:
    """Result of one learning.

    Attributes:
        number: of the learning, from 1.
        live: the placement when it began, if rows move; None: all were where their rule puts them.
        moves: where rows are to live; None if they are not learnt to move rows, or not known.
    """

    number: int
    plan: AffinityPlan
    layout: RankLayout
    outlook: AffinityOutlook
    live: Placement | None
    moves: WantedMoves | None

    def moves_from(self, live: Placement | None) -> WantedMoves | None:
        """Return where rows are to live, if they live now where they lived when this was learnt."""
        if live is None or self.live is None or live.rehomed.digest() != self.live.rehomed.digest():
            return None
        return self.moves


def _anywhere(homes: NodeHomes) -> NodeHomes:
    return homes


class AffinityMonitor:
    """Learns homes by affinity, one learning at a time, and keeps the newest. Thread-safe.

    Args:
        coaccess: returns the co-access sample; None if none is kept.
        supervisor: of the process; records the faults of the thread.
        wait_seconds: longest time that ``refresh`` waits.

    Attributes:
        newest: the result of the newest learning; None before the first, without a sample, and with one node.
    """

    def __init__(
        self,
        keyspace: KeySpace,
        coaccess: Callable[[], CoAccess | None],
        supervisor: Supervisor | None = None,
        wait_seconds: float = PLAN_WAITS_SECONDS,
    ) -> None:
        self._keyspace = keyspace
        self._coaccess = coaccess
        self._supervisor = supervisor or Supervisor()
        self._wait_seconds = wait_seconds
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._learnings = 0
        self.newest: LearntHomes | None = None

    @property
    def outlook(self) -> AffinityOutlook | None:
        """Return what the newest homes would win; None before the first, without a sample, and with one node."""
        newest = self.newest
        return None if newest is None else newest.outlook

    def refresh(
        self,
        plan: Plan,
        layout: RankLayout,
        accesses_per_step: float,
        horizon_steps: float,
        live: Placement | None = None,
        room: MoveRoom | None = None,
    ) -> tuple[AffinityOutlook | None, WantedMoves | None]:
        """Begin to learn homes from the sample as it is now, on from those before. Return what the newest would win,
        and where rows are to live by them.

        They are the result of the learning that this begins if it ends within the deadline, else those of the one
        before. While one is running no other begins.

        Args:
            plan: made just now; its chain without copies prices the bytes that are saved.
            accesses_per_step: of the whole job.
            live: the placement, if rows move; None: all are where their rule puts them.
            room: for rows that move; None: every row may.
        """
        if layout.nodes < 2:
            self.newest = None
            return None, None
        chain = plan.costs.baselines["two_hop"]
        transfer = float(chain.transfer_seconds[:, :, INTER].sum())
        exposed = transfer * chain.exposed_seconds / chain.total_seconds

        def learn() -> None:
            try:
                learnt = self._learn(layout, accesses_per_step, horizon_steps, live, room, transfer, exposed)
                with self._lock:
                    self.newest = learnt
            finally:
                self._idle.set()

        with self._lock:
            begins = self._idle.is_set()
            if begins:
                self._idle.clear()
        if begins:
            # It changes nothing but this object, so a daemon that stops does not wait for it.
            try:
                self._supervisor.job("flexd-affinity", learn)
            except BaseException:
                self._idle.set()
                raise
        ended = self._idle.wait(self._wait_seconds)
        newest = self.newest
        if newest is None or newest.layout != layout:
            return (None if ended and newest is None else AffinityOutlook.first()), None
        return newest.outlook, newest.moves_from(live)

    def _learn(
        self,
        layout: RankLayout,
        accesses_per_step: float,
        horizon_steps: float,
        live: Placement | None,
        room: MoveRoom | None,
        transfer_seconds: float,
        exposed_seconds: float,
    ) -> LearntHomes | None:
        sampled = self._coaccess()
        if sampled is None:
            return None
        window = sampled_window(
            sampled, self._keyspace, horizon_steps=horizon_steps, accesses_per_step=accesses_per_step
        )
        newest = self.newest
        before = newest.plan if newest is not None and newest.layout == layout else None
        if before is not None and live is not None:
            before = replace(before, homes=placed_homes(before.homes, live, layout))
        found = plan_affinity(
            window, layout, before, in_place=live is not None, fit=room.fit if room is not None else _anywhere
        )
        self._learnings += 1
        return LearntHomes(
            self._learnings, found, layout, AffinityOutlook.of(found, sampled.samples, transfer_seconds), live,
            None if live is None else self._wanted(found, live, layout, exposed_seconds),
        )  # fmt: skip

    def _wanted(
        self, found: AffinityPlan, live: Placement, layout: RankLayout, exposed_seconds: float
    ) -> WantedMoves | None:
        """Return where rows are to live: where they are now unless the homes just learnt save ``CONTINUE_WITHIN`` more,
        and all at home where dealing alone sends less than either."""
        forecast = found.forecast
        if forecast.loader is None or forecast.placed is None or forecast.dealing_loader is None:
            return None
        placed, learnt, alone = (each.expected for each in (forecast.placed, forecast.loader, forecast.dealing_loader))
        if placed - learnt >= (CONTINUE_WITHIN if len(live.rehomed) else MIN_SAVING) and forecast.moves_pay:
            return WantedMoves(rehomed_placement(found.homes, layout), exposed_seconds * (placed - learnt))
        if placed <= alone:
            return WantedMoves(live.rehomed, 0.0)
        return WantedMoves(Placement.empty(), exposed_seconds * (placed - alone))

    def home_of(self, key: int) -> tuple[int, float] | None:
        """Return (node in which a row would live, share of its touches that come from there); None if not sampled."""
        newest = self.newest
        if newest is None:
            return None
        homes = newest.plan.homes
        at = int(np.searchsorted(homes.keys, key))
        if at == len(homes.keys) or int(homes.keys[at]) != key:
            return None
        touches = 1.0 - homes.absent[at].astype(np.float64)
        node, total = int(homes.home[at]), float(touches.sum())
        return (node, float(touches[node]) / total) if total > 0 else None
