"""Rules of a running job: what changes when traffic does, into the room that there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexd.core.answers import NO_ANSWERS
from flexd.core.home_changes import after_block, rules_of
from flexd.core.home_rules import HomeRule
from flexd.core.homes import Homes
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.tables.chain_costs import OPTIONS, chain_options
from flexd.planner.tables.live_rules import RuleChanges, plan_rule_changes
from flexd.planner.tables.solve import place_tables
from flexd.planner.tables.table_work import TableWork
from flexd.sketch.profile import Profile
from flexd.sketch.zipf_profile import zipf_table
from tests.support.kernel_sets import known_costs
from tests.support.planner_cases import cluster

LAYOUT = RankLayout(2, 2)
COUNT = 16
BAGS = 256.0
NAMES = [f"t{at}" for at in range(COUNT)]
PRICES = cluster(latency=1e-6)
LONG = 1e12
"""Steps in which moving rows pays in any case."""


def work_of(keyspace: KeySpace, grown: int = -1) -> TableWork:
    """Pooled tables of 4 to 64 look-ups a bag; those of table ``grown`` are ten times as many."""
    rng = np.random.default_rng(7)
    lengths = np.exp(rng.uniform(np.log(4), np.log(64), COUNT))
    profiles = tuple(
        zipf_table(
            spec.name, spec.rows, 1.05, 100, BAGS * 4 * lengths[at] * (10.0 if at == grown else 1.0), 7919 * at
        )
        for at, spec in enumerate(keyspace.tables)
    )  # fmt: skip
    return TableWork.of(
        Profile(profiles, generation=1, samples=10**9), keyspace, LAYOUT,
        TrainingShape(bags_per_step=dict.fromkeys(NAMES, BAGS)),
    )  # fmt: skip


def homes_of(spare: float, rules: dict[int, HomeRule] | None = None) -> Homes:
    rng = np.random.default_rng(3)
    tables = [TableSpec(name, int(rng.integers(500, 20_000)), 16, "float32", "rowwise_adagrad") for name in NAMES]
    tables = [replace(spec, homes=str((rules or {}).get(at, HomeRule()))) for at, spec in enumerate(tables)]
    keyspace = KeySpace(tables)
    return Homes(keyspace, LAYOUT, spare=[int(spare * keyspace.total_rows)])


def planned(homes: Homes, grown: int = -1, horizon_steps: float = LONG, **more: object) -> RuleChanges:
    given: dict[str, Any] = {"by_sums": NAMES, **more}
    return plan_rule_changes(work_of(homes.keyspace, grown), homes, PRICES, horizon_steps, **given)


def test_a_table_whose_traffic_grows_tenfold_moves_and_the_busiest_rank_is_near_a_plan_from_scratch() -> None:
    first = planned(homes_of(4.0))
    assert first.seconds < 0.9 * first.live_seconds
    placed = homes_of(1.0, first.rules)
    assert not planned(placed).saved_seconds > 0.02 * first.seconds, "the rules are right for this traffic"
    grown = max(first.rules, key=lambda table: work_of(placed.keyspace).statistics[table, 1])
    changed = planned(placed, grown)
    scratch = planned(homes_of(4.0), grown)
    assert changed.rules
    assert changed.live_seconds > 1.2 * scratch.seconds
    assert changed.seconds <= 1.05 * scratch.seconds
    assert changed.loads.max() < changed.live_loads.max()


def test_moves_must_pay_and_have_room_and_fixed_tables_stay() -> None:
    free = planned(homes_of(4.0))
    assert len(free.rules) > 4
    assert planned(homes_of(4.0), horizon_steps=1.0).rules == {}, "a step is shorter than moving any table"
    none = planned(homes_of(0.0))
    assert none.rules == {}
    assert none.saved_seconds == 0
    tight = planned(homes_of(0.1))
    assert tight.rules
    assert set(tight.rules) & set(tight.without_room) == set()
    found = homes_of(0.1)
    for table, rule in tight.rules.items():  # in this order there is room
        for block in rules_of(found, table).blocks_to(rule):
            found = after_block(found, block)
    fixed = list(map(NAMES.__getitem__, free.rules))[:3]
    assert not {NAMES[table] for table in planned(homes_of(4.0), fixed=fixed).rules} & set(fixed)


@pytest.mark.parametrize("boundary", [100, 400])
def test_a_table_on_its_way_is_where_most_of_its_rows_are(boundary: int) -> None:
    homes = homes_of(4.0)
    block = rules_of(homes, 0).blocks_to(HomeRule(), HomeRule("rank", 2), boundary)[0]
    homes = after_block(homes, block)
    assert homes.keyspace.tables[0].rows > 500
    far = plan_rule_changes(work_of(homes.keyspace), homes, PRICES, 1.0, by_sums=NAMES, fixed=NAMES)
    assert far.rules == {}
    whole = homes_of(4.0, {0: HomeRule("rank", 2)}) if 2 * boundary > homes.keyspace.tables[0].rows else homes_of(4.0)
    np.testing.assert_allclose(far.live_loads, planned(whole, horizon_steps=1.0).live_loads)


def test_learned_costs_place_tables_that_bytes_leave_where_they_are() -> None:
    """A second a table: what counts is the number of tables on the fullest rank."""
    crowded = {at: HomeRule("rank", 0) for at in range(COUNT)}
    costly = known_costs(1.0, 0.0)
    by_costs = planned(homes_of(4.0, crowded), kernels=costly)
    assert by_costs.live_seconds == pytest.approx(2 * COUNT, rel=0.01)
    assert by_costs.seconds == pytest.approx(2 * COUNT / 4, rel=0.01)

    def tables_of_ranks(changes: RuleChanges) -> list[int]:
        rules = [changes.rules.get(at, crowded[at]) for at in range(COUNT)]
        return [sum(rule == HomeRule("rank", rank) for rule in rules) for rank in range(4)]

    assert tables_of_ranks(by_costs) == [4, 4, 4, 4]
    spread = planned(homes_of(4.0), kernels=costly)
    assert spread.seconds < 0.3 * spread.live_seconds, "a table that every rank has costs each of them a second"
    assert not planned(homes_of(4.0, spread.rules), kernels=costly).rules
    assert tables_of_ranks(planned(homes_of(4.0, crowded))) != [4, 4, 4, 4], "by bytes tables count by their traffic"


def test_rules_stay_if_sets_save_less_than_moving_their_tables_takes() -> None:
    """A second for the kernels of a dim, whatever the tables: pieces promise shares of it that no move saves."""
    crowded = homes_of(4.0, {at: HomeRule("rank", 0) for at in range(COUNT)})
    found = planned(crowded, horizon_steps=1.0, kernels=known_costs(1e-9, 0.0, by_dim=1.0))
    assert found.rules == {}
    assert found.saved_seconds == 0
    np.testing.assert_array_equal(found.loads, found.live_loads)


def test_rules_and_answers_are_chosen_together_as_a_plan_from_scratch_chooses_them() -> None:
    """Short bags of hot rows are better answered by rows, long ones by sums: from all by rows, and from all by sums."""
    homes = homes_of(4.0)
    fixed = planned(homes, by_sums=())
    free = [planned(homes, by_sums=first, free_answers=NAMES) for first in ((), NAMES)]
    assert fixed.answers == NO_ANSWERS
    assert free[0].seconds < 0.95 * fixed.seconds
    assert free[0].seconds == pytest.approx(free[1].seconds, rel=0.05)
    scratch = place_tables(
        chain_options(work_of(homes.keyspace), LAYOUT, PRICES, options=OPTIONS[:-1]), LAYOUT, 1e12
    ).seconds
    assert free[0].seconds <= 1.05 * scratch
    for found, first in zip(free, ((), range(COUNT)), strict=True):
        by_sums = set(first) ^ {*found.answers.sums, *found.answers.rows}
        assert set(found.answers.rows) <= set(first)
        again = planned(homes_of(4.0, found.rules), by_sums=[NAMES[at] for at in by_sums], free_answers=NAMES)
        assert again.saved_seconds < 0.02 * found.seconds
        assert again.live_seconds == pytest.approx(found.seconds, rel=1e-3)


def test_answers_change_where_no_row_can_move_and_only_those_that_may() -> None:
    found = planned(homes_of(0.0), by_sums=(), free_answers=NAMES[:5], moves=False, horizon_steps=1.0)
    assert found.rules == {}
    assert found.answers.sums
    assert set(found.answers.sums) <= set(range(5))
    assert found.bytes_to_move == 0
    assert found.saved_seconds > 0
    kept = planned(homes_of(0.0), free_answers=(), moves=False)
    assert (kept.rules, kept.answers) == ({}, NO_ANSWERS)
    copied = planned(homes_of(4.0, {0: HomeRule("every rank")}), by_sums=(), free_answers=NAMES)
    assert 0 not in copied.answers.sums, "sums make no use of copies"


def test_the_first_table_by_sums_must_pay_for_their_collectives() -> None:
    slow = cluster(latency=1.0)
    for first, what in (((), "rows"), (NAMES, "sums")):
        found = plan_rule_changes(
            work_of(homes_of(4.0).keyspace), homes_of(4.0), slow, LONG, by_sums=first, free_answers=NAMES
        )
        if what == "rows":
            assert found.answers == NO_ANSWERS
        else:
            assert found.answers.rows == tuple(range(COUNT)), "without sums a step has none of their collectives"
            assert found.saved_seconds > 1.0
    one_keeps = plan_rule_changes(
        work_of(homes_of(4.0).keyspace), homes_of(4.0), slow, LONG, by_sums=NAMES, free_answers=NAMES[1:]
    )
    assert len(one_keeps.answers.rows) < COUNT - 1, "they are there anyway"


def test_learned_costs_price_each_answer() -> None:
    """By sums a home looks up all ids, by rows each row once a node: where a look-up is dear, rows win."""
    dear = planned(homes_of(0.0), free_answers=NAMES, moves=False, kernels=known_costs(0.0, 1e-3))
    assert dear.answers.rows
    assert dear.saved_seconds > 0
