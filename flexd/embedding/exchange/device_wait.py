"""Bounded waits of the host for collectives that an accelerator runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from flexd.core.errors import CollectiveError
from flexd.embedding.exchange.fault_notice import FaultNotices

_SHARE = 0.9
"""Share of a group's timeout: NCCL's watchdog ends the process when all of it has passed, without an error."""
_SPIN_SECONDS = 1e-3
_POLL_SECONDS = 1e-4
_LOOK_SECONDS = 1.0
DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class _Started:
    work: dist.Work
    what: str
    started: float


class DeviceWait:
    """The last collective that was queued on the device, and the deadline for it.

    Each collective is queued after the one before, so when the last is done all are. Without it the host would wait
    for a rank that has died in whatever it reads next from the device, until the watchdog ends the process.

    Args:
        timeout: of the process groups.
        notices: looked at once a second of waiting.
    """

    def __init__(
        self,
        timeout: timedelta | None = None,
        notices: FaultNotices | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = _SHARE * (timeout or DEFAULT_TIMEOUT).total_seconds()
        self._notices = notices
        self._clock = clock
        self._last: _Started | None = None

    def started(self, work: dist.Work, what: str) -> None:
        """Record a collective that the device runs.

        Args:
            what: rank, collective and other ranks, for the error.
        """
        self._last = _Started(work, what, self._clock())

    def finish(self) -> None:
        """Wait until the device has run every collective; the host may read its results then.

        Raises:
            CollectiveError: it takes longer than the group's timeout allows, or another rank had an error.
        """
        last, self._last = self._last, None
        if last is None or last.work.is_completed():
            return
        since = look = self._clock()
        while not last.work.is_completed():
            now = self._clock()
            if now - look >= _LOOK_SECONDS:
                look = now
                notice = None if self._notices is None else self._notices.find()
                if notice is not None:
                    raise CollectiveError(
                        f"{last.what}: {notice}",
                        remedy="see the log of the rank named last, then restart the job from a checkpoint",
                    )
            if now - last.started >= self._seconds:
                raise CollectiveError(
                    f"{last.what}: not done on the device after {now - last.started:.1f} s",
                    remedy="one of them has died, hangs, or makes other calls than this one: see its log, then restart "
                    "the job from a checkpoint; if they are only slow, give init_process_group a longer timeout",
                )
            if now - since >= _SPIN_SECONDS:
                time.sleep(_POLL_SECONDS)
