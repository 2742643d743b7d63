"""A daemon whose configuration lists no tables, as a process, with real agents of ranks."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexd.control.daemon.membership import ProposedTables
from flexd.control.protocol.report import RankIdentity
from flexd.core.errors import ConfigError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.daemon.config_file import save_tables, with_known_tables
from flexd.operations.state_database import NAME, StateDatabase
from tests.support.flexd_processes import RunningDaemon
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks
from tests.support.until import until

OTHER = KeySpace([TableSpec("item", 60_000, 8), TableSpec("brand", 100, 16)])
SETTINGS: dict[str, Any] = {"stream": {"source": {"kind": "tap"}}, "control": {"timeout_seconds": 1.5}}


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    return SETTINGS | {"control": {**SETTINGS["control"], "secret_file": str(secret)}} | more


def of_job(tables: KeySpace) -> Callable[[RankIdentity], RankIdentity]:
    return lambda it: replace(it, job="test", table_digest=tables.digest)


def ranks_of(daemon: RunningDaemon, tables: KeySpace, attempt: str = "a1") -> Ranks:
    return Ranks(
        daemon.config.control.listen_port,
        RankLayout(1, 2),
        attempt,
        identities=of_job(tables),
        timeout_seconds=1.5,
        tables=tables,
    )


def joined(ranks: Ranks, daemon: RunningDaemon) -> None:
    until(
        lambda: all(rank.agent.state.startswith("joined") for rank in ranks.ranks),
        40,
        lambda: ([rank.agent.state for rank in ranks.ranks], daemon.status()["reasons"]),
    )


def known(daemon: RunningDaemon) -> dict[str, int]:
    return {table.name: table.rows for table in with_known_tables(daemon.config).tables}


def test_tables_come_from_the_ranks_and_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with RunningDaemon(tmp_path, settings(tmp_path)) as daemon:
        assert daemon.status()["reasons"] == ["no tables yet, the ranks are to say theirs: no rank has registered"]
        with ranks_of(daemon, TABLES) as ranks:
            joined(ranks, daemon)
            assert known(daemon) == {"item": 50_000, "shop": 1_000}
            # Connections that the daemon closes while it takes the tables over are no fault.
            assert [record.getMessage() for record in caplog.records if "control channel" in record.getMessage()] == []
        daemon.process.kill()
        daemon.process.start(60)  # without any rank
        reasons = until(lambda: daemon.status()["reasons"], 20, daemon.status)
        assert not any("no tables yet" in reason for reason in reasons)
        with ranks_of(daemon, TABLES, "a2") as ranks:
            joined(ranks, daemon)
        # Another launch with other tables, after the one before has ended.
        with ranks_of(daemon, OTHER, "a3") as ranks:
            joined(ranks, daemon)
            assert known(daemon) == {"item": 60_000, "brand": 100}
            with ranks_of(daemon, TABLES, "a4") as late:
                refused = until(
                    lambda: [rank.agent.state for rank in late.ranks if rank.agent.state.startswith("refused")],
                    20,
                    lambda: [rank.agent.state for rank in late.ranks],
                )
                assert "attempt 'a3' holds job 'test'" in refused[0]
            assert known(daemon) == {"item": 60_000, "brand": 100}


def test_a_configuration_that_contradicts_the_tables_is_named_on_ranks_and_in_the_status(tmp_path: Path) -> None:
    pins = [{"table": "itme", "tier": "HOME"}]
    with (
        RunningDaemon(tmp_path, settings(tmp_path, planner={"pins": pins})) as daemon,
        ranks_of(daemon, TABLES) as ranks,
    ):
        cause = "planner.pins[0].table: no table in tables is named 'itme'; did you mean 'item'?"
        until(lambda: cause in daemon.status()["reasons"][0], 20, lambda: daemon.status()["reasons"])
        until(lambda: cause in ranks.ranks[1].agent.state, 20, lambda: ranks.ranks[1].agent.state)
        document = yaml.safe_load(daemon.config_file.read_text())
        document["planner"]["pins"][0]["table"] = "item"
        daemon.config_file.write_text(yaml.safe_dump(document))
        assert daemon.process.pid is not None
        os.kill(daemon.process.pid, signal.SIGHUP)
        joined(ranks, daemon)


def test_ranks_with_different_tables_are_named(tmp_path: Path) -> None:
    def by_rank(it: RankIdentity) -> RankIdentity:
        return of_job(TABLES if it.rank == 0 else OTHER)(it)

    with RunningDaemon(tmp_path, settings(tmp_path)) as daemon:
        port = daemon.config.control.listen_port
        with Ranks(port, RankLayout(1, 2), identities=by_rank, timeout_seconds=1.5):
            cause = "ranks of attempt 'a1' have different tables"
            until(lambda: cause in daemon.status()["reasons"][0], 20, lambda: daemon.status()["reasons"])
        assert known(daemon) == {}


def test_a_file_without_tables_has_those_of_the_state(tmp_path: Path) -> None:
    from flexd.config.load import parse_config

    config = parse_config({"job": "a", "stream": {"source": {"kind": "tap"}}, "state": {"dir": str(tmp_path)}})
    with pytest.raises(ConfigError, match="the file lists none, and the state has none of the ranks"):
        with_known_tables(config).keyspace()
    save_tables(StateDatabase(tmp_path / NAME), ProposedTables("a1", TABLES.tables))
    assert with_known_tables(config).keyspace().digest == TABLES.digest
