"""The loop of a daemon while it gets its parts: faults, reloads and signals in between."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from flexd.config.model import Config
from flexd.control.daemon.membership import ProposedTables
from flexd.control.protocol.messages import RankIdentity
from flexd.core.errors import ConfigError, ControlError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.daemon import Daemon
from flexd.daemon import daemon as daemon_module
from flexd.daemon.components import DaemonComponents
from flexd.daemon.config_file import save_tables, with_known_tables
from flexd.daemon.state_directory import StateLock
from flexd.demo.processes import free_ports
from flexd.operations.decisions import NAME, StateDatabase
from tests.daemon.conftest import DaemonOnFile
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks
from tests.support.until import until

PROPOSED = ProposedTables("a1", (TableSpec("item", 10, 4),))


class Job(DaemonOnFile):
    """A daemon without tables whose loop the test ticks."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(
            directory, tables=[], stream={"source": {"kind": "tap"}},
            state={"dir": str(directory / "state"), "on_unusable": "wait"},
        )  # fmt: skip
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(daemon_module, "RENEWAL_SHARE", 1e9)  # every tick
        self.daemon.start()

    def propose(self) -> Any:
        """Let the ranks propose tables in the next tick."""
        learner = self.daemon._learner
        self.monkeypatch.setattr(learner, "tick", lambda: PROPOSED)
        return learner


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job(tmp_path, monkeypatch)
    yield job
    assert job.daemon.stop(20.0)


NO_THREAD = RuntimeError("can't start new thread")


def test_a_daemon_that_can_neither_start_nor_learn_for_a_moment_learns_again(job: Job) -> None:
    job.propose()
    fails = Mock(side_effect=ControlError("the address is in use"))
    with patch.multiple(daemon_module, DaemonComponents=fails, TableLearner=fails):
        job.daemon.tick()
        assert "starting" in job.daemon.ready().reasons[0]
    until(lambda: job.daemon.tick() or "no rank has registered" in job.daemon.ready().reasons[0], 20, job.daemon.ready)


def test_parts_that_cannot_be_started_leave_and_the_daemon_learns_again(job: Job) -> None:
    """Whatever starting them raises."""
    job.propose()
    with patch.object(DaemonComponents, "start", side_effect=NO_THREAD):
        job.daemon.tick()
    assert any("RuntimeError: can't start new thread" in reason for reason in job.daemon.ready().reasons)
    assert job.daemon.health().ok
    assert job.propose().members.problem == "RuntimeError: can't start new thread (tables of attempt 'a1')"
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
    with patch.object(daemon_module, "TableLearner", side_effect=NO_THREAD):
        job.daemon.tick()
    assert job.daemon.ready().reasons[0] == "state: RuntimeError: can't start new thread"
    assert job.daemon.supervisor.faults()["loop"] == 1
    StateLock(tmp_path / "state").release()
    until(lambda: job.daemon.tick() or "no rank has registered" in job.daemon.ready().reasons[0], 20, job.daemon.ready)
    assert job.daemon.stop(20.0)


def test_a_fault_while_tables_are_learnt_is_survived(job: Job) -> None:
    with patch.object(job.daemon._learner, "tick", side_effect=RuntimeError("a fault")):
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
    assert job.daemon.components.inspect.settings.planner.min_samples == 5
    assert job.daemon.reload().applied == ()


def test_parts_that_do_not_end_end_the_daemon(job: Job) -> None:
    """Beside new parts they would count the stream twice."""
    job.propose()
    job.daemon.tick()
    components = job.daemon.components
    ingest_stops = components.ingestor.stop
    proposed = replace(PROPOSED, attempt="a2")
    with (
        patch.object(components.ingestor, "stop", return_value=False),
        patch.object(components.coordinator, "proposed_tables", return_value=proposed),
    ):
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


OTHER = KeySpace([TableSpec("item", 60_000, 8), TableSpec("brand", 100, 16)])


@pytest.fixture
def config(make_config: Callable[..., Config], tmp_path: Path) -> Config:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    (port,) = free_ports(1)
    control = {"listen_port": port, "timeout_seconds": 1.5, "secret_file": str(secret)}
    return make_config(job="job", tables=[], stream={"source": {"kind": "tap"}}, control=control)


def of_job(tables: KeySpace) -> Callable[[RankIdentity], RankIdentity]:
    return lambda it: replace(it, table_digest=tables.digest)


def ranks_of(config: Config, tables: KeySpace, attempt: str = "a1") -> Ranks:
    return Ranks(
        config.control.listen_port, RankLayout(1, 2), attempt, identities=of_job(tables), timeout_seconds=1.5,
        tables=tables,
    )  # fmt: skip


def joined(ranks: Ranks, running: Any) -> None:
    until(
        lambda: all(rank.agent.state.startswith("joined") for rank in ranks.ranks),
        40,
        lambda: ([rank.agent.state for rank in ranks.ranks], running.daemon.ready()),
    )


def known(config: Config) -> dict[str, int]:
    return {table.name: table.rows for table in with_known_tables(config).tables}


def test_tables_come_from_the_ranks_and_stay(
    start: Callable[..., Any], config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    running = start(config)
    reason = "no tables yet, the ranks are to say theirs: "
    assert running.daemon.ready().reasons == (f"{reason}no rank has registered",)
    with ranks_of(config, TABLES) as ranks:
        joined(ranks, running)
        assert known(config) == {"item": 50_000, "shop": 1_000}
        # Connections that the daemon closes while it takes the tables over are no fault.
        assert [record.getMessage() for record in caplog.records if "control channel" in record.getMessage()] == []
    running.stop()
    running = start(config)  # without any rank
    assert not any(reason in each for each in running.daemon.ready().reasons)
    # Another launch with other tables, after the one before has ended.
    with ranks_of(config, OTHER, "a2") as ranks:
        joined(ranks, running)
        assert known(config) == {"item": 60_000, "brand": 100}
        with ranks_of(config, TABLES, "a3") as late:
            refused = until(
                lambda: [rank.agent.state for rank in late.ranks if rank.agent.state.startswith("refused")],
                20,
                lambda: [rank.agent.state for rank in late.ranks],
            )
            assert "attempt 'a2' holds job 'job'" in refused[0]
        assert known(config) == {"item": 60_000, "brand": 100}


def test_a_configuration_that_contradicts_the_tables_is_named_on_ranks_and_in_the_status(
    start: Callable[..., Any], config: Config, tmp_path: Path
) -> None:
    job = DaemonOnFile(tmp_path, **(config.document() | {"planner": {"pins": [{"table": "itme", "tier": "HOME"}]}}))
    running = start(job.daemon)
    with ranks_of(config, TABLES) as ranks:
        cause = "planner.pins[0].table: no table in tables is named 'itme'; did you mean 'item'?"
        until(lambda: cause in running.daemon.ready().reasons[0], 20, running.daemon.ready)
        until(lambda: cause in ranks.ranks[1].agent.state, 20, lambda: ranks.ranks[1].agent.state)
        job.write(planner={"pins": [{"table": "item", "tier": "HOME"}]})
        running.daemon.request_reload()
        joined(ranks, running)


def test_ranks_with_different_tables_are_named(start: Callable[..., Any], config: Config) -> None:
    def by_rank(it: RankIdentity) -> RankIdentity:
        return of_job(TABLES if it.rank == 0 else OTHER)(it)

    running = start(config)
    with Ranks(config.control.listen_port, RankLayout(1, 2), identities=by_rank, timeout_seconds=1.5):
        until(
            lambda: "ranks of attempt 'a1' have different tables" in running.daemon.ready().reasons[0],
            20,
            running.daemon.ready,
        )
    assert known(config) == {}


def test_a_file_without_tables_has_those_of_the_state(config: Config) -> None:
    with pytest.raises(ConfigError, match="the file lists none, and the state has none of the ranks"):
        with_known_tables(config).keyspace()
    config.state.dir.mkdir()
    save_tables(StateDatabase(config.state.dir / NAME), ProposedTables("a1", TABLES.tables))
    assert with_known_tables(config).keyspace().digest == TABLES.digest
