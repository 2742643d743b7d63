"""False, forged and tampered keys of the store: a rank accepts none and continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexd.control.agent.agent import Agent
from flexd.control.agent.inbox import ChunkInbox
from flexd.control.agent.rank_connection import RankConnection
from flexd.control.daemon.migration_states import MigrationState
from flexd.control.protocol.epoch_group import EpochGroup
from flexd.control.protocol.messages import EpochAnnouncement
from flexd.control.protocol.network import Backoff
from flexd.control.protocol.store_client import StoreClient, StoreConnector
from flexd.control.protocol.store_keys import Keys
from flexd.core.layout import RankLayout
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks, identity, same_content, target
from tests.support.until import until

PAIR = RankLayout(2, 1)


def lone_agent(port: int, timeout_seconds: float = 1.0) -> Agent:
    inbox = ChunkInbox(TABLES, PAIR, 0, (10, 10))
    return Agent(inbox, identity(0, PAIR), f"127.0.0.1:{port}", SECRET, timeout_seconds, poll_seconds=0.01)


def refused(hosted: Any, kind: str) -> int:
    return int(hosted.coordinator.status().refused_messages[kind])


def test_false_hints_and_forged_commands_are_ignored(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        store = StoreConnector("127.0.0.1", hosted.port, "job", 5.0).connect()
        forged = "0" * 64 + '\n{"kind":"chunk"}'
        number = hosted.coordinator.status().epoch
        store.call(lambda it: it.set(Keys.command(number, 1), forged))
        store.call(lambda it: it.set(Keys.HINT, f"{number}:1:1"))
        until(lambda: all(rank.agent.counters.get("forged", 0) for rank in ranks.ranks), what=ranks.state())
        store.call(lambda it: it.set(Keys.HINT, "rubbish"))
        until(lambda: hosted.coordinator.status().epochs > 1, what=ranks.state())
        migration = hosted.coordinator.migrate("p1", lambda p: p.delta_to(target(1, 50)).chunks(10))
        assert migration.wait(20) is MigrationState.COMMITTED, (ranks.state(), hosted.events)
        assert same_content(ranks.history)


@pytest.mark.parametrize("affected", ["one rank", "all ranks"])
def test_a_false_end_of_an_epoch_excludes_no_rank(host: Callable[..., Any], monkeypatch: Any, affected: str) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        # The ranks must read the false hint before the daemon repeats the right one.
        known = StoreClient.get
        affected_threads: set[str] = set()

        def get(store: StoreClient, key: str) -> bytes:
            name = threading.current_thread().name
            if key == Keys.HINT and name not in affected_threads and (affected == "all ranks" or name.endswith("-1")):
                affected_threads.add(name)
                return b"0:0:0"
            return known(store, key)

        monkeypatch.setattr(StoreClient, "get", get)
        until(lambda: hosted.coordinator.status().epochs > 1 and hosted.ready(), what=ranks.state())
        migration = hosted.coordinator.migrate("p1", lambda p: p.delta_to(target(1, 50)).chunks(10))
        assert migration.wait(20) is MigrationState.COMMITTED, (ranks.state(), hosted.events)
        assert same_content(ranks.history)


def test_an_overwritten_notice_excludes_no_rank(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        store = StoreConnector("127.0.0.1", hosted.port, "job", 5.0).connect()
        store.call(lambda it: it.set(Keys.NOTICE, "0" * 64 + '\n{"kind":"notice"}'))
        store.call(lambda it: it.set(Keys.EPOCH, "rubbish"))
        store.call(lambda it: it.set(Keys.HINT, "rubbish"))
        until(lambda: hosted.coordinator.status().epochs > 1 and hosted.ready(), what=ranks.state())
        migration = hosted.coordinator.migrate("p1", lambda p: p.delta_to(target(1, 50)).chunks(10))
        assert migration.wait(20) is MigrationState.COMMITTED, (ranks.state(), hosted.events)
        store.close()


def test_a_tampered_chunk_is_refused_and_pushed_again(host: Callable[..., Any], monkeypatch: Any) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        receive, left = EpochGroup.receive, [3]

        def tamper(group: EpochGroup, rows: int, tiers: int) -> tuple[np.ndarray, np.ndarray]:
            keys, changed = receive(group, rows, tiers)
            if left[0] > 0:
                left[0] -= 1
                changed = changed.copy()
                changed[-1] ^= 3
            return keys, changed

        monkeypatch.setattr(EpochGroup, "receive", tamper)
        migration = hosted.coordinator.migrate("p1", lambda p: p.delta_to(target(1, 50)).chunks(10))
        assert migration.wait(20) is MigrationState.COMMITTED, (ranks.state(), hosted.events)
        assert sum(rank.agent.counters.get("tampered", 0) for rank in ranks.ranks) == 3
        assert ranks.all_at(target(1, 50))
        assert same_content(ranks.history)


@pytest.mark.parametrize(
    ("change", "accepted"),
    [
        ({}, True),
        ({"nonces": ("an older nonce", "other")}, False),
        ({"nonces": ("nonce",)}, False),
        ({"job": "other"}, False),
        ({"instance": "another daemon"}, False),
        ({"attempt": "a0"}, False),
        ({"epoch": 4}, False),
        ({"term": 1}, False),
        ({"term": 3}, False),
    ],
)
def test_an_epoch_is_joined_only_by_the_registrations_it_names(change: dict[str, Any], accepted: bool) -> None:
    """A recorded announcement, correctly signed, must not move a rank."""
    connection = RankConnection(lone_agent(1)._context, Backoff())
    connection._instance, connection._term, connection._nonce, connection._last_epoch = "instance", 2, "nonce", 4
    announcement = EpochAnnouncement("job", "instance", "a1", 1, 5, "token", 2, ("nonce", "other"))
    assert connection._is_for_me(replace(announcement, **change)) is accepted
