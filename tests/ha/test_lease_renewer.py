"""The thread that renews a lease: its attempts, its handling of faults, and its stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flexd.core.errors import LeaseError
from flexd.ha import lease_renewer as renewer_module
from flexd.ha.lease_renewer import LeaseRenewer
from tests.support.until import until

SECONDS = 20.0
"""Deadline of every wait."""


class FakeLease:
    """A lease that records its calls, and raises ``fault`` if it is set."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fault: Exception | None = None
        self.hang = threading.Event()
        self.hang.set()

    def acquire_or_renew(self) -> None:
        self._record("attempt")

    def release(self) -> None:
        self._record("release")

    def _record(self, call: str) -> None:
        self.calls.append(call)
        assert self.hang.wait(SECONDS)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def lease() -> FakeLease:
    return FakeLease()


@pytest.fixture
def keep(lease: FakeLease) -> Iterator[Callable[..., LeaseRenewer]]:
    made: list[LeaseRenewer] = []

    def start(renew_seconds: float = 0.005) -> LeaseRenewer:
        of: Any = lease
        made.append(LeaseRenewer(of, renew_seconds))
        made[-1].start()
        return made[-1]

    yield start
    lease.hang.set()
    for renewer in made:
        assert renewer.stop(SECONDS)


def test_the_lease_is_renewed_repeatedly_and_released_at_stop(
    lease: FakeLease, keep: Callable[..., LeaseRenewer]
) -> None:
    renewer = keep()
    until(lambda: len(lease.calls) >= 3)
    assert renewer.stop(SECONDS)
    assert set(lease.calls[:-1]) == {"attempt"}
    assert lease.calls[-1] == "release"
    assert (renewer.failures, renewer.problem) == (0, "")


def test_the_first_attempt_and_the_stop_do_not_wait_for_the_interval(
    lease: FakeLease, keep: Callable[..., LeaseRenewer]
) -> None:
    renewer = keep(3600.0)
    until(lambda: lease.calls)
    assert renewer.stop(SECONDS)
    assert lease.calls == ["attempt", "release"]


def test_an_unexpected_fault_does_not_delay_the_next_attempt(
    lease: FakeLease, keep: Callable[..., LeaseRenewer], caplog: pytest.LogCaptureFixture
) -> None:
    """The supervisor's back-off would outlast the lease."""
    lease.fault = ValueError("made up")
    renewer = keep()
    until(lambda: renewer.failures >= 9)
    assert renewer.problem == "ValueError('made up')"
    lease.fault = None
    until(lambda: not renewer.problem)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) >= 4, "the first, second, fourth and eighth time"
    assert len(errors) < renewer.failures
    assert all(record.exc_info for record in errors)


def test_faults_are_counted_logged_once_and_retried(
    lease: FakeLease, keep: Callable[..., LeaseRenewer], caplog: pytest.LogCaptureFixture
) -> None:
    lease.fault = fault = LeaseError("no answer")
    renewer = keep()
    until(lambda: renewer.failures >= 4)
    assert renewer.problem == "no answer"
    assert [record.getMessage() for record in caplog.records] == [f"lease: {renewer.problem}"]
    assert not caplog.records[0].exc_info, "only an unexpected error has a traceback"
    lease.fault = LeaseError("something else")
    until(lambda: renewer.problem == "something else")
    lease.fault = None
    until(lambda: not renewer.problem)
    lease.fault = fault
    until(lambda: len(caplog.records) == 3)
    assert caplog.records[2].getMessage() == caplog.records[0].getMessage(), "logged again after a success"


def test_a_released_lease_is_not_acquired_until_the_time_is_over(
    lease: FakeLease, keep: Callable[..., LeaseRenewer], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(renewer_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    renewer = keep()
    until(lambda: lease.calls)
    renewer.release_for(30.0)
    until(lambda: lease.calls[-1] == "release")
    lease.calls.clear()
    now[0] = 129.9
    until(lambda: len(lease.calls) >= 3)
    assert set(lease.calls) == {"release"}
    now[0] = 130.0
    until(lambda: lease.calls[-1] == "attempt")


def test_a_call_that_hangs_blocks_only_the_thread(lease: FakeLease, keep: Callable[..., LeaseRenewer]) -> None:
    lease.hang.clear()
    renewer = keep()
    until(lambda: lease.calls)
    renewer.release_for(0.0)
    assert renewer.stop(0.01) is False
    lease.hang.set()
    assert renewer.stop(SECONDS) is True
    assert lease.calls == ["attempt", "release"]


def test_a_renewer_that_never_started_has_ended(lease: FakeLease) -> None:
    of: Any = lease
    assert LeaseRenewer(of, 1.0).stop(0.0) is True
    assert lease.calls == []
