"""Ranks find the leader among several daemons and refuse a former leader."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.agent.rendezvous import Rendezvous, parse_addresses
from flexd.control.daemon.migration_states import MigrationState
from flexd.control.protocol.credentials import ChannelCredentials, TlsFiles
from flexd.control.protocol.messages import DaemonNotice
from flexd.core.errors import ControlError, StaleMessageError
from flexd.core.layout import RankLayout
from tests.support.ranks_in_threads import Ranks, same_content, target
from tests.support.until import until

PAIR = RankLayout(2, 1)
NO_SECRET = ChannelCredentials()


@pytest.mark.parametrize("addresses", ["", ",", "a:1,", "a:1,,b:2", ",".join(f"a:{i}" for i in range(1, 19))])
def test_malformed_addresses_are_refused(addresses: str) -> None:
    with pytest.raises(ControlError):
        parse_addresses(addresses)


def test_addresses_are_parsed_without_repetitions() -> None:
    assert parse_addresses("a:1") == (("a", 1),)
    assert parse_addresses("a:1, [::1]:2,a:1") == (("a", 1), ("::1", 2))


def _names(monkeypatch: pytest.MonkeyPatch, addresses_of: dict[str, list[str]]) -> list[str]:
    resolved: list[str] = []

    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        resolved.append(host)
        if host not in addresses_of:
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (address, port)) for address in addresses_of[host]]

    monkeypatch.setattr("flexd.control.agent.rendezvous.socket.getaddrinfo", resolve)
    return resolved


def _tried(rendezvous: Rendezvous, times: int) -> list[tuple[str, int]]:
    return [rendezvous.connect() for _ in range(times)]  # type: ignore[misc]


def test_every_address_of_a_name_is_tried_before_names_are_resolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses_of = {"flexd": ["10.0.0.1", "10.0.0.2"], "other": ["10.0.0.2"]}
    resolved = _names(monkeypatch, addresses_of)
    monkeypatch.setattr(ChannelClient, "connect", lambda host, port, *_: (host, port))
    rendezvous = Rendezvous("flexd:5,other:6,missing:7", NO_SECRET, 1.0)
    assert _tried(rendezvous, 3) == [("10.0.0.1", 5), ("10.0.0.2", 5), ("10.0.0.2", 6)]
    assert rendezvous.tried_all
    assert resolved == ["flexd", "other", "missing"]
    addresses_of["flexd"] = ["10.0.0.3"]
    assert _tried(rendezvous, 2) == [("10.0.0.3", 5), ("10.0.0.2", 6)]
    addresses_of.clear()
    with pytest.raises(ControlError, match="no daemon at flexd:5, other:6, missing:7"):
        rendezvous.connect()


def test_a_certificate_is_checked_against_the_name_not_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    _names(monkeypatch, {"flexd": ["10.0.0.1"]})
    used: list[ChannelCredentials] = []
    monkeypatch.setattr(ChannelClient, "connect", lambda _, __, credentials, ___: used.append(credentials))
    files = TlsFiles(Path("cert"), Path("key"), Path("ca"))
    for server_name in ("", "fixed"):
        Rendezvous("flexd:5", ChannelCredentials(None, replace(files, server_name=server_name)), 1.0).connect()
    assert [credentials.tls.server_name for credentials in used] == ["flexd", "fixed"]  # type: ignore[union-attr]


def test_the_highest_term_is_followed() -> None:
    rendezvous = Rendezvous("a:1", NO_SECRET, 1.0)

    def notice(term: int) -> DaemonNotice:
        return DaemonNotice("job", "instance", "digest", term)

    for term in (2, 2, 5, 0, 5):
        rendezvous.check_term(notice(term))
    for term in (1, 4):
        with pytest.raises(StaleMessageError, match="term 5 has begun"):
            rendezvous.check_term(notice(term))


def test_ranks_continue_with_the_next_leader_and_refuse_the_former(host: Callable[..., Any], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        other_port = int(free.getsockname()[1])
    is_leader = True
    first = host(tmp_path / "term-1", term=1, may_act=lambda: is_leader, window_chunks=1)
    with Ranks(f"127.0.0.1:{first.port},127.0.0.1:{other_port}", PAIR, timeout_seconds=2.0) as ranks:
        until(first.ready, what=ranks.state())
        interrupted = first.coordinator.migrate("p1", lambda p: p.delta_to(target(1)).chunks(5))
        until(lambda: interrupted.progress.chunks_applied > 3)
        is_leader = False
        until(lambda: not first.ready())
        pushed = interrupted.progress.chunks_pushed
        assert pushed < 120, "it was in the middle"
        # Another daemon has the lease, and this process runs on: it must push nothing more.
        steps = ranks.steps
        until(lambda: ranks.steps > steps + 20)
        assert interrupted.progress.chunks_pushed == pushed
        assert "does not lead any more" in first.coordinator.status().reason

        second = host(tmp_path / "term-2", port=other_port, term=2)
        first.close()
        until(second.ready, what=ranks.state())
        assert "placement_listed" in second.names(), "its journal is empty: the ranks listed it"
        migration = second.coordinator.migrate("p2", lambda p: p.delta_to(target(2)).chunks(100))
        assert migration.wait(20) is MigrationState.COMMITTED
        assert ranks.all_at(target(2))

        resumed = host(tmp_path / "term-1", port=first.port, term=1)
        second.close()
        until(lambda: all(rank.agent.counters.get("stale", 0) >= 2 for rank in ranks.ranks))
        assert resumed.coordinator.live() is None
        third = host(tmp_path / "term-3", port=other_port, term=3)
        until(third.ready, what=ranks.state())
        assert ranks.all_at(target(2))
        assert same_content(ranks.history)
