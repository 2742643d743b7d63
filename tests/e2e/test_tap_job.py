"""A job without any log: the trainer counts itself, and the daemon, a process, is killed again and again."""

import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import flexd
from tests.support.flexd_processes import DAEMON_START_SECONDS, RunningDaemon, saved_sketches
from tests.support.rank_pool import Ranks
from tests.support.until import until

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

ITEMS, WIDE = 20_000, 3_000_000
"""Not even three bits a row of the wide table fit the memory: it is counted by a count-min."""
SETTINGS = {
    "tables": [{"name": "item", "rows": ITEMS, "dim": 4}, {"name": "wide", "rows": WIDE, "dim": 1}],
    "stream": {"source": {"kind": "tap"}, "poll_seconds": 0.02},
    "sketch": {"memory_bytes": 2**20, "half_life_seconds": None},
    "planner": {"interval_seconds": 3600, "verify_budget_steps": 0},
}


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
def test_every_access_is_counted_once_whenever_the_daemon_is_killed(tmp_path: Path, kills: int) -> None:
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", ITEMS, 4), flexd.EmbeddingTable("wide", WIDE, 1)]
    )
    tap = flexd.Tap(collection, interval_steps=3)
    exact = {"item": np.zeros(ITEMS, np.int64), "wide": np.zeros(WIDE, np.int64)}
    rng, when = np.random.default_rng(0), random.Random(1)

    def train(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            drawn = {name: (rng.zipf(1.2, 500) % len(rows)).astype(np.int64) for name, rows in exact.items()}
            features = {n: flexd.Jagged(torch.from_numpy(ids), torch.full((10,), 50)) for n, ids in drawn.items()}
            sum(part.values.sum() for part in collection(features).values()).backward()
            collection.optimizer.step()
            for name, ids in drawn.items():
                np.add.at(exact[name], ids, 1)
            time.sleep(0.002)

    with RunningDaemon(tmp_path, {**SETTINGS, "job": "tapped"}) as daemon:
        address = f"127.0.0.1:{daemon.config.control.listen_port}"
        connection = flexd.connect(collection, address, job="tapped", attempt="a", timeout_seconds=5.0, tap=tap)
        for _ in range(kills):
            before, deadline = tap.counters.messages, time.monotonic() + 60
            while tap.counters.messages == before:  # until a delta is taken
                assert time.monotonic() < deadline, tap.counters
                train(0.1)
            train(when.random())
            daemon.process.kill()
            train(0.3)
            daemon.process.start(DAEMON_START_SECONDS)
        train(1.0)
        connection.close(60.0)
        counters = tap.counters
        assert tap.outbox.free
        assert counters.accesses == sum(int(rows.sum()) for rows in exact.values())
        assert (counters.dropped, counters.failures) == (0, 0)
        # Two an interval between kills, on an idle machine; one at least, or no kill was in the middle of anything.
        assert counters.messages > kills
        # The status shows what the ingest thread saw at its last look.
        stream = until(lambda: (now := daemon.status()["stream"])["lag_messages"] == 0 and now, what=daemon.status)
        assert stream["source"] == "tap"
        assert not any(stream["rejected_messages"].values())
        daemon.process.stop()
        sketches = saved_sketches(daemon.config)
    assert [choice.kind for choice in sketches.choices()] == ["dense", "count_min"]
    assert sketches.samples == counters.accesses, "none twice, none missing"
    assert np.array_equal(sketches.query("item", np.arange(ITEMS)), exact["item"])
    seen = np.flatnonzero(exact["wide"])
    assert (sketches.query("wide", seen) >= exact["wide"][seen]).all()
    profile = sketches.profile().tables[1]
    assert profile.weight == exact["wide"].sum()
    assert set(np.argsort(-exact["wide"])[:20].tolist()) <= set(profile.hot_rows.tolist())


def end_one_after_another(rank: int, port: int) -> tuple[bool, int]:
    """Train with a tap and end, each rank a while after the one before; return whether no counts are left here, and how
    many messages were acknowledged."""
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", ITEMS, 4)])
    tap = flexd.Tap(collection)
    connection = flexd.connect(collection, f"127.0.0.1:{port}", job="tapped", attempt="a", tap=tap)
    for _ in range(10):
        collection({"item": flexd.Jagged(torch.arange(500), torch.tensor([500]))})["item"].values.sum().backward()
        collection.optimizer.step()
    until(lambda: connection.agent.counters["epochs"], 60)
    time.sleep(rank)
    connection.close(40.0)
    return tap.outbox.free, tap.counters.messages


def test_a_rank_that_ends_first_leaves_the_counts_of_the_others_to_be_acknowledged(
    ranks: Ranks, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "job": "tapped", "tables": SETTINGS["tables"][:1]}
    with RunningDaemon(tmp_path, settings) as daemon:
        port = daemon.config.control.listen_port
        for left, messages in ranks(2).run(end_one_after_another, port, timeout=150):
            assert left
            assert messages > 0
        until(lambda: daemon.status()["stream"]["accesses"] >= 2 * 10 * 500, what=daemon.status)
        assert daemon.status()["stream"]["accesses"] == 2 * 10 * 500
