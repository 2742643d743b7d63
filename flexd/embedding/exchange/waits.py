"""Ranks that wait in a collective: which ranks they wait for, by name, and whether the wait can end.

A rank that computes, loads data or is in a call of another library is as silent as one that has left the loop, so it is
named in a warning and waited for. A wait cannot end where every rank that is waited for waits too, for each other in
different calls, or has closed its collection or ended its process: that is an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from flexd.core.errors import CollectiveError
from flexd.embedding.exchange.fault_notices import FaultNotices

logger = logging.getLogger(__name__)

NAMED_SECONDS = 10.0
"""Time in a collective after which the ranks that are waited for are named."""
_MAX_NAMED = 8
# Ranks of a group that are read in one look.
_MAX_READ = 64
# Looks with one result before a wait is given up: for whom a rank waits reaches the others look by look.
_LOOKS_TO_GIVE_UP = 5


@dataclass(frozen=True)
class PublishedWait:
    """Published state of a rank that waits, or has left.

    Attributes:
        doing: its call, as the predicate of a sentence.
        issued: its collectives so far by group, the one it waits in among them.
        silent: ranks that do not wait, for which it waits directly or by way of others; None: not known yet.
        left: it makes no call any more.
    """

    doing: str
    issued: dict[str, int]
    silent: list[int] | None = None
    left: bool = False


class Waits:
    """The waits of one rank in the collectives of one thread.

    Args:
        notices: by which ranks reach each other.
        thread: name of the thread, equal on all ranks.
    """

    def __init__(
        self, notices: FaultNotices, rank: int, thread: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._notices = notices
        self._rank = rank
        self._thread = thread
        self._clock = clock
        self._since = self._named_at = 0.0
        self._silent: list[int] | None = None
        self._published = False
        self._last: object = None
        self._equal_looks = 0

    def begin(self, group: str) -> None:
        """Begin a collective of a group."""
        self._since = self._named_at = self._clock()
        issued, key = self._notices.issued, f"{self._thread} {group}"
        issued[key] = issued.get(key, 0) + 1

    def end(self) -> None:
        """End the collective. Local unless it was waited for for long."""
        if self._published:
            self._published, self._silent, self._last, self._equal_looks = False, None, None, 0
            self._notices.exchange_waits(self._rank, None)

    def look(self, group: str, ranks: Sequence[int], doing: str) -> None:
        """Publish that this rank waits, and find out for which ranks. Called about once a second.

        Args:
            ranks: of the group.
            doing: this rank's call, as the predicate of a sentence.

        Raises:
            CollectiveError: the wait cannot end.
        """
        key, issued = f"{self._thread} {group}", self._notices.issued
        others = [rank for rank in ranks if rank != self._rank][:_MAX_READ]
        mine = PublishedWait(doing, dict(issued), self._silent)
        found = self._notices.exchange_waits(self._rank, asdict(mine), others)
        self._published = True
        if found is None:
            return
        waits = {rank: PublishedWait(**wait) for rank, wait in found.items()}
        missing = [rank for rank in others if rank not in waits or waits[rank].issued.get(key, 0) < issued[key]]
        silent: set[int] = set()
        for rank in missing:
            wait = waits.get(rank)
            if wait is not None and wait.left:
                raise CollectiveError(
                    f"rank {self._rank} {doing}, and rank {rank} {wait.doing}",
                    remedy="every rank makes the same calls: loop by flexd.prefetch(..., uneven='empty' or 'stop') "
                    "where loaders have different lengths",
                )
            silent.update([rank] if wait is None else wait.silent or [])
        self._silent = sorted(silent.difference(waits, [self._rank]))
        state = [(rank, waits[rank].issued) for rank in missing if rank in waits]
        known = all(waits[rank].silent is not None for rank, _ in state)
        blocked = bool(missing) and not self._silent and known
        self._equal_looks = self._equal_looks + 1 if blocked and state == self._last else 0
        self._last = state
        waited = self._clock() - self._since
        if waited >= NAMED_SECONDS and self._equal_looks >= _LOOKS_TO_GIVE_UP:
            calls = "; ".join(f"rank {rank} {waits[rank].doing}" for rank in missing[:_MAX_NAMED])
            raise CollectiveError(
                f"ranks make different calls and wait for each other: rank {self._rank} {doing}; {calls}",
                remedy="the same calls in the same order on every rank: look-ups, steps, clipping, and reading, "
                "loading and saving tables",
            )
        if self._silent and self._clock() - self._named_at >= NAMED_SECONDS:
            self._named_at = self._clock()
            logger.warning(
                "rank %d %s, and has waited %.0f s for ranks %s, which make no call of this collection: they compute, "
                "load data, are in a call of another library such as a barrier, or have left the loop",
                self._rank, doing, waited, ", ".join(map(str, self._silent[:_MAX_NAMED])),
            )  # fmt: skip
