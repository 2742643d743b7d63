"""Micro-batches, frozen tables and the wire dtype, against drawn id sets."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.cost import CostBreakdown
from flexd.planner.model.row_bytes import ID_BYTES, Phase, TrafficLink
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import GroupLoad, make_loads
from tests.support.planner_cases import cluster, group_cost, load, profile, zipf

ROWS, ROW_BYTES, STEPS = 400, 64, 40
LAYOUT = RankLayout(3, 2)
N, L, W = 3, 2, 6
KEYS = np.arange(ROWS)
HOME, OWNER = LAYOUT.home_rank(KEYS), KEYS % L


def shaped(accesses: np.ndarray, **changes: object) -> GroupLoad:
    return dataclasses.replace(load(accesses, row_bytes=ROW_BYTES), **changes)  # type: ignore[arg-type]


def count(
    tiers: np.ndarray, accesses: np.ndarray, micro_batches: int, merged: bool, seed: int
) -> dict[str, np.ndarray]:
    """Rows sent by each rank, by (phase, link), from real id sets; mean over steps."""
    rng = np.random.default_rng(seed)
    names = ("ids_intra", "ids_inter", "rows_intra", "rows_inter", "back_intra", "back_inter", "sync")
    sent = {name: np.zeros(W) for name in names}
    for _ in range(STEPS):
        draws = rng.poisson(accesses / micro_batches, (micro_batches, N, L, ROWS)) > 0
        passes = [draws[k] for k in range(micro_batches)]
        for forward, wanted in [(True, one) for one in passes] + [
            (False, one) for one in ([draws.any(axis=0)] if merged else passes)
        ]:
            for rank in range(W):
                node, local = divmod(rank, L)
                go = wanted[node, local] & (tiers != Tier.DEVICE) & (local != OWNER)
                owners = node * L + OWNER[go]
                if forward:
                    sent["ids_intra"][rank] += go.sum()
                    sent["rows_intra"] += np.bincount(owners, minlength=W)
                else:
                    sent["back_intra"][rank] += go.sum()
                up = wanted[node].any(axis=0) & (tiers == Tier.HOME) & (local == OWNER) & (node != HOME // L)
                if forward:
                    sent["ids_inter"][rank] += up.sum()
                    sent["rows_inter"] += np.bincount(HOME[up], minlength=W)
                else:
                    sent["back_inter"][rank] += up.sum()
        touched = draws.any(axis=(0, 1, 2)) & (tiers == Tier.NODE)
        sent["sync"] += 2 * (N - 1) / N * np.bincount(OWNER[touched], minlength=L)[np.arange(W) % L]
    return {name: rows / STEPS for name, rows in sent.items()}


def mean_of(cost: CostBreakdown, phase: Phase, where: TrafficLink) -> float:
    return float(cost.bytes[:, phase, where].sum())


@pytest.mark.parametrize(("micro_batches", "merged"), [(1, False), (4, False), (4, True)])
def test_micro_batches(micro_batches: int, merged: bool) -> None:
    accesses = np.random.default_rng(1).permutation(zipf(ROWS, 1.1, 300.0))
    tiers = np.where(KEYS % 5 == 0, Tier.NODE, np.where(KEYS % 7 == 0, Tier.DEVICE, Tier.HOME)).astype(np.uint8)
    sent = count(tiers, accesses, micro_batches, merged, 5)
    cost = group_cost(shaped(accesses, micro_batches=micro_batches, merged_backward=merged), tiers, LAYOUT, cluster())
    inter, intra = TrafficLink.INTER_NODE, TrafficLink.INTRA_NODE
    for phase, where, name, size in (
        (Phase.FORWARD_IDS, intra, "ids_intra", ID_BYTES), (Phase.FORWARD_IDS, inter, "ids_inter", ID_BYTES),
        (Phase.FORWARD_ROWS, intra, "rows_intra", ROW_BYTES), (Phase.FORWARD_ROWS, inter, "rows_inter", ROW_BYTES),
        (Phase.BACKWARD_ROWS, intra, "back_intra", ROW_BYTES), (Phase.BACKWARD_ROWS, inter, "back_inter", ROW_BYTES),
        (Phase.SYNC_ROWS, inter, "sync", ROW_BYTES),
    ):  # fmt: skip
        # What is counted of replicas is NODE rows.
        device = phase in (Phase.BACKWARD_ROWS, Phase.SYNC_ROWS)
        expected = mean_of(cost, phase, where) - (float(cost.bytes[Tier.DEVICE, phase, where]) if device else 0.0)
        assert expected == pytest.approx(sent[name].mean() * size, rel=0.04), name


def test_frozen_rows_send_nothing_back() -> None:
    tiers = (KEYS % 3).astype(np.uint8)
    trained = (KEYS >= 200).astype(np.float64)
    both = group_cost(shaped(np.full(ROWS, 0.5), trained=trained), tiers, LAYOUT, cluster())
    all_of_it = group_cost(shaped(np.full(ROWS, 0.5)), tiers, LAYOUT, cluster())
    np.testing.assert_allclose(both.bytes[:, :2], all_of_it.bytes[:, :2])
    half = [tiers[:200], tiers[200:]]
    share = [np.bincount(part, minlength=3) for part in half]
    expected = all_of_it.bytes[:, 2:] * (share[1] / (share[0] + share[1]))[:, None, None]
    np.testing.assert_allclose(both.bytes[:, 2:], expected)
    frozen = group_cost(shaped(np.full(ROWS, 0.5), trained=np.zeros(ROWS)), tiers, LAYOUT, cluster(latency=1.0))
    assert frozen.sync_seconds == frozen.backward_seconds == 0


def test_wire_dtype() -> None:
    keyspace = KeySpace([TableSpec("t", ROWS, 16)])
    seen = profile(keyspace, 500.0, hot=ROWS)
    tiers = (KEYS % 3).astype(np.uint8)
    full, half = (
        group_cost(make_loads(seen, keyspace, LAYOUT, shape)[0], tiers, LAYOUT, cluster())
        for shape in (TrainingShape(), TrainingShape(comm_dtype="bfloat16"))
    )
    for phase in (Phase.FORWARD_ROWS, Phase.BACKWARD_ROWS, Phase.SYNC_SUMS):
        np.testing.assert_allclose(
            half.bytes[:, phase, TrafficLink.INTRA_NODE], full.bytes[:, phase, TrafficLink.INTRA_NODE] / 2
        )
    np.testing.assert_allclose(half.bytes[:, Phase.FORWARD_ROWS, 1:], full.bytes[:, Phase.FORWARD_ROWS, 1:] / 2)
    # float32 gradients are all-reduced, 2 w; bfloat16 ones go to the home and come back: v + w of half the size.
    assert half.bytes[:, Phase.SYNC_ROWS].sum() == full.bytes[:, Phase.SYNC_SUMS, TrafficLink.INTER_NODE].sum() == 0
    sums = half.bytes[1:, Phase.SYNC_SUMS, TrafficLink.INTER_NODE]
    np.testing.assert_allclose(sums, full.bytes[1:, Phase.SYNC_ROWS, TrafficLink.INTER_NODE] / 4)
    back = half.bytes[1:, Phase.BACKWARD_ROWS, TrafficLink.INTER_NODE]
    assert ((back > 0) & (back < sums)).all()
    np.testing.assert_array_equal(half.bytes[:, Phase.FORWARD_IDS], full.bytes[:, Phase.FORWARD_IDS])


@pytest.mark.parametrize(
    "bad",
    [
        lambda: TrainingShape(micro_batches=0),
        lambda: TrainingShape(comm_dtype="float8"),
        lambda: TrainingShape(frozen_tables=frozenset({"x"})).check_names(KeySpace([TableSpec("t", 1, 1)])),
    ],
)
def test_bad_shapes(bad) -> None:
    with pytest.raises(PlanError):
        bad()
