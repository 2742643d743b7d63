"""The tap counts every look-up of training, keeps the same passes without agreement, and no step waits or fails."""

import time
from unittest import mock

import numpy as np
import pytest
import torch

import flexd
from flexd.core import tap_counts
from flexd.core.tap_counts import TapCounts, is_sampled
from flexd.embedding.exchange import route
from flexd.embedding.tap import RowCounter
from tests.support.rank_pool import Ranks
from tests.support.until import until


class Job:
    """Train a collection that has a tap, and keep the exact counts."""

    def __init__(self, **options: object) -> None:
        self.seconds = 100.0
        self.collection = flexd.EmbeddingCollection([
            flexd.EmbeddingTable("item", 20_000, 4, features=("history", "target")), flexd.EmbeddingTable("shop", 50, 4)
        ])  # fmt: skip
        self.tap = flexd.Tap(self.collection, **{"clock": lambda: self.seconds, "interval_seconds": 1e9, **options})
        self.exact = {"item": np.zeros(20_000, np.int64), "shop": np.zeros(50, np.int64)}
        self.rng = np.random.default_rng(0)

    def features(self, n: int = 60) -> dict[str, flexd.Jagged]:
        draw = {name: (self.rng.zipf(1.3, n) % 50).astype(np.int64) * scale for name, scale in
                (("history", 300), ("target", 7), ("shop", 1))}  # fmt: skip
        return {name: flexd.Jagged(torch.from_numpy(ids), torch.tensor([n - 10, 10])) for name, ids in draw.items()}

    def step(self) -> dict[str, flexd.Jagged]:
        features = self.features()
        sum(part.values.sum() for part in self.collection(features).values()).backward()
        self.collection.optimizer.step()
        for name, jagged in features.items():
            np.add.at(self.exact["shop" if name == "shop" else "item"], jagged.values.numpy(), 1)
        self.seconds += 1
        return features

    def drain(self, deltas: list[TapCounts], seconds: float = 20.0) -> None:
        """Acknowledge messages like a daemon until the tap has handed over all its counts."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            delta = self.tap.outbox.counts
            if delta is not None:
                deltas.append(tap_counts.decode(delta.payload))
                self.tap.outbox.acknowledge(delta.sequence)
            elif self.tap._full is None and self.tap._spare is not None and not self.tap._pending:
                return
            time.sleep(0.002)
        raise AssertionError("the tap does not hand over")

    def totals(self, deltas: list[TapCounts]) -> dict[str, np.ndarray]:
        totals = {name: np.zeros_like(rows) for name, rows in self.exact.items()}
        for batch in deltas:
            for table in batch.tables:
                totals[table.table][table.rows] += table.counts
        return totals

    def finish(self, deltas: list[TapCounts]) -> None:
        """Hand over what was counted since the last hand-over, drain and check."""
        while self.tap._counting.steps and not self.tap._swap():
            time.sleep(0.002)
        self.drain(deltas)
        self.check(deltas)

    def check(self, deltas: list[TapCounts]) -> None:
        for name, rows in self.totals(deltas).items():
            assert np.array_equal(rows, self.exact[name]), name


def test_every_interval_is_counted_exactly_and_dated_at_its_middle():
    job = Job(interval_steps=5)
    job.tap.start()
    deltas: list[TapCounts] = []
    for _ in range(4):
        for _ in range(5):
            job.step()
        job.drain(deltas)
    job.check(deltas)
    assert [batch.event_time_seconds for batch in deltas] == [102.0, 107.0, 112.0, 117.0]
    assert {batch.source_rank for batch in deltas} == {0}
    assert job.tap.counters.accesses == 20 * 180
    assert not job.tap.close(0.0) or job.tap.counters.messages == 4


def test_without_acknowledgements_counts_add_up_in_bounded_memory_and_no_step_waits():
    job = Job(interval_steps=1)
    job.tap.start()
    for _ in range(60):
        job.step()
    until(lambda: job.tap._full is None and job.tap._spare is not None and job.tap._pending, 20)
    assert job.tap.outbox.counts.sequence == 0
    held = sum(tap_counts.value_count([table]) for table in job.tap._pending.values())
    assert held <= 2 * (20_000 + 50) + 4 * 4097, "pending counts are bounded by the tables' rows"
    steps = job.tap._counting.steps
    for _ in range(5):
        job.step()
    assert job.tap._counting.steps == steps + 5, "nothing is read while counts wait to be sent"
    deltas: list[TapCounts] = []
    job.finish(deltas)
    assert len(deltas) < 10, "pending intervals are merged"


def test_a_step_that_cannot_be_counted_still_trains(monkeypatch, caplog):
    job = Job()
    monkeypatch.setattr(RowCounter, "add", lambda *_: 1 / 0)
    job.step()
    job.step()
    assert (job.collection.steps, job.tap.counters.failures, job.tap.counters.accesses) == (2, 2, 0)


def test_counters_never_pass_32_bits(monkeypatch):
    monkeypatch.setattr("flexd.embedding.tap.MAX_BUFFER_ACCESSES", 400)
    job = Job()
    for _ in range(8):  # the thread is not running: after one buffer changes hands there is no other
        job.step()
    assert job.tap._full is not None
    counters = job.tap.counters
    assert counters.dropped > 0, "dropped accesses are counted; no counter wraps around"
    assert counters.accesses + counters.dropped == 8 * 180
    assert job.tap._counting.accesses <= 400


def test_counts_too_large_for_one_message_are_split(monkeypatch):
    monkeypatch.setattr("flexd.embedding.tap.MAX_VALUES", 40)
    job = Job(interval_steps=2)
    job.tap.start()
    deltas: list[TapCounts] = []
    for _ in range(4):
        job.step()
    # The thread may not have been done with the first interval when the second one ended.
    job.finish(deltas)
    assert len(deltas) > 2
    assert max(tap_counts.value_count(batch.tables) for batch in deltas) <= 40


def test_a_tap_sends_the_distinct_rows_of_one_pass_in_so_many():
    job = Job(interval_steps=64, touch_steps=4)
    job.tap.start()
    drawn = []
    for _ in range(64):
        features = job.step()
        history, target, shop = (features[name].values.numpy() for name in ("history", "target", "shop"))
        drawn.append((np.unique(np.concatenate([history, target])), np.unique(shop)))
        history[:] = 0  # a loader may fill its buffers again
        with torch.no_grad():
            job.collection(features)  # evaluation has no number
    sampled = tap_counts.decode(until(lambda: job.tap.outbox.counts, 20).payload).sampled
    assert sampled.tables == ("item", "shop")
    assert [each.number for each in sampled.passes] == [n for n in range(64) if is_sampled(n, 4)]
    assert 8 <= len(sampled.passes) <= 24
    for each in sampled.passes:
        assert all(map(np.array_equal, each.rows, drawn[each.number]))
        assert each.accesses == (120, 60)


def counts_of_ranks(rank: int, layout: flexd.RankLayout, rules: tuple[str, str, str], owner: bool, ahead: bool) -> None:
    """Train on bags, freeze a table and train on; compare what the tap of this rank counts with its own ids."""
    rows = {"item": 61, "shop": 17, "city": 23}
    places = {"item": "owner" if owner else "requester", "shop": "requester", "city": "requester"}
    collection = flexd.EmbeddingBagCollection(
        [
            flexd.EmbeddingBagTable(name, n, 4 if name == "shop" else 8, sharding=rule, pooling_at=places[name])
            for (name, n), rule in zip(rows.items(), rules, strict=True)
        ],
        layout=layout,
    )
    tap = flexd.Tap(collection, interval_seconds=1e9, touch_steps=1)
    rng = np.random.default_rng(rank)
    drawn = [{name: rng.integers(0, n, 9 + rank) for name, n in rows.items()} for _ in range(6)]
    given = [
        {name: flexd.Jagged(torch.from_numpy(ids), torch.tensor([len(ids) - 2, 2])) for name, ids in batch.items()}
        for batch in drawn
    ]
    with mock.patch.object(route, "_MAX_COUNT", 1):  # of what travels with a request; counts are exact beyond
        for number, batch in enumerate(flexd.prefetch(given, collection, ahead=1) if ahead else given):
            torch.cat([part.sum().view(1) for part in collection(batch).values()]).sum().backward()
            collection.optimizer.step()
            if number == 2 and not ahead:
                collection.freeze("city")
    counted = {counts.table: (counts.rows, counts.counts) for counts in tap._counting.rows.drain()}
    for name in rows:
        distinct, numbers = np.unique(np.concatenate([batch[name] for batch in drawn]), return_counts=True)
        assert np.array_equal(counted[name][0], distinct), name
        assert np.array_equal(counted[name][1], numbers), name
    passes = tap._counting.sample.drain()
    assert [each.number for each in passes] == list(range(6))
    for each, batch in zip(passes, drawn, strict=True):
        assert all(np.array_equal(found, np.unique(batch[name])) for found, name in zip(each.rows, rows, strict=True))
        assert each.accesses == (9 + rank,) * 3


@pytest.mark.parametrize("rules", [("row_wise",) * 3, ("table_row_wise:1", "row_wise", "table_wise:2")])
@pytest.mark.parametrize("owner", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_each_rank_counts_its_own_look_ups_wherever_rows_and_sums_are(
    ranks: Ranks, rules: tuple[str, str, str], owner: bool, ahead: bool
) -> None:
    ranks(4).run(counts_of_ranks, flexd.RankLayout(2, 2), rules, owner, ahead)
