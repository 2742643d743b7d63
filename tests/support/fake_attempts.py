"""Attempts of a daemon that is not there."""

from __future__ import annotations

from collections.abc import Callable

from flexd.api.rank import AttemptList, AttemptReport, AttemptResult
from flexd.core.errors import ApiError

ATTEMPTS = (
    AttemptReport(
        attempt="prod-0-ab12", state="HOLDS", world_size=4, ranks=4, hosts=("10.0.0.1", "10.0.0.2"),
        since_unix_seconds=1_700_000_000.0,
    ),
    AttemptReport(
        attempt="debug", state="WAITING", world_size=1, ranks=1, hosts=("10.0.0.9",),
        since_unix_seconds=1_700_000_100.0, reason="attempt 'prod-0-ab12' holds job 'job'",
    ),
    AttemptReport(
        attempt="prod-0-99fe", state="ENDED", world_size=4, hosts=("10.0.0.1",), since_unix_seconds=1_699_999_000.0,
        reason="its ranks are silent",
    ),
)  # fmt: skip


class FakeAttempts:
    """Calls ``entered`` with its name and arguments first, which may raise."""

    def __init__(self, entered: Callable[..., None]) -> None:
        self._entered = entered

    def attempts(self) -> AttemptList:
        self._entered("attempts")
        return AttemptList(attempts=ATTEMPTS)

    def prefer(self, attempt: str, reason: str = "", who: str = "") -> AttemptResult:
        self._entered("prefer", attempt, reason, who)
        self._check(attempt)
        return AttemptResult(attempt=attempt, changed=attempt != ATTEMPTS[0].attempt, attempts=ATTEMPTS)

    def forget(self, attempt: str, reason: str = "", who: str = "") -> AttemptResult:
        self._entered("forget", attempt, reason, who)
        self._check(attempt)
        if attempt == ATTEMPTS[0].attempt:
            raise ApiError("its ranks are alive", status=409, remedy="flexd prefer NAME")
        return AttemptResult(attempt=attempt, attempts=ATTEMPTS)

    @staticmethod
    def _check(attempt: str) -> None:
        if all(each.attempt != attempt for each in ATTEMPTS):
            raise ApiError(f"no attempt {attempt!r}", status=404, remedy="flexd get attempts")
