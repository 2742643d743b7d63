"""Rows in tiered storage: code that reads and writes by slot sees one tensor."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexd.control.protocol.report import MAX_NAMED_TABLES, SlowTableReport, named_tables
from flexd.core.errors import SlowMemoryError
from flexd.core.keyspace import Homes, KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.embedding.devices import packed
from flexd.embedding.store.slow.cold_rows import ColdRows, HostRows
from flexd.embedding.store.slow.file_rows import FileRows
from flexd.embedding.store.slow.tiered_rows import (
    COUNT_BYTES,
    EVICTED,
    MISSED,
    USED,
    WRITTEN,
    CacheSlotCounts,
    TieredColumn,
    TieredRows,
    with_counts,
)
from flexd.embedding.store.slow.tiered_storage import CACHE_SLOT_BYTES, first_home_slots
from flexd.embedding.store.store import make_stores

HOME, REPLICAS, DIM, STATE = 150, 10, 3, 1


def initial(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (slots[:, None] + torch.arange(DIM) / 8).to(torch.float16), torch.full((len(slots), STATE), 0.5)


def fresh(slots: torch.Tensor) -> torch.Tensor:
    return with_counts(packed(*initial(slots)))


def made(
    cache_slots: int, cold_rows: Callable[[TieredRows], ColdRows]
) -> tuple[TieredRows, TieredColumn, TieredColumn]:
    rows = torch.zeros(cache_slots + REPLICAS, DIM, dtype=torch.float16)
    state = torch.zeros(cache_slots + REPLICAS, STATE)
    tier = TieredRows(rows, state, cache_slots, HOME)
    tier.begin(lambda: cold_rows(tier))
    return tier, TieredColumn(tier, rows), TieredColumn(tier, state)


def in_host_memory(tier: TieredRows) -> ColdRows:
    return HostRows(HOME, tier.row_bytes + COUNT_BYTES, fresh)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([1, 7, HOME]),
    st.sampled_from(["host", "file"]),
    st.lists(
        st.tuples(st.sampled_from(["read", "count", "rows", "state", "through", "resize"]), st.integers(0, 2**31)),
        max_size=25,
    ),
)
def test_a_column_is_read_and_written_like_a_tensor(
    tmp_path: Path, cache_slots: int, medium: str, calls: list[tuple[str, int]]
) -> None:
    def cold_rows(tier: TieredRows) -> ColdRows:
        if medium == "host":
            return in_host_memory(tier)
        return FileRows(tmp_path / "rows", HOME, tier.row_bytes + COUNT_BYTES, fresh, threads=2)

    tier, rows, state = made(cache_slots, cold_rows)
    try:
        expected_rows, expected_state = initial(torch.arange(HOME + REPLICAS))
        for column, expected in ((rows, expected_rows), (state, expected_state)):
            column[HOME : HOME + REPLICAS] = expected[HOME:]
        for what, seed in calls:
            generator = np.random.default_rng(seed)
            slots = torch.from_numpy(generator.choice(HOME + REPLICAS, generator.integers(0, 60), replace=False))
            if what == "resize":
                tier.resize(seed % (HOME + 20))
                assert tier.cache_slots == min(HOME, max(1, seed % (HOME + 20)))
            elif what == "read":
                repeated = torch.cat([slots, slots[:5]])
                assert torch.equal(rows.index_select(0, repeated), expected_rows[repeated])
                assert torch.equal(state.narrow(1, 0, 1).index_select(0, slots), expected_state[slots])
            elif what == "count":
                repeated = torch.cat([slots[:5], slots])
                assert torch.equal(rows.index_select(0, repeated, counts=True), expected_rows[repeated])
            elif what == "through":
                slots = slots[slots < HOME]
                read = tier.read_through(slots)
                assert torch.equal(read[:, : 2 * DIM].clone().view(torch.float16), expected_rows[slots])
                tier.write_through(slots, read.flip(0))
                expected_rows[slots], expected_state[slots] = (
                    expected_rows[slots].flip(0),
                    expected_state[slots].flip(0),
                )
            else:
                column, expected = (rows, expected_rows) if what == "rows" else (state, expected_state)
                values = torch.from_numpy(generator.random((len(slots), column.shape[1]))).to(column.dtype)
                column.index_copy_(0, slots, values)
                expected[slots] = values
        assert torch.equal(rows[:], expected_rows)
        assert torch.equal(state[:], expected_state)
    finally:
        tier.close()


def test_hits_misses_and_writes_are_counted() -> None:
    tier, rows, _ = made(4, in_host_memory)
    rows.index_select(0, torch.tensor([1, 2, 3, HOME]), counts=True)
    rows.index_select(0, torch.tensor([2, 3]), counts=True)
    assert tier.counts.by_table().tolist() == [[5, 3, 0, 0]]
    rows.index_copy_(0, torch.tensor([1]), torch.ones(1, DIM))
    rows.index_select(0, torch.tensor([10, 11, 12, 13]), counts=True)
    assert tier.counts.by_table().tolist() == [[9, 7, 3, 1]], "one cache slot was never used"
    assert tier.cold.traffic.bytes_written > 0
    assert tier.table_nbytes > 0


def test_a_rows_count_of_uses_leaves_and_comes_back_with_it() -> None:
    tier, rows, _ = made(3, in_host_memory)
    for _ in range(5):
        rows.index_select(0, torch.tensor([1]), counts=True)
    rows[1:2] = torch.full((1, DIM), 9.0)
    for slots in ([4, 5, 6], [1, 7, 8], [7, 8], [9]):  # all leave; it comes back; the others are used; one leaves
        rows.index_select(0, torch.tensor(slots), counts=True)
    missed = int(tier.counts.by_table()[0, MISSED])
    rows.index_select(0, torch.tensor([1]), counts=True)
    assert int(tier.counts.by_table()[0, MISSED]) == missed


def test_reading_and_writing_a_whole_table_leaves_the_cache_slots_as_they_are() -> None:
    tier, rows, state = made(4, in_host_memory)
    rows.index_select(0, torch.tensor([5, 70, 71]), counts=True)
    rows.index_copy_(0, torch.tensor([70]), torch.full((1, DIM), 9.0))
    assert rows[:][70, 0] == 9.0
    assert state[:].shape == (HOME + REPLICAS, STATE)
    tier.write_through(torch.arange(HOME), tier.read_through(torch.arange(HOME)))
    assert int(tier.counts.by_table()[0, EVICTED]) == 0
    missed = int(tier.counts.by_table()[0, MISSED])
    rows.index_select(0, torch.tensor([5, 70, 71]), counts=True)
    assert int(tier.counts.by_table()[0, MISSED]) == missed
    assert rows[70:71].unique() == 9.0


@pytest.mark.parametrize("fails", ["read", "write", "resize"])
def test_after_a_failure_between_the_memories_no_row_is_given(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    tier, rows, _ = made(4, in_host_memory)
    rows[0:4] = torch.full((4, DIM), 9.0)

    def broken(*_: object) -> None:
        raise SlowMemoryError("the disk is gone")

    with monkeypatch.context() as broke:
        broke.setattr(tier.cold, "write" if fails == "resize" else fails, broken)
        use = (
            partial(tier.resize, 2)
            if fails == "resize"
            else partial(rows.index_select, 0, torch.arange(4, 8), counts=True)
        )
        with pytest.raises(SlowMemoryError, match="the disk is gone"):
            use()
    for use in (lambda: rows[4:8], lambda: rows[0:1], lambda: rows.index_copy_(0, torch.tensor([1]), rows[1:2])):
        with pytest.raises(SlowMemoryError, match="the disk is gone"):
            use()
    tier.begin(lambda: in_host_memory(tier))
    assert torch.equal(rows[0:8], initial(torch.arange(8))[0])


def test_what_finds_a_cache_slot_takes_no_more_than_is_reckoned() -> None:
    cache_slots = 10_000
    tier = TieredRows(torch.zeros(cache_slots, DIM), torch.zeros(cache_slots, STATE), cache_slots, 10 * cache_slots)
    tier.begin(lambda: HostRows(10 * cache_slots, tier.row_bytes + COUNT_BYTES, float32_rows))
    rows = TieredColumn(tier, tier.rows)
    for first in range(0, 30_000, 5_000):
        rows.index_select(0, torch.arange(first, first + 5_000), counts=True)
    assert 0 < tier.table_nbytes - tier.cold.fast_nbytes <= CACHE_SLOT_BYTES * cache_slots


def float32_rows(slots: torch.Tensor) -> torch.Tensor:
    return with_counts(packed(torch.zeros(len(slots), DIM), torch.zeros(len(slots), STATE)))


def test_the_rows_that_would_leave_last_stay_and_changed_ones_are_written_first() -> None:
    tier, rows, _ = made(6, in_host_memory)
    for uses in range(3):
        rows.index_select(0, torch.arange(3 - uses), counts=True)  # row 0 three times, 1 twice, 2 once
    rows.index_copy_(0, torch.tensor([2, 3, 4]), torch.full((3, DIM), 7.0, dtype=torch.float16))
    written, read = tier.cold.traffic.bytes_written, tier.cold.traffic.bytes_read
    tier.resize(3)
    used = tier.counts.by_table().clone()
    assert torch.equal(
        rows.index_select(0, torch.tensor([0, 1, 2], dtype=torch.int64), counts=True)[0],
        initial(torch.tensor([0]))[0][0],
    )
    assert (tier.counts.by_table() - used)[0].tolist() == [3, 0, 0, 0], "none of the three was missed"
    assert tier.cold.traffic.bytes_read == read
    assert tier.cold.traffic.bytes_written - written == 2 * (tier.row_bytes + COUNT_BYTES), (
        "rows 3 and 4; row 2 keeps its cache slot"
    )
    assert tier.rows.shape[0] == 3 + REPLICAS
    tier.resize(HOME)
    assert torch.equal(rows[2:5], torch.full((3, DIM), 7.0, dtype=torch.float16))
    tier.close()


def test_cache_slots_of_rows_in_use_are_not_changed() -> None:
    tier, rows, _ = made(6, in_host_memory)
    for _ in tier.visit(torch.arange(3), changes=False):
        with pytest.raises(SlowMemoryError, match="change their number between two steps"):
            tier.resize(4)
    assert tier.cache_slots == 6
    assert torch.equal(rows[:3], initial(torch.arange(3))[0])
    tier.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 2**31))
def test_rows_are_counted_for_their_tables(rows: list[int], world_size: int, seed: int) -> None:
    """Tables with fewer rows than ranks have no home row on some of them."""
    keyspace = KeySpace([TableSpec(f"t{number}", count, 4) for number, count in enumerate(rows)])
    homes = Homes(keyspace, RankLayout(1, world_size))
    rng = np.random.default_rng(seed)
    for rank in range(world_size):
        store = make_stores(homes, rank, [0], torch.device("cpu"))[0]
        counts = CacheSlotCounts(torch.device("cpu"), *first_home_slots(store), len(rows))
        expected = np.zeros((len(rows), 4), dtype=np.int64)
        for quantity in (USED, MISSED, EVICTED, WRITTEN):
            slots = np.flatnonzero(rng.random(store.home_rows) < 0.6)
            counts.add(quantity, torch.from_numpy(slots))
            np.add.at(expected[:, quantity], keyspace.table_of(store.first_home_address + world_size * slots), 1)
        assert np.array_equal(counts.by_table().numpy(), expected)


def test_a_report_names_the_tables_with_the_most_misses_and_sums_the_others() -> None:
    reports = [SlowTableReport(table, used=10, missed=table, evicted=1, written=2) for table in range(MAX_NAMED_TABLES)]
    assert sorted(report.table for report in named_tables(reports)) == list(range(MAX_NAMED_TABLES))
    few = [SlowTableReport(1000 + number, used=5, evicted=3, written=1) for number in range(4)]
    named = named_tables([*few, *reports])
    assert len(named) == MAX_NAMED_TABLES + 1
    assert [report.table for report in named[:2]] == [MAX_NAMED_TABLES - 1, MAX_NAMED_TABLES - 2]
    # Of the tables without a miss only the one of the lowest number is named.
    assert named[-1] == SlowTableReport(SlowTableReport.OTHERS, used=20, missed=0, evicted=12, written=4)
