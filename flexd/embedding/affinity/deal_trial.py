"""Deal batches only while that makes steps shorter, as they are measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from flexd.embedding.exchange.exchange_choice import ExchangeTrial
from flexd.embedding.step_times import CLEAR_MARGIN, StepTimes, is_clearly_less

logger = logging.getLogger(__name__)


class DealTrial:
    """Compares steps with and without dealing on one rank, and pauses dealing on all.

    Steps of all ranks take equally long, because every step exchanges rows with all of them, so one rank decides. Ranks
    gather headers of every batch that may be dealt; in its own the measuring rank sends ``order()``, the number of
    batches that are not dealt, this one first. All ranks begin that pause at the same batch, and gather headers again
    at the batch after it::

        dealing  ... | order: a block | not dealt | compared: go on, or order a long pause
        pausing  ... | its last steps, not dealt | dealt | compared: deal again, or order a pause twice as long

    The way in use changes only if the other one takes clearly less (``is_clearly_less``). A step counts if all batches
    that it dealt, looked up or updated are dealt, or none.

    Args:
        measures: this rank measures; one does.
        exchange: the trial of the exchange on this rank. The two take turns.
        steps: of each way that are compared, by their medians.
        interval_steps: until dealing is measured again. A pause after one that did not end in dealing is twice as long,
            up to ``longest_pause``: trying costs up to 60 long steps.
    """

    def __init__(
        self,
        *,
        measures: bool,
        exchange: ExchangeTrial | None = None,
        steps: int = 30,
        interval_steps: int = 5000,
        longest_pause: int = 40_000,
        margin: float = CLEAR_MARGIN,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._measures, self._exchange = measures, exchange
        self._steps, self._interval, self._longest, self._margin = steps, interval_steps, longest_pause, margin
        self._times = StepTimes(steps, clock=clock)
        self._left = 0
        """Batches of the pause that are left; equal on all ranks."""
        self._resumed = 0
        """Batches of the long pause that were left when the loop began; known by the rank that measures."""
        self._settle = 0
        """Steps after a change that are of both ways."""
        self._dealt = False
        """Whether the last batch was dealt."""
        self._dealing = True
        """The way in use."""
        self._usual: float | None = None
        """Median step of the way in use, while the other one is tried."""
        self._wait = steps
        """Steps until the next trial, while dealing."""
        self._pause = interval_steps
        self._told = False

    # On every rank.

    def begin_loop(self, depth: int) -> None:
        """Begin a loop that reads ``depth`` batches ahead of the one it trains on.

        A block without dealing that is under way is dropped. A long pause goes on as the first header says, even if
        ranks left the last loop at different batches.
        """
        self._resumed = 0 if self._dealing else self._left
        self._left = 0
        self._settle = depth + 3
        self._times.interrupt()
        self._times.leave_out(self._settle)

    def may_deal(self) -> bool:
        """Count a batch, and return whether it may be dealt."""
        if self._left > 0:
            self._left -= 1
            return False
        return True

    def pause(self, batches: int) -> bool:
        """Do not deal this batch, which might be, and the following ones, ``batches`` in all; return whether it may."""
        self._left = max(0, batches - 1)
        return batches == 0

    # On the rank that measures.

    def step(self, *, dealt: bool) -> None:
        """Count a step of the training thread.

        Args:
            dealt: whether the batch was dealt that was read in it.
        """
        if not self._measures:
            return
        changed = dealt != self._dealt
        self._dealt = dealt
        self._times.step(counts=not changed)
        if changed or self._exchange_measures:
            self._times.leave_out(self._settle)
        self._wait = max(0, self._wait - 1)

    def order(self) -> int:
        """Return for how many batches all ranks shall pause, from the one whose header this is; 0: they shall not."""
        if not self._measures:
            return 0
        if self._resumed > 0:
            resumed, self._resumed = self._resumed, 0
            return resumed
        return self._order_dealing() if self._dealing else self._order_pausing()

    @property
    def _exchange_measures(self) -> bool:
        return self._exchange is not None and self._exchange.measures

    @property
    def _block(self) -> int:
        """Batches not dealt, so that ``steps`` count: the first one changes the way."""
        return 1 + self._settle + self._steps

    def _order_dealing(self) -> int:
        typical = self._times.median_seconds
        if self._dealt:
            self._usual = None
            if typical is None or self._wait > 0:
                return 0
            return self._try(typical, self._block)
        usual, self._usual = self._usual, None
        if usual is None:
            return 0  # the pause was one to save bytes
        if typical is None:  # the exchange was measured in between, or the loop ended
            self._wait = self._steps
            return 0
        self._wait = self._interval
        if not is_clearly_less(typical, usual, self._margin):
            return 0
        self._dealing, self._pause = False, self._interval
        self._tell(with_it=usual, without=typical)
        return self._pause

    def _order_pausing(self) -> int:
        typical = self._times.median_seconds
        if not self._dealt:  # the pause is over, or one to save bytes, which ends the trial
            return self._block if typical is None else self._try(typical, 0)
        if typical is None:
            return 0
        usual, self._usual = self._usual, None
        if usual is not None and is_clearly_less(typical, usual, self._margin):
            self._dealing, self._wait = True, self._interval
            logger.info("samples are dealt again: a step takes %.4g s, %.4g s without", typical, usual)
            return 0
        self._pause = min(self._longest, 2 * self._pause)
        return self._pause

    def _try(self, usual: float, pause: int) -> int:
        """Begin to measure the other way, and return the pause for it."""
        self._usual = usual
        if self._exchange is not None:
            self._exchange.put_off(2 * self._block)
        return pause

    def _tell(self, *, with_it: float, without: float) -> None:
        if self._told:
            return
        self._told = True
        logger.warning(
            "samples are not dealt for %d batches: a step takes %.4g s with dealing and %.4g s without. It is tried "
            "again after that; drop deal=True to read one batch less ahead",
            self._pause, with_it, without,
        )  # fmt: skip
