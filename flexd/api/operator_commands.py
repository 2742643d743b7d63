"""Commands of operators that hold migrations: pause, resume, throttle. Each is recorded and outlives the daemon."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from flexd.api.daemon import DecisionsStatus, PauseState, ReloadReport
from flexd.api.throttle import ThrottleStatus, throttle_status
from flexd.config.server import ControlConfig
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.throttle import Throttle, ThrottleLimits
from flexd.core.errors import FlexdError
from flexd.operations.decisions import DecisionFile, Pause, ThrottleOverride
from flexd.operations.history import ActionKind, MigrationHistory
from flexd.operations.triggers import DAEMON_ACTOR

logger = logging.getLogger("flexd")

RETRY_SECONDS = 5.0
ANONYMOUS = "anonymous"


class OperatorCommands:
    """Thread-safe. Starts with the decisions made before the daemon started.

    Args:
        control: the configuration; a throttle that was chosen under another ``control.throttle`` is dropped.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        control: ControlConfig,
        decisions: DecisionFile,
        history: MigrationHistory,
        coordinator: Coordinator,
        throttle: Throttle,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._control = control
        self._decisions = decisions
        self._history = history
        self._coordinator = coordinator
        self._throttle = throttle
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._retry_at = 0.0
        pause, chosen = decisions.current.pause, decisions.current.throttle
        if pause is not None:
            logger.info("paused since before the start, by %s: %s", pause.requested_by or ANONYMOUS, pause.reason)
            coordinator.pause()
        if chosen is not None and chosen.matches_config(control.throttle):
            logger.info("throttle as chosen before the start: %s", chosen.message)
            throttle.set_limits(chosen.limits)
        self._drop_superseded_throttle()

    @property
    def paused(self) -> Pause | None:
        """The pause in effect; None if nothing is held."""
        return self._decisions.current.pause

    @property
    def pause_reason(self) -> str | None:
        pause = self.paused
        return None if pause is None else pause.reason

    def decisions_status(self) -> DecisionsStatus:
        """Return the state of the decisions' file."""
        return DecisionsStatus.from_object(self._decisions)

    def tick(self) -> None:
        """Retry failed writes, every few seconds; record a pause that the control channel has begun by itself."""
        divergence = self._coordinator.divergence
        if divergence and (self.paused is None or self.paused.requested_by != DAEMON_ACTOR):
            self.pause(divergence, DAEMON_ACTOR)
        if not self._decisions.problem or time.monotonic() < self._retry_at:
            return
        with self._lock:
            self._decisions.retry()
            self._retry_at = time.monotonic() + RETRY_SECONDS

    def pause(self, reason: str, requested_by: str = "") -> PauseState:
        """Hold planning and pushing at the next chunk boundary, also after a restart; ingest goes on."""
        with self._lock:
            first = self.paused is None
            self._coordinator.pause()
            pause = Pause(reason=reason, requested_by=requested_by, unix_seconds=self._wall_clock())
            self._decisions.update(pause=pause)
        self._record("pause", requested_by, reason)
        return PauseState(paused=True, reason=reason, changed=first)

    def resume(self, reason: str = "", requested_by: str = "") -> PauseState:
        """End a pause."""
        with self._lock:
            pause = self.paused
            # First, so that ``tick`` does not record the pause again that ends here.
            self._coordinator.resume()
            if pause is not None:
                self._decisions.update(pause=None)
        if pause is not None:
            seconds = self._wall_clock() - pause.unix_seconds
            self._record("resume", requested_by, reason, f"after {max(0.0, seconds):.0f} s of: {pause.reason}")
        return PauseState(paused=False, changed=pause is not None)

    def throttle(self) -> ThrottleStatus:
        """Return the limits on migrations and their state."""
        return throttle_status(self._throttle)

    def set_throttle(
        self, bytes_per_step: int | None, bytes_per_second: int | None, reason: str = "", requested_by: str = ""
    ) -> ThrottleStatus:
        """Change limits from the next chunk on: None keeps one, 0 lifts it. The change survives a restart."""
        given = {"bytes_per_step": bytes_per_step, "bytes_per_second": bytes_per_second}
        changed = {name: limit or None for name, limit in given.items() if limit is not None}
        if not changed:
            return self.throttle()
        with self._lock:
            limits = replace(self._throttle.limits, **changed)
            self._throttle.set_limits(limits)
            chosen = ThrottleOverride(**vars(limits), configured=self._control.throttle.model_dump_json())
            self._decisions.update(throttle=chosen)
        self._record("throttle", requested_by, reason, chosen.message)
        return self.throttle()

    def apply_config(self, control: ControlConfig) -> None:
        """Apply a new configuration. Its throttle, if it has changed, replaces the chosen one."""
        with self._lock:
            before, self._control = self._control.throttle, control
            if control.throttle != before:
                self._throttle.set_limits(ThrottleLimits(**control.throttle.model_dump()))
            self._drop_superseded_throttle()

    def record_reload(self, requested_by: str, reason: str, outcome: ReloadReport | FlexdError) -> None:
        """Record the result of a reload."""
        if isinstance(outcome, FlexdError):
            detail = f"rejected: {outcome.message}"
        else:
            detail = f"applied {', '.join(outcome.applied) or 'nothing'}"
            if outcome.pending:
                detail += f"; needs a restart: {', '.join(outcome.pending)}"
        self._record("reload", requested_by, reason, detail)

    def record_override(self, requested_by: str, reason: str, plan_id: str, gates: tuple[str, ...]) -> None:
        """Record that a plan was carried out although these gates were closed."""
        if gates:
            self._record("override", requested_by, reason, f"plan {plan_id} in spite of {', '.join(gates)}")

    def record_withheld(self, requested_by: str, reason: str) -> None:
        """Record that a plan was withheld because it saves too little."""
        self._record("withhold", requested_by, reason)

    def _record(self, kind: ActionKind, requested_by: str, reason: str, detail: str = "") -> None:
        """Write a command to the log and the history."""
        requested_by = requested_by or ANONYMOUS
        message = "; ".join(each for each in (reason, detail) if each)
        logger.info("%s by %s: %s", kind, requested_by, message or "no reason given")
        self._history.record_action(kind, requested_by, reason, detail)

    def _drop_superseded_throttle(self) -> None:
        throttle = self._decisions.current.throttle
        if throttle is not None and not throttle.matches_config(self._control.throttle):
            logger.info("throttle: control.throttle has changed and replaces the chosen one: %s", throttle.message)
            self._decisions.update(throttle=None)
