"""Figures and sentences of a simulation: savings and costs are named as what they are."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.planner.model.prices import TrafficPhase
from flexd.simulate.accesses import Accesses
from flexd.simulate.byte_counter import PHASES
from flexd.simulate.simulation import (
    ORACLE,
    REPLANNED,
    STATIC,
    TWO_HOP,
    ReplayStrategy,
    Simulation,
    SimulationSettings,
    StrategyRun,
)
from flexd.simulate.summary import compared_steps, summarise
from flexd.topology.cluster import INTER
from flexd.topology.files import load_preset

LAYOUT = RankLayout(2, 1)
STEPS = 8


def run_of(strategy: ReplayStrategy, ids_bytes: int, exposed: float, rows: int = 5) -> StrategyRun:
    """A run in which only the last quarter counts: before it everything is a thousand times larger."""
    scale = np.where(np.arange(STEPS) < 6, 1000, 1)
    sent = np.zeros((STEPS, 2, PHASES, 2), dtype=np.int64)
    sent[:, 0, TrafficPhase.FORWARD_IDS, INTER] = ids_bytes * scale
    seconds = np.zeros((STEPS, PHASES))
    seconds[:, TrafficPhase.FORWARD_ROWS] = exposed * scale
    seconds[:, TrafficPhase.SYNC_ROWS] = 1.0
    share = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    return StrategyRun(strategy, sent, seconds, share, np.full(STEPS, rows), np.zeros(STEPS, np.int64), [4])


def simulated(replanned: tuple[int, float], static: tuple[int, float], rows: int = 5) -> Simulation:
    runs = {
        TWO_HOP.name: run_of(TWO_HOP, 1000, 1.0, 0),
        STATIC.name: run_of(STATIC, *static),
        REPLANNED.name: run_of(REPLANNED, *replanned, rows),
        ORACLE.name: run_of(ORACLE, 500, 0.5),
    }
    return Simulation(
        Accesses("made up", "drawn", KeySpace([TableSpec("t", 100, 4)]), STEPS, 1, lambda step: []), LAYOUT,
        load_preset("azure-a100-200g"), SimulationSettings(), runs, {}, 10.0,
    )  # fmt: skip


def test_savings_are_against_the_two_hop_chain_over_the_last_quarter() -> None:
    assert compared_steps(STEPS) == slice(6, 8)
    summary = summarise(simulated((600, 0.75), (900, 0.9))).model_dump()
    saved = summary["strategies"][REPLANNED.name]["saved"]
    assert saved["exposed_seconds"] == pytest.approx(0.25)
    assert saved["critical_inter_node_bytes"] == pytest.approx(400)
    assert summary["strategies"][TWO_HOP.name]["saved"] == {"exposed_seconds": 0.0, "critical_inter_node_bytes": 0.0}
    assert summary["strategies"][REPLANNED.name]["busiest_rank_share"] == 2.0
    assert summary["drift"]["exposed_over_oracle"] == pytest.approx(1.5)
    assert summary["drift"]["traffic_over_oracle"] == pytest.approx(1.2)
