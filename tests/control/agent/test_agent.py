"""Agents of absent, unresponsive and forged daemons, and a daemon with invalid ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flexd.control.agent.agent import Agent
from flexd.control.agent.inbox import ChunkInbox
from flexd.control.daemon.migration_states import MigrationState
from flexd.control.protocol.messages import Progress, Signer
from flexd.control.protocol.store_client import MAX_ABANDONED_CLIENTS, StoreConnector
from flexd.control.protocol.store_keys import Keys
from flexd.core.errors import ControlError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks, identity, step_report, target
from tests.support.until import until

PAIR = RankLayout(2, 1)
LARGER = KeySpace([replace(TABLES.tables[0], rows=60_000), *TABLES.tables[1:]])


def lone_agent(port: int, timeout_seconds: float = 1.0) -> Agent:
    inbox = ChunkInbox(TABLES, PAIR, 0, (10, 10))
    return Agent(inbox, identity(0, PAIR), f"127.0.0.1:{port}", SECRET, timeout_seconds, poll_seconds=0.01)


def refused(hosted: Any, kind: str) -> int:
    return int(hosted.coordinator.status().refused_messages[kind])


def test_an_agent_without_a_daemon_neither_blocks_nor_grows() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        agent = lone_agent(free.getsockname()[1])
        agent.start()
        for step in range(2000):
            agent.report(step_report(step, Placement.empty()))
        until(lambda: agent.counters.get("errors", 0) >= 3)
        assert "no daemon at" in agent.state
        pending = agent._context.reports.drain()
        assert pending is not None
        assert pending.steps == 2000
        assert agent.stop(5)


def test_an_unresponsive_server_costs_a_deadline_and_a_bounded_number_of_threads() -> None:
    with socket.socket() as unresponsive:
        unresponsive.bind(("127.0.0.1", 0))
        unresponsive.listen(64)
        connector = StoreConnector("127.0.0.1", unresponsive.getsockname()[1], "job", 0.05)
        for _ in range(MAX_ABANDONED_CLIENTS + 3):
            with pytest.raises(ControlError, match="not answer"):
                connector.connect()
        helpers = [thread for thread in threading.enumerate() if thread.name == "flexd-store" and thread.is_alive()]
        assert len(helpers) == MAX_ABANDONED_CLIENTS + 1
    until(lambda: not any(helper.is_alive() for helper in helpers))


def test_a_rank_with_another_secret_is_never_accepted(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR, secret=b"wrong") as ranks:
        until(lambda: all("not signed" in rank.agent.state for rank in ranks.ranks))
        assert all(rank.agent.counters["forged"] >= 1 for rank in ranks.ranks)
        assert hosted.coordinator.live() is None
        assert ranks.steps > 0
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda own: replace(own, table_digest=LARGER.digest, tables=LARGER.tables),
            "the tables differ: item.rows: 60000 in the trainer, 50000 in the daemon's configuration",
        ),
        (lambda own: replace(own, table_digest="other"), "the tables differ: digest other here"),
        (lambda own: replace(own, replica_slots=(1,)), "dim-groups"),
    ],
)
def test_a_contradicting_rank_gets_the_reason_and_the_status_shows_it(
    host: Callable[..., Any], change: Any, reason: str
) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR, identities=change) as ranks:
        until(lambda: all(reason in rank.agent.state for rank in ranks.ranks), what=ranks.state())
        assert hosted.coordinator.live() is None
        until(lambda: len(hosted.coordinator.status().refused_ranks) == 2)
        status = hosted.coordinator.status()
        assert sorted((each.attempt, each.rank) for each in status.refused_ranks) == [("a1", 0), ("a1", 1)]
        assert all(reason in each.reason for each in status.refused_ranks)
        assert status.reason.startswith("no rank is registered; rank ")
        assert reason in status.reason
        assert status.reason.endswith(", and 1 more")
        assert refused(hosted, "identity") >= 2
        until(
            lambda: not any("refused/" in key for key in hosted.coordinator._epochs._hosted.store._server.list_keys())
        )


def test_a_rank_of_another_job_finds_no_daemon(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR, identities=lambda own: replace(own, job="other")) as ranks:
        until(lambda: all("no flexd daemon of job 'other'" in rank.agent.state for rank in ranks.ranks))


def test_malformed_forged_and_replayed_messages_change_nothing(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        store = StoreConnector("127.0.0.1", hosted.port, "job", 5.0).connect()
        signer = Signer(SECRET)
        epoch = hosted.coordinator._epochs.epoch
        fence = epoch._fence
        instance = hosted.coordinator._instance
        known = epoch.topology.hellos[0]
        progress = Progress(**fence, rank=0, sequence=1, agreed_version=99, applied_version=99, report=None)
        newer = {"sequence": 2**40}
        for text in ["", "x" * 100, "x" * 100_000, Signer(b"other").seal(progress)]:
            store.queue_push(Keys.INBOUND, text)
        for message in [
            progress,
            replace(known, instance=instance),
            replace(progress, epoch=fence["epoch"] + 1, **newer),
            replace(progress, attempt="other", **newer),
            replace(progress, generation=7, **newer),
            replace(progress, token="other", **newer),
            replace(progress, job="other", **newer),
            replace(known, instance="another daemon", **newer),
            replace(progress, rank=7, **newer),
        ]:
            store.queue_push(Keys.INBOUND, signer.seal(message))
        until(lambda: store.call(lambda raw: raw.queue_len(Keys.INBOUND)) == 0)
        until(lambda: refused(hosted, "stale") == 6, what=str(hosted.coordinator.status()))
        assert refused(hosted, "replayed") == 2
        assert refused(hosted, "forged") == 3
        assert refused(hosted, "malformed") == 2
        assert (epoch._agreed, epoch._applied) == ([0, 0], [0, 0])
        assert hosted.coordinator.status().applied_version == 0
        assert hosted.coordinator.status().epochs == 1
        migration = hosted.coordinator.migrate("p1", lambda p: p.delta_to(target(1, 50)).chunks(10))
        assert migration.wait(15) is MigrationState.COMMITTED
        assert ranks.all_at(target(1, 50))


def test_stop_sends_the_last_report(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
    assert sum(report.steps for rank, report in hosted.reports if rank == 0) <= ranks.steps
    until(lambda: sum(report.steps for rank, report in hosted.reports if rank == 0) >= ranks.steps - 5)


def test_reports_arrive_while_chunks_are_pushed(host: Callable[..., Any]) -> None:
    hosted = host(window_chunks=1)
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        migration = hosted.coordinator.migrate("p1", lambda p: p.delta_to(target(1)).chunks(2))
        until(lambda: migration.progress.chunks_applied > 20)
        before = len(hosted.reports)
        until(lambda: len(hosted.reports) > before + 2 or migration.done)
        assert not migration.done
        migration.abort()
        assert ranks.steps > 0
