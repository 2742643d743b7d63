"""Watches how far the accesses have moved since the live plan was made, in a thread of its own."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flexd.config.planner import PlannerConfig
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.core.errors import FlexdError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.operations.plan_settings import running_exchange, training_shape
from flexd.planner.drift import Drift, PlacementTraffic, placement_traffic
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster

_log = logging.getLogger(__name__)

DUTY = 0.1
"""Share of the time that evaluating may take: after a slow one the next comes later."""

ProfileMaker = Callable[[float, RankLayout], Profile]
"""(accesses of the whole job per step, layout of the ranks) -> the profile as it is now."""


class LivePlacement(Protocol):
    """What of the coordinator is read here."""

    def live(self) -> LiveTopology | None: ...

    def placement(self) -> Placement: ...


class DriftMonitor:
    """Every ``planner.drift_interval_seconds``: the live placement under the present profile, against the reference.

    The reference is what the placement cost under the profile it was planned from. Only its prices are kept (three
    numbers a table), not that profile. It is replaced

    - by every plan that is carried out, also by one that moves nothing: the planner has seen the present profile and
      left things as they are, so drift counts from there. This is why drift cannot ask for the same plan twice;
    - by the present profile when two evaluations in a row find none for the live placement and ranks: after a migration
      that was cut short, a topology change without a plan, a restart whose snapshot has another placement.

    While a migration is under way nothing is evaluated. Both profiles are priced at the accesses a step of the
    reference, so that drift is of the accesses' distribution over rows and tables and not of the batch size.

    Thread-safe.

    Args:
        migrating: whether the ranks are on their way to another placement.
        accesses_per_step: of the whole job with so many ranks, None if not known.
    """

    def __init__(
        self,
        settings: PlannerConfig,
        keyspace: KeySpace,
        cluster: Cluster,
        profile: ProfileMaker,
        coordinator: LivePlacement,
        migrating: Callable[[], bool],
        accesses_per_step: Callable[[int], float | None],
        restored: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings = settings
        self._keyspace = keyspace
        self._cluster = cluster
        self._profile = profile
        self._coordinator = coordinator
        self._migrating = migrating
        self._accesses_per_step = accesses_per_step
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._reference: PlacementTraffic | None = None
        self._candidate: PlacementTraffic | None = None
        """Of a placement that is not the reference's: taken as the reference if it is still there the next time. A plan
        that was just made may not have begun to move."""
        self._reason: str | None = None
        self._problem: str | None = None
        self.newest: Drift | None = None
        self._evaluated_at = math.nan
        self.seconds = 0.0
        """Wall time of all evaluations."""
        self.evaluations = 0
        if restored:
            self._restore(restored)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="flexd-drift", daemon=True)
        self._thread.start()

    def apply_config(self, settings: PlannerConfig) -> None:
        """Other settings, from the next look on."""
        self._settings = settings

    def stop(self, timeout_seconds: float) -> bool:
        """True if the thread ended within the deadline."""
        self._stop.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def age_seconds(self) -> float:
        """Since the newest evaluation, NaN before the first."""
        return time.monotonic() - self._evaluated_at

    def set_reference(self, reference: PlacementTraffic) -> None:
        """A plan is carried out, or was found to change nothing: what its target costs under the profile it was made
        from is the reference from now on."""
        with self._guard:
            self._reference, self._candidate, self._reason, self.newest = reference, None, None, None

    def _price(self, profile: Profile, layout: RankLayout, placement: Placement) -> PlacementTraffic:
        settings = self._settings
        return placement_traffic(
            profile, self._keyspace, layout, self._cluster, placement,
            training_shape(settings), running_exchange(settings),
        )  # fmt: skip

    def pop_reason(self) -> str | None:
        """Why to plan again, once for each evaluation that says so."""
        with self._guard:
            reason, self._reason = self._reason, None
            return reason

    def reference_state(self) -> dict[str, Any]:
        """The reference as JSON-able values, for ``restored``; empty if there is none."""
        with self._guard:
            return {} if self._reference is None else self._reference.to_dict()

    def evaluate(self) -> Drift | None:
        """One evaluation now; None if there is nothing to compare (no ranks, too little seen, a migration, no reference
        yet: one is taken then)."""
        live = self._coordinator.live()
        if live is None or not live.ready or self._migrating():
            return None
        with self._guard:
            reference = self._reference
        per_step = reference.accesses_per_step if reference else self._accesses_per_step(live.layout.world_size)
        if not per_step:
            return None
        placement = self._coordinator.placement()
        profile = self._profile(per_step, live.layout)
        if profile.samples < max(1, self._settings.min_samples):
            return None
        now = self._price(profile, live.layout, placement)
        with self._guard:
            if self._reference is not reference:
                # A plan was made meanwhile: what was compared with is no longer what counts.
                return None
            if self._migrating() or self._coordinator.placement().version != placement.version:
                return None
            if reference is None or not reference.compares_with(now):
                known = reference is None or (self._candidate is not None and self._candidate.compares_with(now))
                self._candidate = None if known else now
                self._reference = now if known else reference
                self._reason, self.newest = None, None
                return None
            self._candidate = None
            self.newest = Drift(reference, now)
            self._evaluated_at = time.monotonic()
            threshold = self._settings.drift_threshold
            self._reason = None if threshold is None else self.newest.beyond(threshold)
            return self.newest

    def _run(self) -> None:
        wait = self._settings.drift_interval_seconds
        while not self._stop.wait(wait):
            started = time.monotonic()
            try:
                self.evaluate()
                self._problem = None
            except Exception as error:
                # A table without accesses, or a fault: neither may end the watch, and each is told once.
                text = str(error) if isinstance(error, FlexdError) else repr(error)
                if text != self._problem:
                    _log.warning("drift: %s", text, exc_info=not isinstance(error, FlexdError))
                self._problem = text
            took = time.monotonic() - started
            self.seconds += took
            self.evaluations += 1
            wait = max(self._settings.drift_interval_seconds, took / DUTY)

    def _restore(self, saved: Mapping[str, Any]) -> None:
        try:
            self._reference = PlacementTraffic.from_dict(saved)
        except (FlexdError, KeyError, TypeError, ValueError, AttributeError) as error:
            _log.warning("drift: the saved reference is not used: %r", error)
