"""What a tap counts on the device, and that no step ever waits or fails for it."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexd
from flexd.core import counted_accesses as counted
from flexd.core.counted_accesses import CellCounts, RowCounts
from flexd.core.errors import ConfigError, EmbeddingError
from flexd.core.keyspace import TableSpec
from flexd.embedding.tap import counters as tap_counters
from flexd.embedding.tap.counters import CellTap, DenseTap, choose
from flexd.embedding.tap.hashing import hashed
from flexd.sketch.counters.countmin import CountMin

ITEM = TableSpec("item", 100_000, 4)


def plain_cells(ids: np.ndarray, log2_width: int, rows: int = 2**40) -> tuple[np.ndarray, np.ndarray]:
    """Cells and registers as the daemon's kernel counts them."""
    counter, registers = CountMin(rows, log2_width, conservative=False), np.zeros(4096, np.uint8)
    done = 0
    while done < len(ids):
        done, _, _, _ = counter.add(ids, done, 1, registers, 2**40, np.empty(512, np.int64), 0)
    return counter.values().astype(np.int64).reshape(-1), registers


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**40 - 1), min_size=1, max_size=300), st.integers(8, 20))
def test_cells_and_registers_are_the_daemons_bit_by_bit(ids, log2_width):
    rows = np.array(ids, np.int64)
    cells, registers = plain_cells(rows, log2_width)
    found = hashed(torch.from_numpy(rows), log2_width)
    assert np.array_equal(np.bincount(found.cells.reshape(-1).numpy(), minlength=len(cells)), cells)
    mine = torch.zeros(4096, dtype=torch.int64).scatter_reduce(0, found.registers, found.ranks, "amax")
    assert np.array_equal(mine.numpy(), registers)


def test_a_count_min_tap_counts_as_the_daemons_kernel_over_many_batches():
    tap = CellTap(ITEM, 12, 1000, torch.device("cpu"))
    tap._block = 700  # several blocks a batch
    rng = np.random.default_rng(0)
    batches = [(rng.zipf(1.2, 5000) % ITEM.rows).astype(np.int64) for _ in range(4)]
    for ids in batches:
        tap.add(torch.from_numpy(ids), torch.tensor([5000]))
    found = tap.take()
    assert isinstance(found, CellCounts)
    cells, registers = plain_cells(np.concatenate(batches), 12)
    assert np.array_equal(found.cells, cells)
    assert np.array_equal(found.registers, registers)
    assert found.accesses == 20_000
    assert (found.lengths.lengths.tolist(), found.lengths.counts.tolist()) == ([tap_counters.MAX_LENGTH], [4])
    again = tap.take()
    assert again.accesses == 0
    assert not again.cells.any()


def test_the_sample_is_uniform_over_the_interval():
    tap = CellTap(ITEM, 12, 500, torch.device("cpu"))
    torch.manual_seed(0)
    for batch in range(40):
        tap.add(torch.full((250,), batch), torch.tensor([250]))
    sampled = tap.take().sampled
    assert len(sampled) == 500
    per_batch = np.bincount(sampled, minlength=40)
    # 12.5 expected of each batch: chi-square of 39 degrees of freedom, 1e-4 quantile.
    assert ((per_batch - 12.5) ** 2 / 12.5).sum() < 81


def test_a_dense_tap_counts_exactly_and_starts_over():
    tap = DenseTap(ITEM, torch.device("cpu"))
    rng = np.random.default_rng(1)
    exact = np.zeros(ITEM.rows, np.int64)
    for dtype in (torch.int64, torch.int32):
        ids = (rng.zipf(1.3, 8000) % ITEM.rows).astype(np.int64)
        np.add.at(exact, ids, 1)
        tap.add(torch.from_numpy(ids).to(dtype), torch.tensor([3000, 5000, 0]))
    found = tap.take()
    assert isinstance(found, RowCounts)
    assert np.array_equal(found.rows, np.flatnonzero(exact))
    assert np.array_equal(found.counts, exact[found.rows])
    assert found.lengths.lengths.tolist() == [0, 3000, tap_counters.MAX_LENGTH]
    assert tap.take().accesses == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=6), st.integers(2**20, 2**30))
def test_the_chosen_counters_fit_the_memory(rows, max_bytes):
    tables = [TableSpec(f"t{i}", count, 4) for i, count in enumerate(rows)]
    try:
        chosen = choose(tables, max_bytes, 4096)
    except EmbeddingError as error:
        assert "max_bytes=" in error.remedy  # noqa: PT017
        return
    assert [choice.table for choice in chosen] == [spec.name for spec in tables]
    assert sum(choice.bytes for choice in chosen) <= max_bytes
    exact = [spec.rows for spec, choice in zip(tables, chosen, strict=True) if choice.log2_width is None]
    wide = [spec.rows for spec, choice in zip(tables, chosen, strict=True) if choice.log2_width is not None]
    assert not exact or not wide or max(exact) <= min(wide)


# ---- the tap on a collection ----


def collection() -> flexd.EmbeddingCollection:
    return flexd.EmbeddingCollection([
        flexd.EmbeddingTable("item", 20_000, 4, features=("history", "target")), flexd.EmbeddingTable("shop", 50, 4)
    ])  # fmt: skip


class Job:
    """Steps of a collection with a tap, and the exact counts."""

    def __init__(self, **options: object) -> None:
        self.seconds = 100.0
        self.collection = collection()
        self.tap = flexd.Tap(self.collection, **{"clock": lambda: self.seconds, "interval_seconds": 1e9, **options})
        self.exact = {"item": np.zeros(20_000, np.int64), "shop": np.zeros(50, np.int64)}
        self.rng = np.random.default_rng(0)

    def features(self, n: int = 60) -> dict[str, flexd.Jagged]:
        draw = {name: (self.rng.zipf(1.3, n) % 50).astype(np.int64) * scale for name, scale in
                (("history", 300), ("target", 7), ("shop", 1))}  # fmt: skip
        return {name: flexd.Jagged(torch.from_numpy(ids), torch.tensor([n - 10, 10])) for name, ids in draw.items()}

    def step(self) -> None:
        features = self.features()
        out = self.collection(features)
        sum(part.values.sum() for part in out.values()).backward()
        self.collection.optimizer.step()
        for name, jagged in features.items():
            np.add.at(self.exact["shop" if name == "shop" else "item"], jagged.values.numpy(), 1)
        self.seconds += 1

    def drain(self, deltas: list[counted.CountedBatch], seconds: float = 20.0) -> None:
        """Takes deltas as a daemon does, until all that was handed over is here."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            delta = self.tap.outbox.current()
            if delta is not None:
                deltas.append(counted.decode(delta.payload))
                self.tap.outbox.acknowledge(delta.sequence)
            elif self.tap._full is None and self.tap._spare is not None and not self.tap._held:
                return
            time.sleep(0.002)
        raise AssertionError("the tap does not hand over")

    def totals(self, deltas: list[counted.CountedBatch]) -> dict[str, np.ndarray]:
        found = {name: np.zeros_like(rows) for name, rows in self.exact.items()}
        for batch in deltas:
            for table in batch.tables:
                assert isinstance(table, RowCounts)
                found[table.table][table.rows] += table.counts
        return found

    def check(self, deltas: list[counted.CountedBatch]) -> None:
        for name, rows in self.totals(deltas).items():
            assert np.array_equal(rows, self.exact[name]), name


def test_every_interval_is_counted_exactly_and_dated_at_its_middle():
    job = Job(interval_steps=5)
    job.tap.start()
    deltas: list[counted.CountedBatch] = []
    for _ in range(4):
        for _ in range(5):
            job.step()
        job.drain(deltas)
    job.check(deltas)
    assert [batch.event_time_seconds for batch in deltas] == [102.0, 107.0, 112.0, 117.0]
    assert {batch.source_rank for batch in deltas} == {0}
    item = next(table for table in deltas[0].tables if table.table == "item")
    assert (item.lengths.lengths.tolist(), item.lengths.counts.tolist()) == ([10, 50], [10, 10])
    assert job.tap.counters.accesses == 20 * 180
    assert not job.tap.close(0.0) or job.tap.counters.deltas == 4


def test_a_daemon_that_takes_nothing_costs_neither_steps_nor_counts_nor_memory():
    job = Job(interval_steps=1)
    job.tap.start()
    for _ in range(60):
        job.step()
    deadline = time.monotonic() + 20
    while job.tap._full is not None or job.tap._spare is None or not job.tap._held:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    first = job.tap.outbox.current()
    assert first is not None
    assert first.sequence == 0
    held = sum(counted.values_of([table]) for table in job.tap._held.values())
    assert held <= 2 * (20_000 + 50) + 4 * 4097, "what is held is bounded by the tables' rows"
    deltas: list[counted.CountedBatch] = []
    while job.tap._counting.steps and not job.tap._swap():
        time.sleep(0.002)
    job.drain(deltas)
    job.check(deltas)
    assert len(deltas) < 10, "what waited was added up"


def test_only_training_look_ups_are_counted():
    job = Job(interval_steps=1)
    with torch.no_grad():
        job.collection(job.features())
    job.collection.eval()
    job.collection(job.features())
    job.collection.train()
    with pytest.raises(EmbeddingError):
        job.collection({"shop": flexd.Jagged(torch.tensor([50]), torch.tensor([1]))})
    assert job.tap.counters.accesses == 0
    assert job.tap._counting.steps == 0


def test_a_step_goes_on_when_it_cannot_be_counted(monkeypatch, caplog):
    job = Job()
    monkeypatch.setattr(DenseTap, "add", lambda *_: 1 / 0)
    job.step()
    job.step()
    assert job.collection.steps == 2
    assert job.tap.counters.failures == 2
    assert job.tap.counters.accesses == 0


def test_counters_never_pass_32_bits(monkeypatch):
    monkeypatch.setattr("flexd.embedding.tap.tap.MAX_SIDE_ACCESSES", 400)
    job = Job()
    for _ in range(8):  # the thread is not running: after one buffer changes hands there is no other
        job.step()
    assert job.tap._full is not None
    counters = job.tap.counters
    assert counters.dropped > 0, "said, not wrapped around"
    assert counters.accesses + counters.dropped == 8 * 180
    assert job.tap._counting.accesses <= 400


def test_deltas_too_large_for_one_message_are_split(monkeypatch):
    monkeypatch.setattr("flexd.embedding.tap.tap.MAX_VALUES", 40)
    job = Job(interval_steps=2)
    job.tap.start()
    deltas: list[counted.CountedBatch] = []
    for _ in range(4):
        job.step()
    # The thread may not have been done with the first interval when the second one ended.
    while job.tap._counting.steps and not job.tap._swap():
        time.sleep(0.002)
    job.drain(deltas)
    job.check(deltas)
    assert len(deltas) > 2
    assert max(counted.values_of(batch.tables) for batch in deltas) <= 40
    lengths = sum(int(t.lengths.counts.sum()) for b in deltas for t in b.tables)
    assert lengths == 4 * 3 * 2


def test_closing_without_a_daemon_ends_in_time():
    job = Job(interval_steps=1)
    job.tap.start()
    job.step()
    started = time.monotonic()
    assert not job.tap.close(0.3)
    assert time.monotonic() - started < 10
    assert job.collection.after_lookup is None


@pytest.mark.parametrize(
    "options", [{"interval_seconds": 0.0}, {"interval_steps": 0}, {"max_bytes": 1000}, {"sampled": 0}]
)
def test_taps_that_cannot_be(options):
    with pytest.raises(EmbeddingError):
        flexd.Tap(collection(), **options)


def test_one_tap_a_collection_and_only_its_own():
    job = Job()
    with pytest.raises(EmbeddingError):
        flexd.Tap(job.collection)
    with pytest.raises(ConfigError):
        flexd.connect(collection(), "127.0.0.1:1", job="j", attempt="a", tap=job.tap)
