"""FlexShard's tiers: the best two thresholds in the order of accesses, within the slots of every rank."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.layout import RankLayout, Tier
from flexd.simulate.accesses import RowFormat, ZipfAccesses
from flexd.simulate.exact_profile import exact_profile
from flexd.simulate.flexshard_placement import _best_thresholds, _saved_seconds, flexshard_placement
from flexd.simulate.simulation import SimulationSettings
from flexd.topology.files import load_preset
from flexd.topology.scale import scale_model

LAYOUT = RankLayout(2, 2)
CLUSTER = scale_model(load_preset("azure-a100-200g"), 10_000)


def test_flexshards_thresholds_are_the_best_of_all() -> None:
    """Against every pair of thresholds, priced one by one."""
    rng = np.random.default_rng(0)
    accesses = np.sort(rng.pareto(1.0, 30))[::-1]
    saved = _saved_seconds(accesses, 64, LAYOUT, CLUSTER)
    for slots in (0, 1, 3, 7, 40):
        device, replicated = _best_thresholds(saved, LAYOUT, slots)
        best = max(
            saved[Tier.DEVICE, :d].sum() + saved[Tier.NODE, d:n].sum()
            for d in range(31)
            for n in range(d, 31)
            if 3 * d + (n - d) <= 4 * slots
        )
        got = saved[Tier.DEVICE, :device].sum() + saved[Tier.NODE, device:replicated].sum()
        assert got == pytest.approx(best)
    accesses = ZipfAccesses(
        LAYOUT, RowFormat(), table_rows=2_000, exponent=1.05, drift_rows=6.0, accesses_per_rank=3_000, steps=5, seed=1
    )
    profile = exact_profile([accesses.passes(step)[0] for step in range(5)], accesses.keyspace)
    slots = SimulationSettings().slots(accesses.keyspace, 0.04)
    placement = flexshard_placement(profile, accesses.keyspace, LAYOUT, CLUSTER, slots)
    assert len(placement)
    assert LAYOUT.replica_slots_used(placement.keys, placement.tiers).max() <= slots[0]
