"""Decisions about unbounded ids, on any number of ranks, against a reference that decides id after id."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding import devices
from flexd.embedding.ids.distinct_ids import distinct_ids, ids_by_set
from flexd.embedding.ids.id_sets import SLOTS, IdSets, UnboundedTable
from flexd.embedding.ids.slot_table import COUNTS, SlotTable, floor_log2
from tests.support.plain_ids import PlainIds

CPU = torch.device("cpu")


def home_rows(
    tables: list[SlotTable], sets: IdSets, numbers: np.ndarray, ids: np.ndarray, step: int, bonus: list[int]
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], bool]]:
    """Decide at every home, and return keys and whether they begin by (table, id)."""
    rows: dict[tuple[int, int], int] = {}
    begun: dict[tuple[int, int], bool] = {}
    all_sets = sets.of_ids(torch.from_numpy(ids), torch.from_numpy(numbers))
    for rank, table in enumerate(tables):
        mine = all_sets % len(tables) == rank
        given = torch.from_numpy(ids)[mine.numpy()]
        chosen, place = ids_by_set(all_sets[mine] // len(tables), given, sets.hashes(given), several=True)
        counts = torch.bincount(place, minlength=len(chosen))
        local = (all_sets[mine] // len(tables))[chosen]
        own, number = given[chosen], torch.from_numpy(numbers)[mine.numpy()][chosen]
        decisions = table.decide(local, own, counts, step, torch.tensor(bonus)[number])
        before = table.ids.clone(), table.uses.clone()
        again = table.decide(local, own, counts, step, torch.tensor(bonus)[number])
        assert torch.equal(decisions.slots, again.slots), "deciding changes nothing"
        assert torch.equal(before[0], table.ids)
        assert torch.equal(before[1], table.uses)
        table.apply(decisions)
        keys = sets.keys(table.global_sets(local), decisions.slots)
        for at, (n, i) in enumerate(zip(number.tolist(), own.tolist(), strict=True)):
            rows[n, i], begun[n, i] = int(keys[at]), bool(decisions.fresh[at])
    return rows, begun


@settings(max_examples=60, deadline=None)
@given(
    rows=st.tuples(st.integers(2, 200), st.integers(2, 40)),
    admit=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2])),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([1, 3, 40]),
    batch=st.sampled_from([8, 60, 300]),
    passes=st.sampled_from([1, 2]),
    skewed=st.booleans(),
)
def test_decisions_are_those_of_one_id_after_another_on_any_number_of_ranks(
    rows: tuple[int, int],
    admit: tuple[int, int],
    seed: int,
    spread: int,
    batch: int,
    passes: int,
    skewed: bool,
) -> None:
    tables = [UnboundedTable(f"t{n}", n, rows[n], 1000 * n, admit[n]) for n in range(2)]
    sets = IdSets(tables, CPU)
    plain = [PlainIds(t.rows, t.admit_after) for t in sets.tables]
    worlds = [[SlotTable(sets, rank, world, CPU) for rank in range(world)] for world in (1, 2, 4)]
    rng = np.random.default_rng(seed)
    most = max(2, spread * max(rows) // 4)
    for index in range(12):
        numbers = rng.integers(0, 2, batch)
        drawn = rng.zipf(1.4, batch) if skewed else rng.integers(0, most, batch)
        ids = (drawn % most - most // 2) * 0x1234567_89ABCDEF
        step, new_step = index // passes + 1, index % passes == 0
        bonus, begun = [], {}
        for number, one in enumerate(plain):
            one.look_up(Counter(ids[numbers == number].tolist()), new_step=new_step)
            bonus.append(max(1, 2 * one.shared * one.steps // max(1, one.look_ups)))
        expected = {
            (n, i): sets.tables[n].first_key + (plain[n].shared if (row := plain[n].find(i)) is None else row)
            for n, i in zip(numbers.tolist(), ids.tolist(), strict=True)
        }
        begun = {(n, i): plain[n].is_fresh(i) for n, i in expected}
        for world in worlds:
            assert home_rows(world, sets, numbers, ids, step, bonus) == (expected, begun)
    counts = [[getattr(one, name) for name in COUNTS[:6]] for one in plain]
    for world in worlds:
        found = sum(table.counts for table in world)
        assert found[:, :6].tolist() == counts
        assert bool((found[:, 6:].diff(dim=1) <= 0).all())
        assert bool((found[:, 6] <= found[:, 1]).all())
    for table in worlds[0]:  # rows and slots are inverse maps
        for number, one in enumerate(sets.tables):
            own = torch.arange(one.slots)
            places = sets.places(own, number)
            assert torch.equal(sets.keys(*places) - one.first_key, own)
            assert int(places[1].max()) < SLOTS
            assert bool((places[1] < table._slots_of(places[0])).all())


def test_ids_that_are_only_read_change_nothing_and_are_not_admitted() -> None:
    sets = IdSets([UnboundedTable("t", 0, 20, 0, 1)], CPU)
    table = SlotTable(sets, 0, 1, CPU)
    ids, none, bonus = torch.arange(5), torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.int64)
    table.apply(table.decide(none, ids, torch.tensor([1, 1, 0, 0, 1]), 1, bonus))
    before = table.ids.clone(), table.uses.clone(), table.last.clone(), table.counts.clone()
    read = table.decide(none, ids, none, 5, bonus)
    table.apply(read)
    assert read.slots.tolist() == [0, 1, -1, -1, 2]
    assert not read.fresh.any()
    for now, then in zip((table.ids, table.uses, table.last, table.counts), before, strict=True):
        assert torch.equal(now[:-1] if now.dim() > 1 else now, then[:-1] if now.dim() > 1 else then)


def test_the_logarithm_of_uses_is_exact_at_every_power() -> None:
    powers = 2 ** torch.arange(32)
    assert torch.equal(floor_log2(powers), torch.arange(32))
    assert torch.equal(floor_log2(powers[1:] - 1), torch.arange(31))


def test_a_row_has_16_bytes_and_8_in_filters() -> None:
    sets = IdSets([UnboundedTable("t", 0, 64 * 1000 + 1, 0, 2)], CPU)
    table = SlotTable(sets, 0, 1, CPU)
    assert table.refused is not None
    of_slots = sum(column[:-1].nbytes for column in (table.ids, table.last, table.uses))
    assert of_slots == 16 * 64_000
    assert table.refused.words[:-1].nbytes == 8 * 64_000


def test_what_fewer_slots_would_have_kept_is_known_from_the_order_of_the_slots() -> None:
    """In a set of 64 slots an id that comes every k steps, among ids that come once, is there for fewer slots too if
    fewer than those were used since."""
    for every, expected in ((10, (1, 1)), (20, (1, 0)), (50, (0, 0))):
        sets = IdSets([UnboundedTable("t", 0, 65, 0, 1)], CPU)
        table, first = SlotTable(sets, 0, 1, CPU), torch.zeros(1, dtype=torch.int64)
        for step in range(1, 65):  # of a step in sixteen there is a sample
            looked_up = torch.tensor([7 if step in (64 - every, 64) else 1000 + step])
            table.apply(table.decide(first, looked_up, torch.ones_like(first), step, torch.ones_like(first)))
        assert table.counts[0, 1] == 1
        assert table.counts[0, 6:].tolist() == [1, *expected]


@given(st.lists(st.integers(0, 2**40), max_size=60), st.integers(0, 40))
def test_orders_are_those_of_torch(numbers: list[int], shift: int) -> None:
    few = torch.tensor(numbers, dtype=torch.int64) >> shift
    assert torch.equal(devices.stable_order_of(few), torch.sort(few, stable=True).indices)
    assert torch.equal(few[devices.order_of(few)], few.sort().values)


def test_ids_are_found_in_any_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = IdSets([UnboundedTable("t", 0, 1000, 0, 1)], CPU)
    table = SlotTable(sets, 0, 1, CPU)
    ids = torch.arange(400) * 7 - 3
    of_ids, order = sets.of_ids(ids, torch.zeros_like(ids)).sort(stable=True)
    ids = ids[order]
    table.apply(table.decide(of_ids, ids, torch.ones_like(ids), 1, torch.ones_like(ids)))
    found = table.find(of_ids, ids)
    assert (found >= 0).sum() > 300
    monkeypatch.setattr("flexd.embedding.ids.slot_table._BLOCK_SLOTS", 3 * SLOTS)
    assert torch.equal(table.find(of_ids, ids), found)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(-3, 3)), max_size=80),
    st.sampled_from([1, 2**40, 0x1234567_89ABCDEF]),
    st.booleans(),
    st.sampled_from([0, 60]),
)
def test_distinct_ids_are_those_of_numpy(
    drawn: list[tuple[int, int]], factor: int, several: bool, alike_bits: int
) -> None:
    """Whatever their hashes: in the table that ids take places of by them, others may have taken a place."""
    numbers, ids = torch.tensor(drawn, dtype=torch.int64).view(-1, 2).T.contiguous()
    numbers, ids = numbers * several, ids * factor
    hashes = IdSets.hashes(ids) >> alike_bits
    both = np.stack([numbers.numpy(), ids.numpy()], axis=1)
    expected, inverse = np.unique(both, axis=0, return_inverse=True)
    chosen, number = distinct_ids(ids, hashes, numbers if several else None)
    assert sorted(map(tuple, both[chosen.numpy()].tolist())) == list(map(tuple, expected.tolist()))
    assert np.array_equal(both[chosen[number].numpy()], both)
    chosen, number = ids_by_set(numbers, ids, hashes, several=several)
    assert np.array_equal(both[chosen.numpy()], expected)
    assert np.array_equal(number.numpy(), inverse.reshape(-1))
