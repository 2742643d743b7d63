"""Re-planning under drift against an oracle and against one plan for ever, on recorded traces (``--trace``).

Every trace is replayed as ``flexd simulate`` does it, on 2 nodes x 2 ranks priced as a scale model of a common cluster:
latencies are divided by the bytes that a rank looks up in a production step over those of the replay.
Checks, over the last quarter of the run, migrations included:

- the re-planned placement's inter-node traffic and exposed time are within 5 % of the oracle's, which knows the next
  window and migrates for nothing;
- it saves at least 1.5 times what the plan saves that was made once, from the first quarter: of the exposed time, and
  of the inter-node bytes that a step waits for (all-to-all and migration), both against the two-hop chain without
  replicas. All inter-node bytes together cannot be saved against that chain: it is at the volume bound;
- nothing is below the bound of each step: the best placement for exactly this step, moved at no cost.

All of them fail if re-planning saves none of the two-hop chain's exposed time: an oracle is easily met without a plan.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from flexd.core.layout import RankLayout
from flexd.planner.model.row_bytes import Exchange
from flexd.simulate.accesses import RowFormat, TraceAccesses
from flexd.simulate.simulation import SimulationSettings, simulate
from flexd.simulate.strategies import REPLANNED
from flexd.simulate.summary import COMPARED_SHARE, compared_steps, summarise
from flexd.stream.sample_kinds import SampleKind, SampleLengths
from flexd.stream.trace import load_trace
from flexd.topology.files import load_preset
from flexd.topology.scale import PRODUCTION_RANK_BYTES, scale_model
from tools.bench.harness import Outcome, Skipped, check

PRESET = "azure-a100-200g"
DIM, HISTORY = 16, 32
ORACLE_LIMIT, STATIC_LIMIT = 1.05, 1.5


def measure(path: Path, steps: int, micro_batches: int) -> dict[str, Any]:
    layout = RankLayout(2, 2)
    accesses = TraceAccesses(
        path.stem, load_trace(path), layout, RowFormat(dim=DIM), batch_size=None, steps=steps, history=HISTORY,
        kind=SampleKind.SEQUENCES, lengths=SampleLengths.FIXED, micro_batches=micro_batches,
    )  # fmt: skip
    steps = accesses.steps
    settings = SimulationSettings(horizon_steps=steps, bound_steps=max(1, steps // COMPARED_SHARE))
    scale = max(1.0, PRODUCTION_RANK_BYTES / (accesses.batches.batch_size * micro_batches * (HISTORY + 1) * DIM * 4))
    simulation = simulate(accesses, layout, scale_model(load_preset(PRESET), scale), settings)
    summary = summarise(simulation)
    compared = compared_steps(steps)
    summary["least_over_bound"] = min(
        float((run.exposed_seconds[compared] / simulation.bound_seconds).min())
        for run in simulation.runs.values()
        if run.strategy.exchange is Exchange.CHAIN
    )
    summary["scale"] = scale
    return summary


def checks_of(trace: str, summary: dict[str, Any]) -> list[dict[str, Any]]:
    drift = summary["drift"]
    oracle, static = f"<= {ORACLE_LIMIT}", f">= {STATIC_LIMIT}"
    exposed = drift["exposed_saved_over_static"] or 0.0
    critical = drift["critical_bytes_saved_over_static"] or 0.0
    least = summary["least_over_bound"]
    saves = summary["strategies"][REPLANNED.name]["saved"]["exposed_seconds"] > 0
    traffic, seconds = drift["traffic_over_oracle"], drift["exposed_over_oracle"]
    return [
        check(f"{trace}: traffic over the oracle's", traffic, oracle, saves and traffic <= ORACLE_LIMIT),
        check(f"{trace}: exposed time over the oracle's", seconds, oracle, saves and seconds <= ORACLE_LIMIT),
        check(
            f"{trace}: exposed time saved over one plan's saving", exposed, static, saves and exposed >= STATIC_LIMIT
        ),
        check(
            f"{trace}: waited-for bytes saved over one plan's saving",
            critical,
            static,
            saves and critical >= STATIC_LIMIT,
        ),
        check(f"{trace}: least exposed time of a step over its bound", least, ">= 1", saves and least >= 1),
    ]


def section(options: Namespace) -> Outcome:
    if not options.trace:
        raise Skipped("needs --trace FILE.npz")
    figures, checks = {}, []
    for path in options.trace:
        figures[path.stem] = measure(path, 60 if options.quick else options.steps, options.micro_batches)
        checks += checks_of(path.stem, figures[path.stem])
    return Outcome(figures, checks)
