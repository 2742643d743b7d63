"""Measures the arms of a job on the rank that decides, and proposes the one that wins to all ranks."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexd.control.protocol.report import ArmReport, UsedExchange
from flexd.core.step_phases import ExchangeReason
from flexd.embedding.exchange.arms import AgreedArm, Arm
from flexd.embedding.row_optimizers import RowUpdate
from flexd.embedding.step import StepMoments
from flexd.embedding.tuner import Tuner

logger = logging.getLogger("flexd")

QUIET_SECONDS = 10.0
"""Time without a change of the placement before arms are measured. A daemon that verifies a plan changes it with every
block, which takes a few reports or 16 steps: one measures at a time, and the daemon waits for a rank that does."""
HINT_AFTER_STEPS, HINT_STEPS, LEAST_HINT = 100, 200, 0.05
"""Steps of a job before those that tell what the pipeline could hide, their number, and the least share of a step that
is worth a line."""
# Those of all collections of the process: they measure in turns.
_TUNERS: weakref.WeakSet[StepTuner] = weakref.WeakSet()


@dataclass(frozen=True)
class Tuning:
    """The settings that a job uses, and what was measured of the others. ``str`` shows it as a table.

    Attributes:
        arm: in use: "chain" or "direct", "with prefetch" where batches are exchanged ahead.
        reason: a value of ``ExchangeReason``; empty on ranks that follow the one which decides (rank 0).
        measuring: whether arms are being measured now.
        step: after which the newest measurement ended; 0 before any.
        explored_steps: steps that measurements have lost so far.
        milliseconds: typical step of every arm in the newest measurement, also while it is made; empty before any, and
            on other ranks.
    """

    arm: str
    reason: str
    measuring: bool = False
    step: int = 0
    explored_steps: float = 0.0
    milliseconds: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        width = max([22, *(len(arm) for arm, _ in self.milliseconds)])
        rows = [f"{'in use' if arm == self.arm else '':7} {arm:{width}} {ms:10.1f} ms" for arm, ms in self.milliseconds]
        title = f"{self.arm}, {self.reason or 'as rank 0 proposes'}"
        if self.step:
            title += f" at step {self.step} ({self.explored_steps:.0f} steps spent on measuring)"
        return "\n".join([title, *rows])


class StepTuner(StepMoments):
    """Runs a ``Tuner`` with the time between two steps of this rank. Every step exchanges rows with all ranks, so its
    time is that of the slowest one.

    Args:
        exchanges: to choose from.
        priced: returns the exchange that the daemon prices lower, empty as long as none is known.
        version: returns the version of the placement.
        waited_and_outside: as ``PhaseMeter.waited_and_outside``.
    """

    def __init__(
        self,
        choice: AgreedArm,
        exchanges: Sequence[str],
        priced: Callable[[], str] = str,
        version: Callable[[], int] = int,
        waited_and_outside: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._choice, self._exchanges, self._ask_priced, self._version = choice, tuple(exchanges), priced, version
        self._clock, self._waited_and_outside = clock, waited_and_outside
        self._hint_from: tuple[float, float, float] | None = None
        self._last: float | None = None
        self._newest_version, self._changed_at = version(), -math.inf
        self._tuner = Tuner(choice.next)
        self._priced = ""
        self._measured: tuple[ArmReport, ...] = ()
        _TUNERS.add(self)
        self.prefetch: tuple[int, ...] = (0,)
        """Settings of the prefetch pipeline that the running loop lets the tuner choose from."""

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(
            arm for arm in self._choice.arms if arm.prefetch in self.prefetch and arm.exchange in self._exchanges
        )

    def updated(self, optimizer: RowUpdate, step: int) -> None:
        """Count a step, and propose the arm of the next ones."""
        del optimizer, step
        self._begin_with_priced()
        now, last = self._clock(), self._last
        self._last = now
        if last is None:
            return
        if self._tuner.steps <= HINT_AFTER_STEPS + HINT_STEPS:
            self._suggest_prefetch(now)
        tuner, choice = self._tuner, self._choice
        version = self._version()
        if version != self._newest_version:
            self._newest_version, self._changed_at = version, now
        busy = any(other.measures_at(now) for other in _TUNERS if other is not self)
        alone = now - self._changed_at >= QUIET_SECONDS and not busy
        if tuner.step(now - last, choice.in_use, self.arms, version=version, may_begin=alone):
            self._measured = tuple(ArmReport(str(one.arm), one.seconds) for one in tuner.times)
            self._log()
        if tuner.trial is not None:
            choice.reason = ExchangeReason.TRIAL
        elif tuner.times:
            choice.reason = ExchangeReason.MEASURED
        if len(self.arms) > 1 and tuner.wanted != choice.newest:
            choice.propose(tuner.wanted)

    def _suggest_prefetch(self, now: float) -> None:
        """Say once what a loop that does not prefetch could hide at most: no more than it waits for, and no more than
        it computes."""
        if self.prefetch != (0,):
            self._hint_from = None
        elif self._tuner.steps == HINT_AFTER_STEPS:
            self._hint_from = (now, *self._waited_and_outside())
        elif self._tuner.steps == HINT_AFTER_STEPS + HINT_STEPS and self._hint_from is not None:
            ended = (now, *self._waited_and_outside())
            taken = (after - before for after, before in zip(ended, self._hint_from, strict=True))
            seconds, waited, outside = (each / HINT_STEPS for each in taken)
            hidden = min(waited, outside)
            if hidden > LEAST_HINT * seconds:
                logger.warning(
                    "flexd.prefetch(loader, collection) would save up to %.0f ms of %.0f ms per step: what steps wait "
                    "for the exchange of rows while nothing is computed", 1000 * hidden, 1000 * seconds,
                )  # fmt: skip

    def _begin_with_priced(self) -> None:
        """Begin with the exchange that is priced lower; the first price counts, and what is measured counts more."""
        if self._priced or not (priced := self._ask_priced()) or priced not in self._exchanges:
            return
        self._priced = priced
        if self._choice.reason is ExchangeReason.START:
            self._choice.reason = ExchangeReason.PRICED
            self._tuner.begin_with(Arm(priced, min(1, self.prefetch[-1]), self._choice.wire))

    def _log(self) -> None:
        tuner = self._tuner
        times = ", ".join(
            f"{one.arm} {1000 * one.seconds:.1f} ms" for one in sorted(tuner.times, key=lambda one: one.seconds)
        )
        logger.info("steps use %s, measured at step %d: %s", tuner.chosen, tuner.measured_at_step, times)

    def measures_at(self, now: float) -> bool:
        """Return whether arms are being measured, by steps that still come."""
        return self._tuner.trial is not None and self._last is not None and 0 <= now - self._last < QUIET_SECONDS

    def used(self) -> UsedExchange:
        """Return what the rank reports."""
        return UsedExchange(
            self._choice.exchange, self._choice.reason or "", str(self._choice.in_use), self._measured,
            self._tuner.measured_at_step,
        )  # fmt: skip

    def tuning(self) -> Tuning:
        """Return the arm in use, and what was measured."""
        tuner = self._tuner
        return Tuning(
            str(self._choice.in_use), str(self._choice.reason or ""), tuner.trial is not None, tuner.measured_at_step,
            tuner.explored_steps, tuple((str(one.arm), 1000 * one.seconds) for one in tuner.newest_times),
        )  # fmt: skip
