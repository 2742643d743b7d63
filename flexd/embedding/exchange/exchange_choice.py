"""The exchange that ranks use: its hops, the agreement to change it between two steps, the choice by measured steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from flexd.control.protocol.report import ExchangeReason
from flexd.core.errors import EmbeddingError
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.row_optimizers import RowUpdate
from flexd.embedding.step import StepMoments

CLEAR_MARGIN = 0.03
"""Share of a step that another way must save to be used instead: less is within what medians of 30 steps differ by."""


_NAMES = ("chain", "direct")
_MAX_PROPOSALS = 2**14
"""Proposals of a job that the message of sizes has room for (15 bits with the exchange)."""


class ExchangeChoice:
    """The exchange in use, and the one that all ranks have agreed to use next.

    Proposals are numbered and travel with the sizes of every look-up, combined by maximum: after a look-up all ranks
    know the newest one, and apply it before the next step that no route or gradient of an earlier one depends on.
    """

    def __init__(self, name: str, reason: ExchangeReason | None = None) -> None:
        self.name = name
        self.reason = reason
        """Why it is used; None on a rank that follows the proposals of others."""
        self._proposed = self._agreed = 0

    @property
    def proposed(self) -> int:
        """The newest proposal that this rank knows, to send with a look-up."""
        return max(self._proposed, self._agreed)

    def propose(self, name: str) -> None:
        """Propose chain or direct to all ranks, unless too many proposals were made. Of proposals in the same look-up,
        direct is taken."""
        number = self.proposed // len(_NAMES) + 1
        if number < _MAX_PROPOSALS:
            self._proposed = number * len(_NAMES) + _NAMES.index(name)

    def agreed(self, proposal: int) -> None:
        """Set the highest proposal of all ranks."""
        self._agreed = max(self._agreed, proposal)

    @property
    def due(self) -> bool:
        """True if ranks have agreed on another exchange than the one in use. Equal on all ranks."""
        return self._agreed > 0 and self.next != self.name

    @property
    def next(self) -> str:
        """The agreed exchange."""
        return _NAMES[self._agreed % len(_NAMES)] if self._agreed else self.name


class ExchangeTrial(StepMoments):
    """Proposes the exchange whose steps take less time, as one rank measures them.

    Steps of all ranks take equally long, because every step exchanges rows with all of them, so one rank decides.
    Every ``interval_steps`` it measures ``steps`` of the exchange in use and ``steps`` of the other one, and keeps the
    other only if its median step takes less than ``1 - margin`` of the median of the one in use.

    Args:
        priced: returns the exchange that the daemon prices lower, empty as long as none is known.
    """

    def __init__(
        self,
        choice: ExchangeChoice,
        priced: Callable[[], str] = str,
        *,
        steps: int = 30,
        interval_steps: int = 5000,
        margin: float = CLEAR_MARGIN,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._choice = choice
        self._pause_steps = interval_steps
        self._margin = margin
        self._clock = clock
        self._times: deque[float] = deque(maxlen=steps)
        """Seconds of the newest steps that count."""
        self._last: float | None = None
        self._left_out = steps
        """Steps that do not count: the first ones, those after a change, and those until the next trial."""
        self._before: tuple[str, float] | None = None
        """The exchange in use before the trial and its median step; None while it is measured."""
        self._priced = ""
        self._ask_priced = priced

    def begin_with(self, priced: str) -> None:
        """Begin with the exchange that is priced lower. A price that is not the first, or that comes when steps have
        been measured, changes nothing: what is measured counts more."""
        if self._priced or priced not in _NAMES:
            return
        self._priced = priced
        if self._choice.reason is not ExchangeReason.START:
            return
        self._choice.reason = ExchangeReason.PRICED
        if priced != self._choice.next:
            self._choice.propose(priced)
            self._begin_anew(0)

    def updated(self, optimizer: RowUpdate, step: int) -> None:
        """Count a step, and begin with what is priced lower."""
        del optimizer, step
        self.begin_with(self._ask_priced())
        self.step()

    def step(self) -> None:
        """Count a step; call it after each one."""
        now, last = self._clock(), self._last
        self._last = now
        # A change may come with one of the next look-ups.
        if not self._choice.due and self._choice.proposed % len(_NAMES) == _NAMES.index(self._choice.next):
            if self._left_out > 0:
                self._left_out -= 1
            elif last is not None:
                self._times.append(now - last)
        if len(self._times) < (self._times.maxlen or 0):
            return
        typical = median(self._times)
        if self._before is None:
            self._before = (self._choice.name, typical)
            self._choice.reason = ExchangeReason.TRIAL
            self._choice.propose(_NAMES[1 - _NAMES.index(self._choice.name)])
            self._begin_anew(3)
            return
        (name, usual), self._before = self._before, None
        self._choice.reason = ExchangeReason.MEASURED
        if typical >= usual * (1 - self._margin):
            self._choice.propose(name)
        self._begin_anew(self._pause_steps)

    def _begin_anew(self, left_out: int) -> None:
        """Measure after ``left_out`` further steps, or more if more were to be left out already."""
        self._times.clear()
        self._left_out = max(self._left_out, left_out)


def row_hops(exchange: str, groups: ChainGroups) -> list[Hop]:
    """Return the hops of requests for rows: with "chain" inside the node to the node owner, then over the rail.

    Raises:
        EmbeddingError: an unknown exchange.
    """
    local_ranks = groups.layout.local_ranks
    if exchange == "chain":
        hops = [
            Hop(groups.node, lambda homes: homes % local_ranks),
            Hop(groups.rail, lambda homes: homes // local_ranks, all_reduces=True),
        ]
    elif exchange == "direct":
        hops = [Hop(groups.world, lambda homes: homes)]
    else:
        raise EmbeddingError(f"exchange {exchange!r}", remedy="one of auto, chain, direct")
    return [hop for hop in hops if hop.peers.size > 1]


def bag_hops(exchange: str, groups: ChainGroups) -> list[Hop]:
    """Return the hops of bags pooled at the owner: with "chain" over the rail first, so that the sums of a node
    are added before they leave it, then inside the node of the homes."""
    local_ranks = groups.layout.local_ranks
    if exchange == "chain":
        hops = [
            Hop(groups.rail, lambda homes: homes // local_ranks),
            Hop(groups.node, lambda homes: homes % local_ranks),
        ]
    else:
        hops = [Hop(groups.world, lambda homes: homes)]
    return [hop for hop in hops if hop.peers.size > 1]
