"""A daemon whose configuration lists no tables, with real agents of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexd.config.model import Config
from flexd.control.daemon.membership import ProposedTables
from flexd.control.protocol.messages import RankIdentity
from flexd.core.errors import ConfigError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.daemon.config_file import save_tables, with_known_tables
from flexd.demo.processes import free_ports
from flexd.operations.decisions import NAME, StateDatabase
from tests.daemon.conftest import DaemonOnFile
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks
from tests.support.until import until

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
        cause = "ranks of attempt 'a1' have different tables"
        until(lambda: cause in running.daemon.ready().reasons[0], 20, running.daemon.ready)
    assert known(config) == {}


def test_a_file_without_tables_has_those_of_the_state(config: Config) -> None:
    with pytest.raises(ConfigError, match="the file lists none, and the state has none of the ranks"):
        with_known_tables(config).keyspace()
    config.state.dir.mkdir()
    save_tables(StateDatabase(config.state.dir / NAME), ProposedTables("a1", TABLES.tables))
    assert with_known_tables(config).keyspace().digest == TABLES.digest
