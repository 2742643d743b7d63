"""Loads made from a profile: every access and every row is counted once; micro-batches, frozen tables and the wire
dtype against drawn id sets."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.planner.model.prices import EXCHANGE_PHASES, SYNC_PHASES, Exchange, TrafficPhase
from flexd.planner.model.workload import (
    ANYWHERE,
    PER_NODE,
    PER_RANK,
    SYNCED,
    GroupLoad,
    TouchRelation,
    TrainingShape,
    bounded,
    make_loads,
    measured_touches,
    rescaled,
)
from flexd.planner.plan import placement_cost
from flexd.simulate.accesses import StepPasses, exact_profile
from flexd.simulate.byte_counter import StepByteCounter, sent_bytes
from flexd.sketch.profile import Profile
from flexd.topology.cluster import INTER, INTRA
from flexd.topology.files import load_preset
from tests.support.planner_cases import cluster, group_cost, load, profile, zipf

KEYSPACE = KeySpace([TableSpec("items", 5000, 16), TableSpec("users", 3000, 32, optimizer="rowwise_adagrad")])
LAYOUT = RankLayout(2, 2)
ACCESSES = 20_000.0


def unlisted_rows(seen: Profile, count: int) -> np.ndarray:
    return np.setdiff1d(np.arange(KEYSPACE.tables[0].rows), seen.tables[0].hot_rows)[:count]


def rows_and_accesses(load: GroupLoad) -> tuple[float, float]:
    """All rows of the load, and all their accesses per rank and step."""
    accesses = float(load.listed.accesses.sum() + load.bins.accesses @ load.bin_rows)
    return len(load.keys) + float(load.bin_rows.sum()), accesses


@pytest.mark.parametrize("with_bins", [True, False], ids=["in bins", "unexplained"])
def test_rows_listed_on_request_leave_the_bins(with_bins: bool) -> None:
    seen = profile(KEYSPACE, ACCESSES, hot=300)
    if not with_bins:
        blind = dataclasses.replace(seen.tables[0], bin_share=np.empty(0), bin_rows=np.empty(0))
        seen = dataclasses.replace(seen, tables=(blind, seen.tables[1]))
    pinned = unlisted_rows(seen, 1000)
    plain = make_loads(seen, KEYSPACE, LAYOUT)[0]
    listed = make_loads(seen, KEYSPACE, LAYOUT, also_list=KEYSPACE.keys(0, pinned))[0]
    assert len(listed.keys) == 1300
    assert np.isin(KEYSPACE.keys(0, pinned), listed.keys).all()
    assert rows_and_accesses(listed) == pytest.approx(rows_and_accesses(plain))
    assert rows_and_accesses(listed) == pytest.approx((5000, ACCESSES / LAYOUT.world_size))
    assert listed.tail_accesses == pytest.approx(plain.tail_accesses)
    added = listed.listed.accesses[np.isin(listed.keys, KEYSPACE.keys(0, pinned))]
    assert added == pytest.approx(np.full(1000, plain.tail_accesses))
    # At HOME the cost is the same, whether rows are listed one by one or in a bin.
    costs = [group_cost(each, np.zeros(len(each.keys), np.uint8), LAYOUT, cluster()) for each in (plain, listed)]
    np.testing.assert_allclose(costs[0].bytes, costs[1].bytes)
    assert costs[0].rows == pytest.approx(costs[1].rows)
    assert costs[0].rows[Tier.HOME] == pytest.approx(5000)


def test_loads_of_tables_alone_sum_to_the_loads_by_dim_group() -> None:
    keyspace = KeySpace([TableSpec("a", 500, 16), TableSpec("b", 300, 32), TableSpec("c", 400, 16)])
    seen = profile(keyspace, ACCESSES, hot=50)
    shape = TrainingShape(frozen_tables=frozenset({"c"}), micro_batches=3)
    groups = make_loads(seen, keyspace, LAYOUT, shape)
    tables = [
        make_loads(Profile(tables=(of_table,)), KeySpace([spec]), LAYOUT, shape.of_table(spec.name))[0]
        for spec, of_table in zip(keyspace.tables, seen.tables, strict=True)
    ]
    for group, mine in zip(groups, ([tables[0], tables[2]], [tables[1]]), strict=True):
        np.testing.assert_allclose(group.total, np.sum([load.total for load in mine], axis=0))
    assert tables[2].statistics[SYNCED].sum() == 0
    assert tables[0].statistics[SYNCED].sum() == 3 * 50, "a bit in each of three passes"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accesses_per_step": float("nan")}, "accesses per step are unknown"),
        ({"accesses_per_step": -1.0}, "accesses per step are unknown"),
        ({"table": "other"}, "other tables"),
        ({"hot_rows": [0, -1]}, "table 'items': .* outside 0 to 4999"),
        ({"hot_rows": [0, 5000]}, "table 'items': .* outside 0 to 4999"),
        *(
            ({name: [0.1, value]}, "table 'items': .* not finite")
            for name in ("hot_share", "bin_share", "bin_rows")
            for value in (float("nan"), -0.1, float("inf"))
        ),
        ({"hot_bounds": ([0.1, float("nan")], [0.1, 0.2])}, "table 'items': .* not finite"),
        ({"hot_bounds": ([0.1, 0.1], [0.1, float("inf")])}, "table 'items': .* not finite"),
    ],
)
def test_profiles_with_what_no_accesses_can_have_are_refused(change: dict, message: str) -> None:
    seen = profile(KEYSPACE, ACCESSES, hot=2)
    arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in change.items()}
    if "hot_bounds" in arrays:
        arrays["hot_bounds"] = tuple(np.array(bound) for bound in change["hot_bounds"])
    broken = dataclasses.replace(seen.tables[0], **arrays)
    with pytest.raises(PlanError, match=message):
        make_loads(dataclasses.replace(seen, tables=(broken, seen.tables[1])), KEYSPACE, LAYOUT)


def test_a_profile_without_accesses_is_refused_and_a_table_without_is_not() -> None:
    seen = profile(KEYSPACE, ACCESSES, hot=50)
    empty = tuple(dataclasses.replace(table, weight=0.0, accesses_per_step=float("nan")) for table in seen.tables)
    with pytest.raises(PlanError, match="empty"):
        make_loads(dataclasses.replace(seen, tables=empty), KEYSPACE, LAYOUT)
    items, users = make_loads(dataclasses.replace(seen, tables=(empty[0], seen.tables[1])), KEYSPACE, LAYOUT)
    assert rows_and_accesses(items) == (0.0, 0.0)
    assert rows_and_accesses(users)[1] == pytest.approx(ACCESSES / LAYOUT.world_size)


ROWS, STEPS = 400, 40
DRAWN_LAYOUT = RankLayout(3, 2)
KEYS = np.arange(ROWS)


@pytest.mark.parametrize(
    ("layout", "exchange", "micro_batches"),
    [
        (DRAWN_LAYOUT, Exchange.CHAIN, 1),
        (DRAWN_LAYOUT, Exchange.CHAIN, 4),
        (RankLayout(1, 4), Exchange.CHAIN, 1),
        (RankLayout(4, 1), Exchange.CHAIN, 1),
        (DRAWN_LAYOUT, Exchange.DIRECT_DEDUP, 1),
    ],
    ids=str,
)
def test_bytes_of_drawn_batches_are_predicted(layout: RankLayout, exchange: Exchange, micro_batches: int) -> None:
    rng, keyspace = np.random.default_rng(5), KeySpace([TableSpec("t", ROWS, 16)])
    accesses = rng.permutation(zipf(ROWS, 1.1, 300.0))
    tiers = np.where(KEYS % 5 == 0, Tier.NODE, np.where(KEYS % 7 == 0, Tier.DEVICE, Tier.HOME)).astype(np.uint8)
    tiers *= exchange is Exchange.CHAIN  # which alone has replicas
    placement, counter = Placement.of(KEYS, tiers, 0), StepByteCounter(keyspace, layout)
    sent = np.zeros((6, 2))
    for _ in range(STEPS):
        drawn = rng.poisson(accesses / micro_batches, (micro_batches, layout.world_size, ROWS))
        passes = StepPasses.of([[np.repeat(KEYS, of_rank) for of_rank in ranks] for ranks in drawn], layout)
        sent += sent_bytes(counter.step(passes, placement, exchange), layout.world_size).mean(axis=0)[:6] / STEPS
    cost = group_cost(load(accesses, micro_batches=micro_batches), tiers, layout, cluster(), exchange).bytes
    np.testing.assert_allclose(cost[:, TrafficPhase.FORWARD_IDS] / 8, cost[:, TrafficPhase.FORWARD_ROWS] / 64)
    back = [TrafficPhase.BACKWARD_ROWS, TrafficPhase.SYNC_ROWS]  # gradients of DEVICE rows are counted as of the sync
    for phases in ([TrafficPhase.FORWARD_ROWS], back, [TrafficPhase.SYNC_SUMS]):
        np.testing.assert_allclose(cost.sum(axis=0)[phases].sum(axis=0), sent[phases].sum(axis=0), rtol=0.04)


def test_frozen_rows_send_nothing_back() -> None:
    tiers = (KEYS % 3).astype(np.uint8)
    trained = (KEYS >= 200).astype(np.float64)
    both = group_cost(load(np.full(ROWS, 0.5), trained=trained), tiers, DRAWN_LAYOUT, cluster())
    all_of_it = group_cost(load(np.full(ROWS, 0.5)), tiers, DRAWN_LAYOUT, cluster())
    np.testing.assert_allclose(both.bytes[:, :2], all_of_it.bytes[:, :2])
    share = [np.bincount(part, minlength=3) for part in [tiers[:200], tiers[200:]]]
    expected = all_of_it.bytes[:, 2:] * (share[1] / (share[0] + share[1]))[:, None, None]
    np.testing.assert_allclose(both.bytes[:, 2:], expected)
    frozen = group_cost(load(np.full(ROWS, 0.5), trained=np.zeros(ROWS)), tiers, DRAWN_LAYOUT, cluster(latency=1.0))
    assert frozen.sync_seconds == frozen.backward_seconds == 0


def test_wire_dtype() -> None:
    keyspace = KeySpace([TableSpec("t", ROWS, 16)])
    seen = profile(keyspace, 500.0, hot=ROWS)
    tiers = (KEYS % 3).astype(np.uint8)
    full, half = (
        group_cost(make_loads(seen, keyspace, DRAWN_LAYOUT, shape)[0], tiers, DRAWN_LAYOUT, cluster())
        for shape in (TrainingShape(), TrainingShape(comm_dtype="bfloat16"))
    )
    for phase in (TrafficPhase.FORWARD_ROWS, TrafficPhase.BACKWARD_ROWS, TrafficPhase.SYNC_SUMS):
        np.testing.assert_allclose(half.bytes[:, phase, INTRA], full.bytes[:, phase, INTRA] / 2)
    np.testing.assert_allclose(half.bytes[:, TrafficPhase.FORWARD_ROWS], full.bytes[:, TrafficPhase.FORWARD_ROWS] / 2)
    # float32 gradients are all-reduced, 2 w; bfloat16 ones go to the home and come back: v + w of half the size.
    assert half.bytes[:, TrafficPhase.SYNC_ROWS].sum() == full.bytes[:, TrafficPhase.SYNC_SUMS, INTER].sum() == 0
    sums = half.bytes[1:, TrafficPhase.SYNC_SUMS, INTER]
    np.testing.assert_allclose(sums, full.bytes[1:, TrafficPhase.SYNC_ROWS, INTER] / 4)
    back = half.bytes[1:, TrafficPhase.BACKWARD_ROWS, INTER]
    assert ((back > 0) & (back < sums)).all()
    np.testing.assert_array_equal(half.bytes[:, TrafficPhase.FORWARD_IDS], full.bytes[:, TrafficPhase.FORWARD_IDS])


@pytest.mark.parametrize(
    "bad",
    [
        lambda: TrainingShape(micro_batches=0),
        lambda: TrainingShape(comm_dtype="float8"),
        lambda: make_loads(
            profile(KEYSPACE, 1.0, hot=1), KEYSPACE, LAYOUT, TrainingShape(frozen_tables=frozenset({"x"}))
        ),
    ],
)
def test_bad_shapes(bad) -> None:
    with pytest.raises(PlanError):
        bad()


TOUCH_LAYOUT = RankLayout(2, 3)
TOUCH_ROWS = 400
TOUCH_KEYS = KeySpace([TableSpec("t", TOUCH_ROWS, 128)])


def bursty_steps(steps: int = 30) -> list[list[np.ndarray]]:
    """Each step's ranks draw from the step's own few rows, several times each: far from independent."""
    rng = np.random.default_rng(3)
    popularity = np.arange(1, TOUCH_ROWS + 1) ** -0.8
    popularity /= popularity.sum()
    made = []
    for _ in range(steps):
        of_step = rng.choice(TOUCH_ROWS, 40, p=popularity)
        made.append([np.repeat(rng.choice(of_step, 25), 2) for _ in range(TOUCH_LAYOUT.world_size)])
    return made


def without_touches(profile: Profile) -> Profile:
    return replace(profile, tables=tuple(replace(table, touches=None) for table in profile.tables))


def load_of(profile: Profile, shape: TrainingShape | None = None) -> GroupLoad:
    return make_loads(profile, TOUCH_KEYS, TOUCH_LAYOUT, shape)[0]


def assert_possible(touches: np.ndarray) -> None:
    rank, node, anywhere = touches
    assert (rank >= 0).all()
    assert (anywhere <= 1).all()
    assert (rank <= node).all()
    assert (node <= anywhere).all()
    assert (node <= TOUCH_LAYOUT.local_ranks * rank * (1 + 1e-12)).all()
    assert (anywhere <= TOUCH_LAYOUT.nodes * node * (1 + 1e-12)).all()


@pytest.mark.parametrize("device", [0, 60])
@pytest.mark.parametrize("node", [0, 100])
def test_bytes_of_bursty_batches_are_predicted(device: int, node: int) -> None:
    steps = bursty_steps()
    profile = exact_profile(steps, TOUCH_KEYS, TOUCH_LAYOUT)
    hottest = profile.tables[0].hot_rows[: device + node]
    placement = Placement.of(hottest, np.repeat(np.array([2, 1], np.uint8), [device, node]), 0)
    counter = StepByteCounter(TOUCH_KEYS, TOUCH_LAYOUT)
    sent = sum(
        sent_bytes(counter.step(step, placement, Exchange.CHAIN), TOUCH_LAYOUT.world_size).mean(axis=0)
        for step in (StepPasses.of([keys], TOUCH_LAYOUT) for keys in steps)
    ) / len(steps)
    cluster = load_preset("azure-a100-200g")

    def over_measured(of: Profile, link: int) -> float:
        cost = placement_cost(make_loads(of, TOUCH_KEYS, TOUCH_LAYOUT), placement, TOUCH_KEYS, cluster)
        return (cost.all_to_all_bytes(link) + cost.sync_bytes(link)) / float(
            sent[[*EXCHANGE_PHASES, *SYNC_PHASES], link].sum()
        )

    for link in (INTRA, INTER):
        assert over_measured(profile, link) == pytest.approx(1, abs=0.03)
        assert over_measured(without_touches(profile), link) > 1.15


def test_unlisted_rows_follow_the_relation_of_the_listed_ones() -> None:
    (table,) = exact_profile(bursty_steps(200), TOUCH_KEYS, TOUCH_LAYOUT).tables
    known = np.arange(len(table.hot_rows)) % 2 == 0
    half = replace(table, touches=replace(table.touches, **{
        name: np.where(known, getattr(table.touches, name), np.nan) for name in ("per_rank", "per_node", "anywhere")
    }))  # fmt: skip
    true, fitted = (load_of(Profile((each,))).statistics for each in (table, half))
    for statistic in (PER_RANK, PER_NODE, ANYWHERE):
        assert fitted[statistic].sum() == pytest.approx(true[statistic].sum(), rel=0.02)
    tail = replace(
        half, hot_rows=table.hot_rows[:200], hot_share=table.hot_share[:200],
        bin_share=table.hot_share[200:],
        bin_rows=np.ones(len(table.hot_rows) - 200),
        touches=replace(table.touches, **{name: getattr(table.touches, name)[:200] for name in (
            "per_rank", "per_node", "anywhere")}),
    )  # fmt: skip
    load = load_of(Profile((tail,)))
    assert_possible(load.bins.touches)
    assert load._tail_statistics[PER_RANK] == pytest.approx(load.bins.touches[0].mean(), rel=1e-9)


def test_touches_stay_possible_whatever_is_measured() -> None:
    rng = np.random.default_rng(5)
    accesses = 10.0 ** rng.uniform(-6, 2, 500)
    measured = rng.random((3, 500))
    measured[rng.random((3, 500)) < 0.3] = np.nan
    relation = TouchRelation.fit(accesses, measured, TOUCH_LAYOUT)
    at = np.sort(10.0 ** rng.uniform(-8, 3, 500))
    for touches in (
        relation.completed(accesses, measured),
        relation.touches(at),
        rescaled(relation.completed(accesses, measured), accesses, 3 * accesses, TOUCH_LAYOUT),
        bounded(np.nan_to_num(measured), accesses, TOUCH_LAYOUT),
    ):
        assert_possible(touches)
        assert np.isfinite(touches).all()
    assert (relation.touches(accesses)[0] <= accesses).all()


def test_touches_of_batches_of_another_size_are_not_used():
    table = exact_profile(bursty_steps(), TOUCH_KEYS, TOUCH_LAYOUT).tables[0]
    table = replace(table, touches=replace(table.touches, accesses=50.0))
    taken = measured_touches(table, TOUCH_LAYOUT, 50.0)
    np.testing.assert_allclose(taken[0], table.touches.per_rank)
    assert (measured_touches(table, TOUCH_LAYOUT, 55.0) >= taken).all()
    assert measured_touches(table, TOUCH_LAYOUT, 100.0) is None
    assert measured_touches(table, TOUCH_LAYOUT, 25.0) is None
