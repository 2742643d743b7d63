"""A follower whose configuration lists no tables, in this process, with the listener of a leader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexd.config.load import parse_config
from flexd.config.tables_file import NAME, load_tables, save_tables
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.daemon.follower_service import FollowerDaemon
from flexd.scaleout.leader import Leader
from flexd.scaleout.transport import listener
from flexd.server.metrics import Metrics
from tests.support.scaleout_world import KEYSPACE, SETTINGS, LeaderProcess, MemoryStore
from tests.support.until import until

OTHER = KeySpace([TableSpec("item", 64, 4), TableSpec("shop", 9, 2)])
REQUESTED = "no tables yet, the leader is to send its own: "


@pytest.fixture
def leader() -> Iterator[LeaderProcess]:
    made = LeaderProcess(MemoryStore())
    made.open()
    made.http = listener(made.leader, None, "127.0.0.1", 0)  # type: ignore[attr-defined]
    made.http.start()  # type: ignore[attr-defined]
    yield made
    assert made.http.stop(5.0)  # type: ignore[attr-defined]


def follower_of(directory: Path, port: int, **more: Any) -> FollowerDaemon:
    return FollowerDaemon(
        parse_config(
            {
                "job": "job",
                "stream": {"source": {"kind": "synthetic", "accesses_per_second": 1}},
                "scale_out": {"role": "follower", "leader": f"127.0.0.1:{port}", "push_interval_seconds": 0.05},
                "sketch": {"memory_bytes": 2**21},
                "server": {"port": 0},
                "state": {"dir": str(directory)},
                **more,
            }
        )
    )


def counts(follower: FollowerDaemon, tables: KeySpace) -> bool:
    """Tick; return True if it counts these tables."""
    follower.tick()
    status = follower.status()
    return [table.table for table in status.sketch.tables] == [table.name for table in tables.tables]


def reasons(follower: FollowerDaemon) -> str:
    follower.tick()
    return "; ".join(follower.ready().reasons)


def test_it_counts_with_the_leaders_tables_and_follows_when_they_change(tmp_path: Path, leader: LeaderProcess) -> None:
    follower = follower_of(tmp_path, leader.http.port)  # type: ignore[attr-defined]
    assert reasons(follower) == f"{REQUESTED}the leader has not answered yet"
    assert follower.health().ok
    status = follower.status()
    assert status.sketch.tables == ()
    assert status.scale_out is not None
    assert status.scale_out.link is not None
    assert status.scale_out.link.paused
    assert "flexd_sketch_bytes{" not in Metrics(follower).render()[0].decode()
    follower.start()
    try:
        until(lambda: counts(follower, KEYSPACE), 30, lambda: reasons(follower))
        assert load_tables(tmp_path) == KEYSPACE.tables
        assert [table["name"] for table in follower.inspect.config().config["tables"]] == ["item"]
        # The leader's next launch has other tables.
        leader.http._app._leader = Leader(  # type: ignore[attr-defined]
            "job", OTHER, SETTINGS, leader.ledger, leader.leader.followers
        )
        leader.http._app._leader.serve(leader.ingestor)  # type: ignore[attr-defined]
        until(lambda: counts(follower, OTHER), 30, lambda: reasons(follower))
        assert load_tables(tmp_path) == OTHER.tables
    finally:
        assert follower._stop()


def test_tables_that_the_configuration_does_not_fit_are_named(tmp_path: Path, leader: LeaderProcess) -> None:
    pins = {"pins": [{"table": "itme", "tier": "HOME"}]}
    follower = follower_of(tmp_path, leader.http.port, planner=pins)  # type: ignore[attr-defined]
    follower.start()
    try:
        cause = "planner.pins[0].table: no table in tables is named 'itme'; did you mean 'item'? (tables of the leader)"
        until(lambda: cause in reasons(follower), 30, lambda: reasons(follower))
        assert load_tables(tmp_path) == ()
        # After a reload of the corrected file.
        follower._apply_config(follower._config.model_copy(update={"planner": parse_config(_plain()).planner}))
        until(lambda: counts(follower, KEYSPACE), 30, lambda: reasons(follower))
    finally:
        assert follower._stop()


def _plain() -> dict[str, Any]:
    return {"job": "job", "stream": {"source": {"kind": "synthetic", "accesses_per_second": 1}}}


def test_it_starts_with_the_tables_of_its_state(tmp_path: Path) -> None:
    save_tables(tmp_path, KEYSPACE.tables, "")
    follower = follower_of(tmp_path, 1)
    assert counts(follower, KEYSPACE)
    assert "no tables" not in reasons(follower)


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ("{", NAME),
        (json.dumps({"format": 2, "tables": []}), f"{NAME}.newer"),
        (json.dumps({"format": 1, "tables": [{"name": "item", "rows": 64, "dim": 4}]}), NAME),
    ],
    ids=["damaged", "newer", "without a pinned table"],
)
def test_a_file_of_tables_that_cannot_be_used_does_not_stop_it(tmp_path: Path, content: str, kept: str) -> None:
    """The leader has them too."""
    (tmp_path / NAME).write_text(content)
    follower = follower_of(tmp_path, 1, planner={"pins": [{"table": "shop", "tier": "HOME"}]})
    assert REQUESTED in reasons(follower)
    assert (tmp_path / kept).read_text() == content


def test_listed_tables_stay(tmp_path: Path, leader: LeaderProcess) -> None:
    listed = [{"name": "shop", "rows": 9, "dim": 2}]
    follower = follower_of(tmp_path, leader.http.port, tables=listed)  # type: ignore[attr-defined]
    follower.start()
    try:
        until(lambda: "leave `tables` out of the follower's configuration" in reasons(follower), 30)
        assert counts(follower, KeySpace([TableSpec("shop", 9, 2)]))
    finally:
        follower._stop()
