"""A leader and a follower whose configurations list no tables, as processes, with real agents of ranks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.config.tables_file import load_tables, with_known_tables
from flexd.core.errors import SketchError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.demo.ports import free_ports
from flexd.stream.codecs.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch
from tests.daemon.test_tables_from_ranks import ranks_of, settings
from tests.support.flexd_processes import RunningDaemon, saved_sketches, weights
from tests.support.ranks_in_threads import TABLES
from tests.support.until import until

pytestmark = [pytest.mark.long, pytest.mark.alone]

OTHER = KeySpace([TABLES.tables[0], TableSpec("brand", 100, 16)])
IDS = 100


class Producer:
    """Accesses of random items in a file log, and their number by row."""

    def __init__(self, directory: Path) -> None:
        self._sink = FileLogSink(directory, "rank0")
        self._rng = np.random.default_rng(5)
        self.items = np.zeros(TABLES.tables[0].rows, dtype=np.int64)

    def send(self, messages: int, *more: AccessBatch) -> None:
        for _ in range(messages):
            rows = self._rng.integers(0, len(self.items), IDS)
            np.add.at(self.items, rows, 1)
            self._sink.send(encode_arrow([AccessBatch("item", rows, 0, 1000.0), *more]))
        self._sink.flush(30.0)


def test_a_follower_counts_the_tables_of_the_leaders_ranks_and_follows_their_change(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    producer = Producer(tmp_path / "log")
    common: dict[str, Any] = {
        "stream": {"source": {"kind": "file_log", "path": str(tmp_path / "log")}, "poll_seconds": 0.05},
        "sketch": {"memory_bytes": 2**22, "half_life_seconds": None},
    }

    def daemon_of(name: str, **scale_out: Any) -> RunningDaemon:
        (tmp_path / name).mkdir()
        secret = str(tmp_path / "secret")
        return RunningDaemon(
            tmp_path / name, settings(tmp_path, **common, scale_out={"secret_file": secret, **scale_out})
        )

    def counted() -> bool:
        return bool(leader.status().get("stream", {}).get("accesses", 0) >= producer.items.sum())

    def saved() -> int:
        with suppress(SketchError):  # the newest snapshot may be of the tables before
            return saved_sketches(with_known_tables(leader.config)).samples
        return -1

    leader = daemon_of("leader", role="leader", listen_port=port, read_partitions=False)
    follower = daemon_of(
        "one", role="follower", leader=f"127.0.0.1:{port}", push_interval_seconds=0.2, settle_seconds=1.0
    )
    producer.send(20)
    with follower:
        missing = "no tables yet, the leader is to send its own: "
        until(lambda: missing in follower.status()["reasons"][0], 30, follower.status)
        with leader:
            cause = "no tables yet, the ranks are to say theirs: no rank has registered"
            until(lambda: cause in follower.status()["reasons"][0], 30, follower.status)
            assert follower.status()["reasons"][0].startswith(missing)
            assert not follower.status()["stream"].get("messages"), "nothing is read before tables are known"
            with ranks_of(leader, TABLES):
                until(counted, 60, lambda: (leader.status(), follower.status()["reasons"]))
            assert load_tables(follower.config.state.dir) == TABLES.tables

            # Alone it starts with the tables of its state.
            leader.process.kill()
            follower.process.kill()
            follower.process.start(wait=False)
            until(lambda: "leader: " in "; ".join(follower.status()["reasons"]), 60, follower.status)
            assert missing not in "; ".join(follower.status()["reasons"])

            # The next launch has other tables; what is published meanwhile is counted once.
            leader.process.start(wait=False)
            producer.send(20)
            with ranks_of(leader, OTHER, "a2"):
                until(lambda: load_tables(follower.config.state.dir) == OTHER.tables, 90, lambda: follower.status())
                producer.send(20, AccessBatch("brand", np.arange(10), 0, 1000.0))
                expected = int(producer.items.sum()) + 200
                until(lambda: saved() == expected, 60, lambda: (saved(), expected, follower.status()))
            assert "leader" not in "; ".join(follower.status()["reasons"])
            leader.process.stop()
            found = weights(saved_sketches(with_known_tables(leader.config)), with_known_tables(leader.config))
            assert np.array_equal(found["item"], producer.items)
            assert np.array_equal(found["brand"], np.where(np.arange(100) < 10, 20, 0))
