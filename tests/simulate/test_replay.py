"""Replays: what they show of drift, that they repeat, and what they refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flexd.core.errors import ConfigError, PlanError, SketchError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.simulate.accesses import MAX_STEP_ACCESSES, ProfileAccesses, RowFormat, TraceAccesses, ZipfAccesses
from flexd.simulate.counted import counted_profile
from flexd.simulate.published import flexshard_placement
from flexd.simulate.replay import Replay, ReplaySettings, replay
from flexd.simulate.seconds import Clock
from flexd.simulate.strategies import REPLANNED, STATIC, STRATEGIES, TWO_HOP
from flexd.simulate.summary import compared_steps, summarise
from flexd.simulate.traffic import INTER, INTRA, CollectiveBytes, Part
from flexd.sketch.profile_file import read_profile, write_profile
from flexd.stream.trace import synthetic_trace
from flexd.topology.cluster import Collective, Link
from flexd.topology.files import load_preset
from flexd.topology.scale import scale_model

LAYOUT = RankLayout(2, 2)
CLUSTER = scale_model(load_preset("azure-a100-200g"), 10_000)
STEPS = 40
SETTINGS = ReplaySettings(0.04, interval_steps=4, half_life_steps=6.0, horizon_steps=200.0, budgets=(0.0, 0.01))


def drifting(drift: float = 6.0, seed: int = 1) -> ZipfAccesses:
    return ZipfAccesses(
        LAYOUT, RowFormat(), table_rows=2_000, exponent=1.05, drift_rows=drift, accesses_per_rank=3_000, steps=STEPS,
        seed=seed,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Replay:
    return replay(drifting(), LAYOUT, CLUSTER, SETTINGS)


def test_under_drift_re_planning_beats_one_plan_and_trails_the_oracle(run: Replay) -> None:
    summary = summarise(run)
    json.dumps(summary, allow_nan=False)
    saved = {name: s["saved"] for name, s in summary["strategies"].items()}
    exposed = {name: figures["exposed_seconds"] for name, figures in saved.items()}
    assert exposed["oracle"] > exposed["replanned"] > max(0.0, 1.5 * exposed["static"])
    assert saved["replanned"]["critical_inter_node_bytes"] > saved["static"]["critical_inter_node_bytes"]
    assert summary["drift"]["exposed_saved_over_static"] is None or summary["drift"]["exposed_saved_over_static"] > 1.5
    assert summary["strategies"]["replanned"]["bytes"]["inter_node"]["migration"] > 0
    assert summary["strategies"]["oracle"]["bytes"]["inter_node"]["migration"] == 0
    assert any("Re-planning saves" in line for line in summary["words"])


def test_strategies_without_replicas_hold_none_and_their_order_is_that_of_their_bytes(run: Replay) -> None:
    inter = {name: course.job_bytes(tuple(Part), INTER).mean() for name, course in run.courses.items()}
    assert inter["row_wise"] > inter["row_wise_dedup"] > inter["two_hop"]
    assert inter["flexshard"] < inter["row_wise"]
    for name in ("row_wise", "row_wise_dedup", "two_hop"):
        assert not run.courses[name].replicated_rows.any()
        assert not run.courses[name].sent[:, :, [Part.SYNC_MASK, Part.SYNC_ROWS, Part.MIGRATION]].any()


def test_plans_come_late_as_through_the_channel(run: Replay) -> None:
    # Seen up to step t, planned in t + 1, applied at the start of t + 2.
    assert run.courses["static"].plan_steps == (STEPS // 4 + 1,)
    assert run.courses["replanned"].plan_steps[0] == SETTINGS.interval_steps + 1
    assert not run.courses["replanned"].replicated_rows[: SETTINGS.interval_steps + 1].any()
    assert run.courses["oracle"].replicated_rows[0] > 0


def test_budgets_are_kept_and_more_of_them_saves_more(run: Replay) -> None:
    nothing, little = run.sweep
    assert not nothing.replicated_rows.any()
    np.testing.assert_array_equal(nothing.sent, run.courses["two_hop"].sent)
    slots = SETTINGS.slots(run.keyspace, 0.01)[0]
    # A NODE row takes one slot in the other node, so four ranks hold at most four times their slots.
    assert 0 < little.replicated_rows.max() <= 4 * slots
    steps = compared_steps(STEPS)
    exposed = [c.exposed_seconds[steps].mean() for c in (nothing, little, run.courses["replanned"])]
    assert exposed[0] > exposed[1] > exposed[2]


def test_a_replay_repeats_itself_bit_by_bit(run: Replay) -> None:
    again = replay(drifting(), LAYOUT, CLUSTER, SETTINGS)
    assert summarise(again) == summarise(run)
    other = replay(drifting(seed=2), LAYOUT, CLUSTER, SETTINGS, strategies=[TWO_HOP])
    assert (other.courses["two_hop"].sent != run.courses["two_hop"].sent).any()


def test_without_drift_one_plan_is_enough() -> None:
    settings = ReplaySettings(0.08, interval_steps=5, half_life_steps=float("inf"), horizon_steps=200.0)
    still = replay(drifting(0.0), LAYOUT, CLUSTER, settings, strategies=[TWO_HOP, STATIC, REPLANNED])
    summary = summarise(still)
    assert summary["settings"]["half_life_steps"] is None
    static, replanned = (summary["strategies"][name]["exposed_seconds"] for name in ("static", "replanned"))
    assert replanned == pytest.approx(static, rel=0.02)


def test_large_latencies_replicate_nothing_and_the_words_say_why() -> None:
    run = replay(drifting(), LAYOUT, load_preset("azure-a100-200g"), ReplaySettings(0.08, horizon_steps=200.0))
    words = " ".join(summarise(run)["words"])
    assert "No row is replicated" in words
    assert "--scale" in words


def test_migrations_keep_to_the_cap_of_a_step() -> None:
    row = RowFormat().table("rows", 1)
    cap = 20 * (row.row_bytes + row.state_bytes)
    settings = ReplaySettings(
        0.08, interval_steps=10, half_life_steps=50.0, horizon_steps=200.0, chunk_rows=10, migration_bytes_per_step=cap
    )
    course = replay(drifting(), LAYOUT, CLUSTER, settings, strategies=[REPLANNED]).courses["replanned"]
    assert course.migrated_rows.any()
    # Demotions copy nothing: they come on top of at most 20 promoted rows.
    gained = np.diff(course.replicated_rows, prepend=0)
    assert gained.max() == 20


def test_traces_and_profiles_are_replayed_too(tmp_path) -> None:
    trace = synthetic_trace(20_000, rows=900, active=300, users=50)
    accesses = TraceAccesses("t", trace, LAYOUT, RowFormat(), batch_size=16, steps=8, history=8)
    assert sum(len(mine) for mine in accesses.keys(0)) == 4 * 16 * 9
    seen = replay(accesses, LAYOUT, CLUSTER, ReplaySettings(interval_steps=4), strategies=[REPLANNED]).last_profile
    assert seen is not None
    write_profile(seen, tmp_path / "p.npz")
    read = read_profile(tmp_path / "p.npz")
    np.testing.assert_array_equal(read.tables[0].hot_rows, seen.tables[0].hot_rows)
    np.testing.assert_array_equal(read.tables[0].hot_share, seen.tables[0].hot_share)
    assert read.samples == seen.samples
    tables = [RowFormat().table(table.table, table.rows) for table in read.tables]
    drawn = ProfileAccesses("p", read, tables, LAYOUT, accesses_per_rank=50_000, steps=4, seed=3)
    counts = np.bincount(np.concatenate(drawn.keys(1)), minlength=900)
    expected = np.zeros(900)
    expected[read.tables[0].hot_rows] = read.tables[0].hot_share * 200_000
    # Four standard deviations of a count, for all rows at once.
    assert (np.abs(counts - expected) <= 4.5 * np.sqrt(expected) + 4).all()
    assert all(np.array_equal(a, b) for a, b in zip(drawn.keys(1), drawn.keys(1), strict=True))
    assert not np.array_equal(drawn.keys(1)[0], drawn.keys(2)[0])
    assert not np.array_equal(drawn.keys(1)[0], drawn.keys(1)[1])


def test_rows_of_bins_are_drawn_outside_the_listed_ones() -> None:
    from flexd.sketch.profile import Profile, TableProfile

    share = np.array([0.25, 0.25])
    table = TableProfile(
        "t", 10, 1.0, 1.0, np.array([4, 0]), share, share, share, np.array([0.1, 0.05]), np.array([3.0, 2.0]), 7.0, 0.9
    )
    draws = ProfileAccesses(
        "p", Profile((table,)), [TableSpec("t", 10, 4)], RankLayout(1, 1), accesses_per_rank=100_000, steps=1, seed=0
    )
    counts = np.bincount(draws.keys(0)[0], minlength=10) / 100_000
    # Unlisted rows are 1, 2, 3, 5, 6, 7, 8, 9: three of bin one, two of bin two; a tenth is spread over all of them.
    expected = [0.25, 0.1125, 0.1125, 0.1125, 0.25, 0.0625, 0.0625, 0.0125, 0.0125, 0.0125]
    np.testing.assert_allclose(counts, expected, atol=0.006)


@pytest.mark.parametrize(
    "change",
    [
        {"replica_fraction": -0.1}, {"budgets": (2.0,)}, {"interval_steps": 0}, {"half_life_steps": 0.0},
        {"horizon_steps": float("nan")}, {"chunk_rows": 0},
    ],
)  # fmt: skip
def test_settings_that_no_run_can_have(change: dict) -> None:
    with pytest.raises(ConfigError):
        ReplaySettings(**change)


def test_what_cannot_be_replayed(tmp_path) -> None:
    with pytest.raises(ConfigError, match="look-ups a sample"):
        ZipfAccesses(
            LAYOUT, RowFormat(), table_rows=10, exponent=1.0, drift_rows=0.0, accesses_per_rank=MAX_STEP_ACCESSES,
            steps=4, seed=0,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="Zipf"):
        ZipfAccesses(
            LAYOUT, RowFormat(), table_rows=10, exponent=9.0, drift_rows=0.0, accesses_per_rank=4, steps=4, seed=0
        )
    with pytest.raises(PlanError, match="no accesses"):
        counted_profile([[np.empty(0, np.int64)]], KeySpace([TableSpec("t", 4, 4)]))
    with pytest.raises(SketchError, match="No such file"):
        read_profile(tmp_path / "nothing.npz")
    (tmp_path / "text.npz").write_text("no profile")
    with pytest.raises(SketchError):
        read_profile(tmp_path / "text.npz")


def test_a_collective_takes_as_long_as_its_busiest_rank_on_its_slower_link() -> None:
    cluster = load_preset("azure-a100-200g")
    clock = Clock(cluster)
    curve = {link: cluster.curve(link, Collective.ALL_TO_ALL) for link in Link}
    both = CollectiveBytes(
        Part.FORWARD, Collective.ALL_TO_ALL, INTER, np.array([[5, 7], [1, 2]]) * 10**6, np.array([6, 8]) * 10**6
    )
    slow = curve[Link.INTER_NODE]
    assert clock.seconds([both])[Part.FORWARD] == pytest.approx(slow.latency_seconds + 8e6 / slow.bandwidth(8e6))
    near = CollectiveBytes(Part.IDS, Collective.ALL_TO_ALL, INTRA, np.zeros((2, 2), int), np.zeros(2, int))
    seconds = clock.seconds([near, near, both])
    assert seconds[Part.IDS] == pytest.approx(2 * curve[Link.INTRA_NODE].latency_seconds)


def test_flexshards_cuts_are_the_best_of_all(run: Replay) -> None:
    """Against every pair of cuts, priced one by one."""
    from flexd.simulate import published

    rng = np.random.default_rng(0)
    accesses = np.sort(rng.pareto(1.0, 30))[::-1]
    saved = published._saved_seconds(accesses, 64, LAYOUT, CLUSTER)
    for slots in (0, 1, 3, 7, 40):
        device, replicated = published._best_cuts(saved, LAYOUT, slots)
        best = max(
            saved[Tier.DEVICE, :d].sum() + saved[Tier.NODE, d:n].sum()
            for d in range(31)
            for n in range(d, 31)
            if 3 * d + (n - d) <= 4 * slots
        )
        got = saved[Tier.DEVICE, :device].sum() + saved[Tier.NODE, device:replicated].sum()
        assert got == pytest.approx(best)
    profile = counted_profile([drifting().keys(step) for step in range(5)], run.keyspace)
    slots = SETTINGS.slots(run.keyspace, 0.04)
    placement = flexshard_placement(profile, run.keyspace, LAYOUT, CLUSTER, slots)
    assert len(placement)
    assert LAYOUT.replica_slots_used(placement.keys, placement.tiers).max() <= slots[0]


def test_every_strategy_has_its_own_name() -> None:
    assert len({strategy.name for strategy in STRATEGIES}) == len({s.title for s in STRATEGIES}) == len(STRATEGIES)
