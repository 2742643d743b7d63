"""Find the fastest arm of a job: measure each in blocks of steps, in random order, and keep the one that wins.

Numbers only: who runs the tuner gives it the seconds of every step, and gets the arm to use from now on. Blocks of the
arms are paired in rounds, so drift and load change all of them alike; a signed-rank interval on their ratios
(``flexd.core.switchback``) drops an arm that is slower or that makes no difference, and one that is clearly slower
leaves after two rounds. Exploring is bounded by a share of all steps.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

from flexd.core.switchback import SwitchbackRule

SKIPPED_STEPS = 2
"""After a change: the first steps fill or empty the pipeline."""
BLOCK_STEPS = 8
SHORT_BLOCK_STEPS = 4
"""Steps after which a block ends early if all of them took much longer than steps of the best arm."""
MUCH_SLOWER, CLEARLY_SLOWER = 1.25, 1.10
"""Step times over those of the best arm."""
CLEAR_ROUNDS, MOSTLY_CLEAR_ROUNDS = 2, 4
"""Rounds after which an arm leaves that was clearly slower in every one, or slower in nearly every one."""
RULE = SwitchbackRule(max_pairs=24, confidence=0.95, resolution=0.01)
START_STEPS = 10
"""Steps that come before the first trial: their memory and connections are made."""
FIRST_PAUSE_STEPS, LONGEST_PAUSE_STEPS = 1_000, 128_000
"""Between two trials without cause: the pause doubles each time."""
CHANGE, LARGE_CHANGE = 0.10, 0.50
"""Change of the step time, as a share, that is a cause for a trial when it lasts ``CHANGE_STEPS``. It grows with each
trial that changed nothing, up to the large one, which is always a cause."""
CHANGE_GROWTH = 2.0
CHANGE_STEPS = 200
QUIET_STEPS = 100
"""Steps without a change of the placement before a trial; a new placement is a cause for one."""
CAUSE_PAUSE_STEPS = 300
"""Before a further trial with a cause."""
MAX_EXPLORED_SHARE, FREE_STEPS = 0.01, 40.0
"""Trials without a large change may lose this share of all steps, and this many steps more."""
NEAR = 1.25
"""A trial leaves out arms that took longer than this times the best one in the trial before, and one with a cause those
that took longer by this and the change. Trials as rare as ``RARE_PAUSE_STEPS`` are of all arms."""
RARE_PAUSE_STEPS = 4_000
STUCK_STEPS = 100
"""Steps without the arm that was asked for, or rounds that were begun anew, after which a trial is given up."""

A = TypeVar("A", bound=Hashable)


def block_seconds(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half: it uses more of the steps than their median, and no outlier."""
    ordered = sorted(seconds)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


class Trial(Generic[A]):
    """Compares arms in rounds, one block of each in random order, until one is left.

    Args:
        arms: at least one; the first is kept where another makes no difference.

    Attributes:
        live: arms that may still win.
        seconds: of a step in every block, by arm.
        explored_steps: steps lost so far by blocks of arms that are not the best.
    """

    def __init__(self, arms: Sequence[A], draw: random.Random) -> None:
        self.live = list(arms)
        self.seconds: dict[A, list[float]] = {arm: [] for arm in arms}
        self._kept = arms[0]
        self._slower: Counter[A] = Counter()
        """Rounds in which an arm was clearly slower."""
        self._draw = draw
        self._last: A | None = None
        self._order: list[A] = []
        self._blocks: list[tuple[A, float, int]] = []
        self._round: dict[A, list[float]] = {}
        self._begin_round()

    @property
    def next(self) -> A | None:
        """The arm of the next block; None: decided."""
        return self._order[0] if self._order else None

    @property
    def best(self) -> A:
        """The arm with the lowest typical step time among those that may win."""
        return min(self.live, key=lambda arm: median(self.seconds[arm]) if self.seconds[arm] else float("inf"))

    @property
    def explored_steps(self) -> float:
        best = min((block_seconds(steps) for steps in self.seconds.values() if steps), default=0.0)
        return sum(max(0.0, seconds / best - 1) * steps for _, seconds, steps in self._blocks) if best else 0.0

    def much_slower(self, seconds: Sequence[float]) -> bool:
        """Return whether the block of ``next`` need not go on: every step took much longer than those of another."""
        best = min((typical for arm, parts in self.seconds.items() if arm != self.next for typical in parts), default=0)
        return len(seconds) >= SHORT_BLOCK_STEPS and 0 < best * MUCH_SLOWER < min(seconds)

    def add(self, seconds: Sequence[float]) -> None:
        """Add the steps of the block of ``next``."""
        arm = self._last = self._order.pop(0)
        self._round[arm] = list(seconds)
        self._blocks.append((arm, block_seconds(seconds), len(seconds)))
        if self._order:
            return
        for of_arm, steps in self._round.items():
            self.seconds[of_arm].append(block_seconds(steps))
        self._drop_clearly_slower()
        self._drop_by_rule()
        if len(self.live) > 1:
            self._begin_round()

    def begin_again(self) -> None:
        """Forget the blocks of this round: they were not alike."""
        self._begin_round()

    def _begin_round(self) -> None:
        self._round = {}
        self._order = self._draw.sample(self.live, len(self.live)) if len(self.live) > 1 else []
        if len(self._order) > 1 and self._order[0] == self._last:  # not two blocks of a slow arm in a row
            self._order.append(self._order.pop(0))

    def _drop_clearly_slower(self) -> None:
        """Drop arms that were clearly slower than the best one in every round, or in nearly all of some rounds: one
        block may have met a burst."""
        best = self.best
        fast = self._round[best]
        slow_of_best = sorted(fast)[-1 - len(fast) // 4]
        for arm in [one for one in self.live if one != best]:
            steps = self._round[arm]
            apart = sorted(steps)[len(steps) // 4] > slow_of_best
            if apart and block_seconds(steps) > CLEARLY_SLOWER * block_seconds(fast):
                self._slower[arm] += 1
            ratios = [mine / of_best for mine, of_best in zip(self.seconds[arm], self.seconds[best], strict=True)]
            rounds = len(ratios)
            always = self._slower[arm] == rounds >= CLEAR_ROUNDS
            mostly = sum(ratio > 1 for ratio in ratios) >= rounds - rounds // 4 and median(ratios) > CLEARLY_SLOWER
            if always or (rounds >= MOSTLY_CLEAR_ROUNDS and mostly):
                self.live.remove(arm)

    def _drop_by_rule(self) -> None:
        leader = self.best
        for arm in [one for one in self.live if one != leader]:
            effect = RULE.effect(self.seconds[leader], self.seconds[arm])
            if RULE.verdict(effect) is None:
                continue
            margin = RULE.resolution * ((arm == self._kept) - (leader == self._kept))
            if effect.share > margin:
                self.live.remove(arm)
            else:
                self.live.remove(leader)
                return


@dataclass(frozen=True)
class ArmTime(Generic[A]):
    """The time that the newest trial measured of an arm.

    Attributes:
        seconds: of a typical step.
    """

    arm: A
    seconds: float


class Tuner(Generic[A]):
    """Decides when to measure, and which arm to use.

    Args:
        arm: the one to begin with.
    """

    def __init__(self, arm: A, draw: random.Random | None = None) -> None:
        self.chosen = arm
        self.steps = self.trials = 0
        self.measured_at_step = 0
        """Step after which the newest trial ended; 0 before any."""
        self.explored_steps = 0.0
        """Steps that trials have lost."""
        self.times: tuple[ArmTime[A], ...] = ()
        self.trial: Trial[A] | None = None
        self._draw = draw or random.Random()
        self._arms: tuple[A, ...] = ()
        self._chosen_of: dict[tuple[A, ...], A] = {}
        """Choices of trials, by the arms that they compared."""
        self._block: list[float] = []
        self._skip = self._waited = self._restarts = 0
        self._begin_at, self._pause = START_STEPS, FIRST_PAUSE_STEPS
        self._cause_from, self._least_change, self._caused = 0, CHANGE, False
        self._most = math.inf
        """The next trial leaves out arms that took longer than this times the one in use."""
        self._newest: deque[float] = deque(maxlen=CHANGE_STEPS)
        self._usual: float | None = None
        """Typical step after the newest trial."""
        self._version = self._tried_version = 0
        self._version_at = -QUIET_STEPS

    @property
    def wanted(self) -> A:
        """The arm to use from now on."""
        following = None if self.trial is None else self.trial.next
        return self.chosen if following is None else following

    def begin_with(self, arm: A) -> None:
        """Use an arm that is predicted to win until the first trial; nothing afterwards."""
        if not self.trials and self.trial is None:
            self.chosen = arm

    def step(self, seconds: float, in_use: A, arms: Sequence[A], *, version: int = 0, may_begin: bool = True) -> bool:
        """Count a step. Returns whether a trial has ended.

        Args:
            in_use: the arm of the step.
            arms: those to choose from; others than before end a trial and begin a new one.
            version: of the placement.
            may_begin: no one else measures.
        """
        self.steps += 1
        changed, self._version = version != self._version, version
        if changed:
            self._version_at = self.steps
        if tuple(arms) != self._arms:
            self._set_arms(tuple(arms))
        if self.trial is not None:
            return self._measure(self.trial, seconds, in_use, changed=changed)
        if len(self._arms) > 1:
            self._newest.append(seconds)
            if may_begin and self.steps - self._version_at >= QUIET_STEPS and self._is_due():
                self._begin()
        return False

    def _set_arms(self, arms: tuple[A, ...]) -> None:
        if self.trial is not None:
            self.explored_steps += self.trial.explored_steps
        self._arms, self.trial, self.times = arms, None, ()
        known = self._chosen_of.get(arms)
        self._begin_at = self.steps + (START_STEPS if known is None else self._pause)
        self._newest.clear()
        self._usual = None
        if known is not None or self.chosen not in arms:
            self.chosen = arms[0] if known is None else known

    def _is_due(self) -> bool:
        """Return whether to begin a trial, and decide of which arms."""
        change = self._change()
        self._caused = change > 0
        if self._caused:
            self._pause, self._most = FIRST_PAUSE_STEPS, NEAR + change
        elif self.steps >= self._begin_at:
            self._most = math.inf if self._pause > RARE_PAUSE_STEPS else NEAR
        else:
            return False
        if len(self._near()) > 1:
            return True
        self._pause_longer()
        self._forget(None)
        return False

    def _change(self) -> float:
        """Return how much has changed, as a share of the step time; 0 if that is no cause for a trial."""
        if self.steps < self._cause_from:
            return 0.0
        change = 0.0
        if len(self._newest) == CHANGE_STEPS and self.steps % 20 == 0:
            typical = median(self._newest)
            self._usual = self._usual or typical
            change = abs(typical / self._usual - 1)
        if change > LARGE_CHANGE:
            return change
        if self.explored_steps > MAX_EXPLORED_SHARE * self.steps + FREE_STEPS:
            return 0.0
        if self._version != self._tried_version:
            return math.inf
        return change if change > self._least_change else 0.0

    def _near(self) -> list[A]:
        """Return the arms of the next trial, the one in use first."""
        of_chosen = next((one.seconds for one in self.times if one.arm == self.chosen), 0.0)
        far = {one.arm for one in self.times if one.seconds > self._most * of_chosen}
        return [self.chosen, *(arm for arm in self._arms if arm != self.chosen and arm not in far)]

    def _pause_longer(self) -> None:
        self._begin_at, self._pause = self.steps + self._pause, min(2 * self._pause, LONGEST_PAUSE_STEPS)

    def _begin(self) -> None:
        self.trial = Trial(self._near(), self._draw)
        self._restarts, self._tried_version = 0, self._version
        self._begin_block()

    def _begin_block(self) -> None:
        self._block, self._skip, self._waited = [], SKIPPED_STEPS, 0

    def _measure(self, trial: Trial[A], seconds: float, in_use: A, *, changed: bool) -> bool:
        if changed:
            trial.begin_again()
            self._tried_version = self._version
            self._restarts += 1
            self._begin_block()
        elif in_use != trial.next:
            self._waited += 1
            self._block, self._skip = [], SKIPPED_STEPS
        elif self._skip > 0:
            self._skip -= 1
        else:
            self._block.append(seconds)
            if len(self._block) == BLOCK_STEPS or trial.much_slower(self._block):
                trial.add(self._block)
                self._begin_block()
        if trial.next is None:
            self._end(trial)
            return True
        if self._waited > STUCK_STEPS or self._restarts > STUCK_STEPS:
            self.explored_steps += trial.explored_steps
            self.trial = None
            self._begin_at = self.steps + self._pause
        return False

    def _end(self, trial: Trial[A]) -> None:
        before, self.chosen = self.chosen, trial.live[0]
        self._chosen_of[self._arms] = self.chosen
        self.trial = None
        self.trials += 1
        self.measured_at_step = self.steps
        self.explored_steps += trial.explored_steps
        new = {arm: median(seconds) for arm, seconds in trial.seconds.items()}
        left_out = {one.arm: one.seconds for one in self.times} | new
        self.times = tuple(ArmTime(arm, left_out[arm]) for arm in self._arms)
        if before != self.chosen:
            self._least_change = CHANGE
        elif self._caused:
            self._least_change = min(LARGE_CHANGE, self._least_change * CHANGE_GROWTH)
        self._pause_longer()
        self._forget(new[self.chosen])

    def _forget(self, usual: float | None) -> None:
        """Compare the next steps with ``usual``, or with the first of them."""
        self._cause_from = self.steps + CAUSE_PAUSE_STEPS
        self._newest.clear()
        self._usual = usual
