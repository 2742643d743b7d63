"""Explanations agree with the plan: thresholds part its tiers, prices add up, reasons are true."""

from typing import Any

import numpy as np
import pytest

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.planner.explain import TableExplanation, TierReason, explain
from flexd.planner.model.workload import TrainingShape
from flexd.planner.plan import Plan, make_plan
from flexd.planner.solver.assign import PlanLimits, RowPin
from flexd.sketch.profile import Profile, TableProfile
from flexd.topology.files import load_preset, scale_model
from tests.support.planner_cases import ORIGIN

LAYOUT = RankLayout(2, 2)
CLUSTER = scale_model(load_preset("azure-a100-200g"), 1e9)
ROWS = 4_000
KEYSPACE = KeySpace([TableSpec("items", ROWS, 64), TableSpec("shops", 500, 64)])
HORIZON = 1e6


def profile_of(listed: int = ROWS, accesses: float = 40_000.0, lower: float = 1.0) -> Profile:
    share = np.arange(1, ROWS + 1) ** -1.05
    share /= share.sum()
    rest = share[listed:]
    bins = (np.array([rest.mean()]), np.array([float(len(rest))])) if len(rest) else (np.empty(0), np.empty(0))
    rows = np.random.default_rng(1).permutation(ROWS)[:listed]
    items = TableProfile(
        "items", ROWS, 1e6, accesses, rows, share[:listed], *bins, ROWS, (share[:listed] * lower, share[:listed])
    )
    none = np.empty(0)
    shops = TableProfile("shops", 500, 0.0, 0.0, np.empty(0, np.int64), none, none, none, 0.0)
    return Profile((items, shops), generation=1, samples=10**6)


def planned(
    slots: int, profile: Profile | None = None, live: Placement | None = None, **changes: Any
) -> tuple[Plan, Profile, Placement]:
    profile, live = profile or profile_of(), live or Placement.empty()
    plan = make_plan(
        profile, KEYSPACE, LAYOUT, changes.pop("cluster", CLUSTER), [slots], live, ORIGIN,
        horizon_steps=HORIZON, **changes,
    )  # fmt: skip
    return plan, profile, live


def explained(made: tuple[Plan, Profile, Placement], table: str = "items", **changes: Any) -> TableExplanation:
    plan, profile, live = made
    return explain(plan, profile, live, KEYSPACE, LAYOUT, horizon_steps=HORIZON, table=table, **changes)


@pytest.mark.parametrize("slots", [40, 300, 4_000])
def test_the_threshold_parts_the_rows_that_are_promoted_from_the_others(slots: int) -> None:
    made = planned(slots)
    answer = explained(made, hottest=ROWS)
    assert sum(answer.planned_rows) == sum(answer.live_rows) == ROWS
    assert answer.planned_rows[Tier.NODE] == np.count_nonzero(made[0].target.tiers == Tier.NODE) > 0
    node = next(threshold for threshold in answer.thresholds if threshold.tier is Tier.NODE)
    assert (node.slot_seconds > 0) == (slots < 4_000)
    assert answer.slots_used <= answer.slots == slots
    assert node.demote_accesses <= node.promote_accesses
    wrong = [
        row for row in answer.explained if (row.accesses[0] > node.promote_accesses) != (row.planned is not Tier.HOME)
    ]
    # Slots are met rank by rank and homes are spread by chance: rows about the threshold may be on its other side, as
    # many on one as on the other.
    assert all(0.7 < row.accesses[0] / node.promote_accesses < 1.3 for row in wrong)
    promoted = sum(row.planned is not Tier.HOME for row in wrong)
    assert abs(len(wrong) - 2 * promoted) <= max(2, 0.1 * len(wrong))


def test_reasons() -> None:
    few = explained(planned(40), hottest=ROWS).explained
    assert {row.reason for row in few} >= {TierReason.SAVES, TierReason.SLOT_PRICE}
    assert all((row.reason is TierReason.SAVES) == (row.planned is not Tier.HOME) for row in few)
    rare = explained(planned(40, profile_of(accesses=40.0)), hottest=ROWS).explained
    assert {row.reason for row in rare[-100:]} == {TierReason.NO_GAIN}
    unsure = explained(planned(4_000, profile_of(lower=1e-6)), hottest=10).explained
    assert {row.reason for row in unsure} == {TierReason.MIGRATION}
    slow = explained(
        planned(4_000, cluster=load_preset("azure-a100-200g"), profile=profile_of(accesses=4_000.0)), hottest=3
    )
    assert {row.reason for row in slow.explained} == {TierReason.LATENCY}
    assert slow.sync_latency_seconds == pytest.approx(21.27e-6)


def test_pins_and_exclusions_are_told() -> None:
    hottest, rarest = profile_of().tables[0].hot_rows[[0, -1]]
    limits = PlanLimits(
        pins=(RowPin("items", Tier.HOME, np.array([hottest])), RowPin("items", Tier.DEVICE, np.array([rarest])))
    )
    rows = explained(planned(300, limits=limits), rows=[int(hottest), int(rarest)], limits=limits).explained
    assert [(row.planned, row.reason) for row in rows] == [
        (Tier.HOME, TierReason.PINNED),
        (Tier.DEVICE, TierReason.PINNED),
    ]
    nothing = PlanLimits(exclude_tables=frozenset({"items"}))
    rows = explained(planned(300, limits=nothing), rows=[int(hottest)], limits=nothing).explained
    assert [(row.planned, row.reason) for row in rows] == [(Tier.HOME, TierReason.EXCLUDED)]


@pytest.mark.parametrize(
    ("slots", "micro_batches", "frozen"), [(300, 4, ["items"]), (4_000, 1, ["items"]), (300, 1, [])]
)
def test_gains_are_those_of_the_plan_with_micro_batches_and_frozen_tables_too(
    slots: int, micro_batches: int, frozen: list[str]
) -> None:
    shape = TrainingShape(micro_batches=micro_batches, frozen_tables=frozenset(frozen))
    made = planned(slots, shape=shape)
    answer = explained(made, hottest=ROWS, shape=shape)
    gain_of = dict(zip(made[0].target.keys.tolist(), made[0].gains.tolist(), strict=True))
    above = [row for row in answer.explained if row.planned is not Tier.HOME]
    assert above
    for row in above:
        assert row.seconds[Tier.HOME] - row.seconds[row.planned] == pytest.approx(gain_of[row.key], rel=1e-6)
        assert row.home_rank == row.key % 4
        assert row.touches[0] <= row.touches[1]
        assert row.touches[2] == 0 if frozen else row.touches[1] <= row.touches[2] <= 1, "what is frozen is not synced"
    assert above[0].touches[0] == pytest.approx(micro_batches, rel=0.1)
    assert (answer.sync_latency_seconds == 0) == bool(frozen)
    node = next(threshold for threshold in answer.thresholds if threshold.tier is Tier.NODE)
    for row in answer.explained:
        if not 0.7 < row.accesses[0] / node.promote_accesses < 1.3:
            assert (row.accesses[0] > node.promote_accesses) == (row.planned is not Tier.HOME)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"table": "nothing"}, "no table 'nothing'"),
        ({"rows": [ROWS]}, "outside table 'items'"),
        ({"rows": [-1]}, "outside table 'items'"),
        ({"table": "shops"}, "was not looked up yet"),
    ],
)
def test_what_cannot_be_explained(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        explained(planned(300), **changes)
