"""Measure, in a thread of its own, how far the accesses have drifted since the live plan was made."""

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
from flexd.core.fault_points import fault_point
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.core.supervision import Supervisor
from flexd.operations.measured_exposure import priced_by
from flexd.operations.plan_settings import running_exchange, training_shape
from flexd.planner.drift import Drift, PlacementCommunication, placement_communication
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster, Exposed

_log = logging.getLogger(__name__)

MAX_DUTY_CYCLE = 0.1
"""Largest share of time spent evaluating: after a slow evaluation the next one starts later."""

ProfileMaker = Callable[[float, RankLayout], Profile]
"""(accesses of the whole job per step, layout of the ranks) -> the current profile."""


class LivePlacement(Protocol):
    """The part of the coordinator that drift is computed from."""

    def live(self) -> LiveTopology | None: ...

    def placement(self) -> Placement: ...


class RunningMigrations(Protocol):
    @property
    def migrating(self) -> bool:
        """True while the ranks move to another placement."""
        ...


class AccessRates(Protocol):
    def accesses_per_step(self, world_size: int) -> float | None:
        """Return the accesses of the whole job per step with so many ranks; None if not known."""
        ...

    def exposed(self) -> Exposed | None:
        """Return the measured exposure of the communication; None if not known."""
        ...


class DriftMonitor:
    """Compares, every ``planner.drift_interval_seconds``, the cost of the live placement with a reference. Thread-safe.

    The reference is the cost of the placement under the profile it was planned from; only its prices are kept (three
    numbers a table), not that profile. It is replaced

    - by every executed plan, including one that moves nothing: the planner has seen the current profile and kept the
      placement, so drift counts from there. This is why drift never triggers the same plan twice;
    - by the current profile when two consecutive evaluations find no reference for the live placement and ranks: after
      an aborted migration, a topology change without a plan, or a restart whose snapshot has another placement.

    Nothing is evaluated during a migration. Both profiles are priced at the reference's accesses per step, so drift
    measures the distribution of accesses over rows and tables, not the batch size.

    Args:
        restored: a reference from ``reference_state``, saved with the sketches.
        supervisor: of the process; records the faults of the thread.
    """

    def __init__(
        self,
        settings: PlannerConfig,
        keyspace: KeySpace,
        cluster: Cluster,
        profile: ProfileMaker,
        coordinator: LivePlacement,
        executions: RunningMigrations,
        training: AccessRates,
        restored: Mapping[str, Any] | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._settings = settings
        self._keyspace = keyspace
        self._cluster = cluster
        self._profile = profile
        self._coordinator = coordinator
        self._executions = executions
        self._training = training
        self._guard = threading.Lock()
        self._stop = threading.Event()
        supervisor = supervisor or Supervisor()
        self._watch = supervisor.watch("flexd-drift")
        self._thread = supervisor.thread("flexd-drift", self._run, self._stop)
        self._reference: PlacementCommunication | None = None
        self._candidate: PlacementCommunication | None = None
        """The cost of a live placement that differs from the reference's. It becomes the reference if the next
        evaluation finds the same placement; a plan that was just made may not have started to move."""
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
        self._thread.start()

    def apply_config(self, settings: PlannerConfig) -> None:
        """Use other settings from the next evaluation on."""
        self._settings = settings

    def stop(self, timeout_seconds: float) -> bool:
        """Stop the thread. Returns whether it ended within the deadline."""
        self._stop.set()
        return self._thread.join(timeout_seconds)

    def age_seconds(self) -> float:
        """Seconds since the newest evaluation; NaN before the first."""
        return time.monotonic() - self._evaluated_at

    def set_reference(self, reference: PlacementCommunication) -> None:
        """Replace the reference by the cost of an executed plan's target under the profile that it was made from."""
        with self._guard:
            self._reference, self._candidate, self._reason, self.newest = reference, None, None, None

    def _price(self, profile: Profile, layout: RankLayout, placement: Placement) -> PlacementCommunication:
        settings = self._settings
        return placement_communication(
            profile, self._keyspace, layout, priced_by(self._cluster, self._training.exposed()), placement,
            training_shape(settings), running_exchange(settings),
        )  # fmt: skip

    def pop_reason(self) -> str | None:
        """Return why to plan again, once for each evaluation beyond the threshold; None if there is no reason."""
        with self._guard:
            reason, self._reason = self._reason, None
            return reason

    def reference_state(self) -> dict[str, Any]:
        """Return the reference as JSON-compatible values, for ``restored``; empty without a reference."""
        with self._guard:
            return {} if self._reference is None else self._reference.to_dict()

    def evaluate(self) -> Drift | None:
        """Evaluate now. Returns None if nothing can be compared: no ranks, too few samples, a migration, or no
        reference yet (one is recorded then)."""
        live = self._coordinator.live()
        if live is None or not live.ready or self._executions.migrating:
            return None
        with self._guard:
            reference = self._reference
        if reference is None:
            measured = self._training.accesses_per_step(live.layout.world_size)
            per_step = measured or self._settings.batch_accesses_per_step
        else:
            per_step = reference.accesses_per_step
        if not per_step:
            return None
        placement = self._coordinator.placement()
        profile = self._profile(per_step, live.layout)
        if profile.samples < max(1, self._settings.min_samples):
            return None
        now = self._price(profile, live.layout, placement)
        with self._guard:
            if self._reference is not reference:
                # A plan was made during the evaluation and has replaced the reference.
                return None
            if self._executions.migrating or self._coordinator.placement().version != placement.version:
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
            self._reason = None if threshold is None else self.newest.reason_to_plan(threshold)
            return self.newest

    def _run(self) -> None:
        wait = self._settings.drift_interval_seconds
        while not self._stop.wait(wait):
            started = time.monotonic()
            try:
                fault_point("thread.drift")
                self.evaluate()
                self._problem = None
            except FlexdError as error:
                # A table without accesses, for one; each problem is logged once.
                if str(error) != self._problem:
                    _log.warning("drift: %s", error)
                self._problem = str(error)
            finally:
                took = time.monotonic() - started
                self.seconds += took
                self.evaluations += 1
            self._watch.progress()
            wait = max(self._settings.drift_interval_seconds, took / MAX_DUTY_CYCLE)

    def _restore(self, saved: Mapping[str, Any]) -> None:
        try:
            self._reference = PlacementCommunication.from_dict(saved)
        except (FlexdError, KeyError, TypeError, ValueError, AttributeError) as error:
            _log.warning("drift: the saved reference is not used: %r", error)
