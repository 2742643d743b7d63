"""Find the fastest arm of a job: measure each in blocks of steps, in random order, and keep the one that wins.

Numbers only: who runs the tuner gives it the seconds of every step, and gets the arm to use from now on. Blocks of the
arms are paired in rounds, so drift and load change all of them alike. A signed-rank interval on their ratios
(``flexd.core.switchback``) drops an arm that is slower or that makes no difference; one that is slower by more than the
blocks vary leaves after two rounds. A trial decides after ``TRIAL_STEPS`` by what it knows, and the next one goes on
with its rounds if nothing has changed. Exploring is bounded by a share of all steps.
"""

import math
import random
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

import numpy as np

from flexd.core.switchback import FIRST_LOOK, PAIRS_BETWEEN_LOOKS, estimate_effect

SKIPPED_STEPS = 2
"""After a change: the first steps fill or empty the pipeline."""
BLOCK_STEPS = 8
SHORT_BLOCK_STEPS = 4
"""Steps after which a block ends early if all of them took much longer than steps of the best arm."""
MUCH_SLOWER, CLEARLY_SLOWER = 1.25, 1.10
"""Step times over those of the best arm."""
CLEAR_Z = 2.2
"""Standard deviations by which an arm is clearly slower, of a normal distribution."""
LOOK_ERROR, ALIKE, KEEP = 0.01, 0.01, 0.003
"""Probability that one look drops the better of two arms; shares of a step by which arms are alike, and by which
another one must be faster than the arm in use."""
TRIAL_STEPS = 470
"""After these a trial decides by what it knows. The next one goes on with its rounds."""
MAX_ROUNDS = 64
"""Rounds of earlier trials that count."""
START_STEPS = 10
"""Steps that come before the first trial: their memory and connections are made."""
FIRST_PAUSE_STEPS, LONGEST_PAUSE_STEPS = 1_000, 128_000
"""Between two trials without cause: the pause doubles each time."""
UNDECIDED_PAUSE_STEPS, UNDECIDED_TRIALS = 500, 3
"""Pause after a trial that did not find which arm is best, and how many of the first trials are followed by it."""
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


def _student_quantile(normal: float, freedom: int) -> float:
    """Return the quantile of Student's t at the level of a normal one (Abramowitz and Stegun, 26.7.5, two terms)."""
    second = (5 * normal**5 + 16 * normal**3 + 3 * normal) / (96 * freedom**2)
    return normal + (normal**3 + normal) / (4 * freedom) + second


class Trial(Generic[A]):
    """Compares arms in rounds, one block of each in random order, until one is left.

    Args:
        arms: at least one; the first is kept where another makes no difference.
        earlier: rounds of trials before it, under the same conditions.

    Attributes:
        live: arms that may still win.
        rounds: seconds of a step in every block, by arm, the earlier rounds first.
        decided: whether one arm was found, not just taken as the time was up.
        explored_steps: steps lost so far by blocks of arms that are not the best, noise included.
    """

    def __init__(self, arms: Sequence[A], draw: random.Random, earlier: Sequence[dict[A, float]] = ()) -> None:
        self.live = list(arms)
        self.rounds = list(earlier)
        self._earlier = len(earlier)
        self.decided = True
        self._kept = arms[0]
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
        """The arm with the lowest typical step time, next to those of its rounds, among those that may win."""
        rounds = [one for one in self.rounds if all(arm in one for arm in self.live)]
        if not rounds:
            return self.live[0]
        return min(self.live, key=lambda arm: median(one[arm] / sum(one[each] for each in self.live) for one in rounds))

    @property
    def seconds(self) -> dict[A, float]:
        """Of a typical step of each arm in this trial."""
        new = self.rounds[self._earlier :]
        return {arm: median(one[arm] for one in new if arm in one) for arm in (new[0] if new else ())}

    @property
    def explored_steps(self) -> float:
        best = min(self.seconds.values(), default=math.inf)
        return sum(max(0.0, seconds / best - 1) * steps for _, seconds, steps in self._blocks)

    def much_slower(self, seconds: Sequence[float]) -> bool:
        """Return whether the block of ``next`` need not go on: every step took much longer than those of another."""
        best = min((typical for arm, typical, _ in self._blocks if arm != self.next), default=0)
        return len(seconds) >= SHORT_BLOCK_STEPS and 0 < best * MUCH_SLOWER < min(seconds)

    def add(self, seconds: Sequence[float]) -> None:
        """Add the steps of the block of ``next``."""
        arm = self._last = self._order.pop(0)
        self._round[arm] = list(seconds)
        self._blocks.append((arm, block_seconds(seconds), len(seconds)))
        if self._order:
            return
        self.rounds.append({of_arm: block_seconds(steps) for of_arm, steps in self._round.items()})
        self._drop_clearly_slower()
        self._drop_by_rule()
        if len(self.live) > 1:
            self._begin_round()

    def begin_again(self) -> None:
        """Forget the blocks of this round: they were not alike."""
        self._begin_round()

    def end(self) -> None:
        """Decide by what is known: the time is up."""
        self.live, self._order = [self._better(self.best, self._kept)], []
        self.decided = False

    def _begin_round(self) -> None:
        self._round = {}
        self._order = self._draw.sample(self.live, len(self.live)) if len(self.live) > 1 else []
        if len(self._order) > 1 and self._order[0] == self._last:  # not two blocks of a slow arm in a row
            self._order.append(self._order.pop(0))

    def _pairs(self, arm: A, other: A) -> tuple[list[float], list[float]]:
        both = [one for one in self.rounds if arm in one and other in one]
        return [one[arm] for one in both], [one[other] for one in both]

    def _drop_clearly_slower(self) -> None:
        """Drop arms that are slower than the best one by more than what the blocks vary: one may have met a burst.

        The spread is that of the residuals of log seconds less the means of their arm and round.
        """
        rounds = self.rounds[self._earlier :]
        freedom = (len(rounds) - 1) * (len(self.live) - 1)
        if not freedom:
            return
        logs = np.log([[one[arm] for arm in self.live] for one in rounds])
        typical = logs.mean(axis=0)
        residuals = logs - typical - logs.mean(axis=1, keepdims=True) + logs.mean()
        spread = math.sqrt(2 * float(np.square(residuals).sum()) / freedom / len(rounds))
        bound = max(math.log(CLEARLY_SLOWER), _student_quantile(CLEAR_Z, freedom) * spread)
        slower = typical - typical.min() > bound
        self.live = [arm for arm, is_slower in zip(self.live, slower, strict=True) if not is_slower]

    def _drop_by_rule(self) -> None:
        leader = self.best
        for arm in [one for one in self.live if one != leader]:
            pairs = self._pairs(leader, arm)
            if len(pairs[0]) < FIRST_LOOK or len(pairs[0]) % PAIRS_BETWEEN_LOOKS:
                continue
            effect = estimate_effect(*pairs, LOOK_ERROR)
            alike = effect.low >= -ALIKE and effect.high <= ALIKE
            if not alike and effect.low <= 0 <= effect.high:
                continue
            better = self._better(leader, arm)
            self.live.remove(arm if better == leader else leader)
            if better != leader:
                return

    def _better(self, leader: A, arm: A) -> A:
        """Return the faster arm; the one that was in use before where the other is not faster by ``KEEP``."""
        if leader == arm:
            return leader
        share = estimate_effect(*self._pairs(leader, arm), LOOK_ERROR).share
        return leader if share > KEEP * ((arm == self._kept) - (leader == self._kept)) else arm


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
        # Choices of trials, by the arms that they compared.
        self._chosen_of: dict[tuple[A, ...], A] = {}
        self._block: list[float] = []
        self._skip = self._waited = self._restarts = 0
        # Of earlier trials, since the last cause for one.
        self._rounds: list[dict[A, float]] = []
        self._trial_from = 0
        self._begin_at, self._pause = START_STEPS, FIRST_PAUSE_STEPS
        self._cause_from, self._least_change, self._caused = 0, CHANGE, False
        # The next trial leaves out arms that took longer than this times the one in use.
        self._most = math.inf
        self._newest: deque[float] = deque(maxlen=CHANGE_STEPS)
        # Typical step after the newest trial.
        self._usual: float | None = None
        self._version = self._tried_version = 0
        self._version_at = -QUIET_STEPS

    @property
    def newest_times(self) -> tuple[ArmTime[A], ...]:
        """Times of the trial that is under way, as far as it has measured; else of the newest."""
        so_far = {} if self.trial is None else self.trial.seconds
        return tuple(ArmTime(arm, so_far[arm]) for arm in self._arms if arm in so_far) or self.times

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
        self._arms, self.trial, self.times, self._rounds = arms, None, (), []
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
        if self._caused:
            self._rounds = []
        self.trial = Trial(self._near(), self._draw, self._rounds)
        self._restarts, self._tried_version, self._trial_from = 0, self._version, self.steps
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
                if self.steps - self._trial_from > TRIAL_STEPS:
                    trial.end()
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
        new = trial.seconds
        self._rounds = trial.rounds[-MAX_ROUNDS:]
        left_out = {one.arm: one.seconds for one in self.times} | new
        self.times = tuple(ArmTime(arm, left_out[arm]) for arm in self._arms)
        if before != self.chosen:
            self._least_change = CHANGE
        elif self._caused:
            self._least_change = min(LARGE_CHANGE, self._least_change * CHANGE_GROWTH)
        if trial.decided or self.trials > UNDECIDED_TRIALS:
            self._pause_longer()
        else:
            self._begin_at = self.steps + UNDECIDED_PAUSE_STEPS
        self._forget(new[self.chosen])

    def _forget(self, usual: float | None) -> None:
        """Compare the next steps with ``usual``, or with the first of them."""
        self._cause_from = self.steps + CAUSE_PAUSE_STEPS
        self._newest.clear()
        self._usual = usual
