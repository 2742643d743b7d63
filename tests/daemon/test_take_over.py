"""The loop of a daemon while it gets its parts: faults, reloads and signals in between."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexd.control.daemon.membership import ProposedTables
from flexd.core.errors import ControlError
from flexd.core.keyspace import TableSpec
from flexd.daemon import Daemon
from flexd.daemon import daemon as daemon_module
from flexd.daemon.components import DaemonComponents
from flexd.daemon.state_directory import StateLock
from tests.daemon.conftest import DaemonOnFile
from tests.support.until import until

TABLES = ProposedTables("a1", (TableSpec("item", 10, 4),))


class Job(DaemonOnFile):
    """A daemon without tables whose loop the test ticks."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        state = {"dir": str(directory / "state"), "on_unusable": "wait"}
        super().__init__(directory, tables=[], stream={"source": {"kind": "tap"}}, state=state)
        self.patch = patch
        patch.setattr(daemon_module, "RENEWAL_SHARE", 1e9)  # every tick
        self.daemon.start()

    def propose(self) -> Any:
        """Let the ranks propose tables in the next tick."""
        learner = self.daemon._learner
        assert learner is not None
        self.patch.setattr(learner, "tick", lambda: TABLES)
        return learner


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job(tmp_path, monkeypatch)
    yield job
    assert job.daemon.stop(20.0)


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_daemon_that_can_neither_start_nor_learn_for_a_moment_learns_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.propose()
    with monkeypatch.context() as patch:
        for name in ("DaemonComponents", "TableLearner"):
            patch.setattr(daemon_module, name, raises(ControlError("the address is in use")))
        job.daemon.tick()
        assert "starting" in job.daemon.ready().reasons[0]
    until(lambda: job.daemon.tick() or "no rank has registered" in job.daemon.ready().reasons[0], 20, job.daemon.ready)


def test_parts_that_cannot_be_started_leave_and_the_daemon_learns_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever starting them raises."""
    job.propose()
    with monkeypatch.context() as patch:
        patch.setattr(DaemonComponents, "start", raises(RuntimeError("can't start new thread")))
        job.daemon.tick()
    assert any("RuntimeError: can't start new thread" in reason for reason in job.daemon.ready().reasons)
    assert job.daemon.health().ok
    learner = job.propose()
    assert learner.members.problem == "RuntimeError: can't start new thread (tables of attempt 'a1')"
    until(lambda: job.daemon.tick() or job.daemon._components, 20, job.daemon.ready)
    assert [table.name for table in job.daemon.components.inspect.settings.tables] == ["item"]


def test_a_waiting_daemon_whose_parts_cannot_be_started_frees_the_state_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "job").write_text("another\n")
    monkeypatch.setattr(daemon_module, "LOOK_SECONDS", 0.0)
    job = Job(tmp_path, monkeypatch)
    assert "has the state of job 'another'" in job.daemon.ready().reasons[0]
    (tmp_path / "state" / "job").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(daemon_module, "TableLearner", raises(RuntimeError("can't start new thread")))
        job.daemon.tick()
    assert job.daemon.ready().reasons[0] == "state: RuntimeError: can't start new thread"
    assert job.daemon.supervisor.faults()["loop"] == 1
    StateLock(tmp_path / "state").release()
    until(lambda: job.daemon.tick() or "no rank has registered" in job.daemon.ready().reasons[0], 20, job.daemon.ready)
    assert job.daemon.stop(20.0)


def test_a_fault_while_tables_are_learnt_is_survived(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(job.daemon._learner, "tick", raises(RuntimeError("a fault")))
        job.daemon.tick()
    assert "thread loop: RuntimeError: a fault" in job.daemon.ready().reasons
    until(lambda: job.daemon.tick() or not job.daemon.supervisor.problems(), 20, job.daemon.ready)


@pytest.mark.parametrize("moment", ["learner stops", "parts are made"])
def test_a_reload_during_a_take_over_stays(job: Job, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    job.write(planner={"min_samples": 5})
    reload = threading.Thread(target=job.daemon.reload)

    def reload_beside() -> None:
        reload.start()
        reload.join(0.3)  # one that has to wait goes on afterwards

    class Parts(DaemonComponents):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            reload_beside()

    learner = job.propose()
    if moment == "parts are made":
        monkeypatch.setattr(daemon_module, "DaemonComponents", Parts)
    else:
        stop = learner.stop
        monkeypatch.setattr(learner, "stop", lambda: (reload_beside(), stop()))
    job.daemon.tick()
    reload.join(20)
    components = job.daemon.components
    assert components.inspect.settings.planner.min_samples == 5
    assert components.inspect.config().config["planner"]["min_samples"] == 5
    assert job.daemon.reload().applied == ()


def test_parts_that_do_not_end_end_the_daemon(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside new parts they would count the stream twice."""
    job.propose()
    job.daemon.tick()
    components = job.daemon.components
    ingest_stops = components.ingestor.stop
    with monkeypatch.context() as patch:
        patch.setattr(components.ingestor, "stop", lambda seconds: False)
        patch.setattr(components.coordinator, "proposed_tables", lambda: replace(TABLES, attempt="a2"))
        job.daemon.tick()
    assert (
        job.daemon.supervisor.fatal
        == "thread loop: UnsafeStateError: ingest did not end within 20 s - the daemon starts anew"
    )
    assert job.daemon._components is None
    assert ingest_stops(20.0)


def test_a_loop_that_hangs_without_parts_is_not_healthy(job: Job) -> None:
    assert job.daemon.health().ok
    job.daemon._ticked_at = time.monotonic() - 2 * daemon_module.HEALTHY_TICK_SECONDS
    assert job.daemon.health().reasons == ("the loop has not ticked for 60 s",)


def test_a_hangup_before_there_is_a_daemon_reloads_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []

    class Built(Daemon):
        def __init__(self, *_: object) -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            self.supervisor = job.daemon.supervisor

        def start(self) -> None:
            requests.append("started")

        def request_reload(self) -> None:
            requests.append("reload")

        def run_until_stopped(self) -> bool:
            os.kill(os.getpid(), signal.SIGHUP)
            return True

    monkeypatch.setattr(daemon_module, "Daemon", Built)
    for name in ("set_up_logging", "resume_garbage_collector", "keep_freed_memory"):
        monkeypatch.setattr(daemon_module, name, lambda *_: None)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    try:
        assert daemon_module.run_daemon(job.daemon._config) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert requests == ["reload", "started", "reload"]
