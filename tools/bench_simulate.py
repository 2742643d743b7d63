"""Re-planning under drift against an oracle and against one plan for ever, on recorded traces.

    python tools/bench_simulate.py --trace online_retail.npz --trace orm_night.npz [--quick] [--over-time] [--json]

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

``--over-time`` also replays every batch that the trace has, in a row, at several intervals between plans, stated in
event time, and several seeds (each leaves out another random tenth of the users, or of the events where there are
none): the plan of the first quarter, plans at checkpoints, exact sliding windows, the daemon, the oracle, the bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_report import check, last_line

from flexd.core.layout import RankLayout
from flexd.planner.model.row_bytes import Exchange
from flexd.simulate.accesses import RowFormat, TraceAccesses
from flexd.simulate.simulation import SimulationSettings, simulate
from flexd.simulate.strategies import OVER_TIME, REPLANNED, STRATEGIES, Strategy
from flexd.simulate.summary import COMPARED_SHARE, compared_steps, summarise
from flexd.simulate.touches import touches_in_words
from flexd.stream.sample_kinds import SampleKind, SampleLengths
from flexd.stream.trace import Trace, load_trace
from flexd.topology.files import load_preset
from flexd.topology.scale import PRODUCTION_RANK_BYTES, scale_model

PRESET = "azure-a100-200g"
DIM, HISTORY = 16, 32
ORACLE_LIMIT, STATIC_LIMIT = 1.05, 1.5
INTERVAL_SHARES, SEEDS, LEFT_OUT = (0.01, 0.03, 0.1), (1, 2, 3), 0.1
"""Of ``--over-time``: intervals as shares of the run, and the part that each seed leaves out."""
CHECKPOINT_INTERVALS, WINDOW_INTERVALS = 8, 4
"""Intervals between plans in a checkpoint, and in the sliding window."""
SWEEP_INTERVALS, SWEEP_HALF_LIVES = (2, 5, 10, 20), (5.0, 10.0, 20.0, 50.0, float("inf"))


def measure(
    path: Path,
    arguments: argparse.Namespace,
    trace: Trace | None = None,
    strategies: tuple[Strategy, ...] = STRATEGIES,
    interval_share: float | None = None,
    **changes: Any,
) -> dict[str, Any]:
    layout = RankLayout(2, 2)

    def batches_of(batch_size: int | None, steps: int | None) -> TraceAccesses:
        return TraceAccesses(
            path.stem, trace or load_trace(path), layout, RowFormat(dim=DIM), batch_size=batch_size, steps=steps,
            history=HISTORY, kind=SampleKind(arguments.samples), lengths=SampleLengths(arguments.lengths),
            micro_batches=arguments.micro_batches,
        )  # fmt: skip

    accesses = batches_of(None, arguments.steps)
    if interval_share is not None:
        accesses = batches_of(accesses.batches.batch_size, None)  # none left out between two
    steps = accesses.steps
    settings = SimulationSettings(
        replica_fraction=arguments.replica_fraction, horizon_steps=steps, bound_steps=max(1, steps // COMPARED_SHARE),
        **changes,
    )  # fmt: skip
    if interval_share is not None:
        interval = max(1, round(interval_share * steps))
        settings = replace(
            settings, interval_steps=interval, half_life_steps=4.0 * interval,
            window_steps=WINDOW_INTERVALS * interval, checkpoint_steps=CHECKPOINT_INTERVALS * interval,
        )  # fmt: skip
    scale = max(
        1.0, PRODUCTION_RANK_BYTES / (accesses.batches.batch_size * arguments.micro_batches * (HISTORY + 1) * DIM * 4)
    )
    started = time.perf_counter()
    simulation = simulate(accesses, layout, scale_model(load_preset(PRESET), scale), settings, strategies)
    summary = summarise(simulation)
    compared = compared_steps(steps)
    summary["least_over_bound"] = min(
        float((run.exposed_seconds[compared] / simulation.bound_seconds).min())
        for run in simulation.runs.values()
        if run.strategy.exchange is Exchange.CHAIN
    )
    summary["interval_event_seconds"] = accesses.batches.span_seconds / steps * settings.interval_steps
    summary["scale"] = scale
    summary["wall_seconds"] = time.perf_counter() - started
    return summary


def checks(trace: str, summary: dict[str, Any]) -> list[dict[str, Any]]:
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


def show(summary: dict[str, Any]) -> None:
    print(f"\n{summary['accesses']}: {summary['steps']} steps, replayed in {summary['wall_seconds']:.0f} s")
    print(f"  {summary['samples']}")
    print(f"  {touches_in_words(summary['touches'], summary['nodes'], summary['local_ranks'])}")
    print(f"  latencies divided by {summary['scale']:,.0f}")
    for figures in summary["strategies"].values():
        inter = figures["bytes"]["inter_node"]
        print(
            f"  {figures['title']:26} exposed {figures['exposed_seconds'] * 1e6:8.3f} us   between nodes: waited for "
            f"{figures['critical_inter_node_bytes'] / 1e3:8.1f} kB, all {inter['total'] / 1e3:8.1f} kB, of which "
            f"migration {inter['migration'] / 1e3:6.2f} kB"
        )
    home, bound = summary["strategies"]["two_hop"]["exposed_seconds"], summary["bound"]["saved_exposed_seconds"]
    print(f"  the best placement of every single step would save {bound / home:.1%} of the chain's exposed time")
    for name, value in summary["drift"].items():
        print(f"  {name.replace('_', ' '):36} {'-' if value is None else f'{value:.3f}'}")
    for found in checks(summary["accesses"], summary):
        print(f"  {'ok  ' if found['ok'] else 'MISS'} {found['name']}: {found['value']:.3f} (target {found['target']})")


def leave_out(trace: Trace, seed: int) -> Trace:
    """Return the trace without a random tenth of its users, or of its events where it names none."""
    rng = np.random.default_rng(seed)
    if trace.user is None:
        kept = rng.random(len(trace)) >= LEFT_OUT
    else:
        users, user = np.unique(trace.user, return_inverse=True)
        kept = (rng.random(len(users)) >= LEFT_OUT)[user]
    return replace(
        trace, table=trace.table[kept], row=trace.row[kept], seconds=trace.seconds[kept],
        user=None if trace.user is None else trace.user[kept],
    )  # fmt: skip


def over_time(path: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Savings of exposed time as a share of the chain's, by interval: medians over the seeds, with their range."""
    found = []
    trace = load_trace(path)
    print(f"\n{path.stem}: exposed time saved, % of the chain's; median of {len(SEEDS)} seeds (least .. most)")
    for share in INTERVAL_SHARES:
        saved: dict[str, list[float]] = {}
        for seed in SEEDS:
            summary = measure(path, arguments, leave_out(trace, seed), OVER_TIME, share)
            home = summary["strategies"]["two_hop"]["exposed_seconds"]
            for name, figures in summary["strategies"].items():
                saved.setdefault(name, []).append(figures["saved"]["exposed_seconds"] / home)
            saved.setdefault("bound", []).append(summary["bound"]["saved_exposed_seconds"] / home)
        interval = summary["interval_event_seconds"]
        row = {"interval_event_seconds": interval, "steps": summary["steps"]}
        row |= {name: {"median": float(np.median(of)), "least": min(of), "most": max(of)} for name, of in saved.items()}
        found.append({"name": f"every {share:.0%}", **row})
        shown = "  ".join(
            f"{name.replace('_', ' ')} {np.median(of):.1%} ({min(of):.1%} .. {max(of):.1%})"
            for name, of in saved.items()
            if name != "two_hop"
        )
        print(f"  plans every {interval / 86_400:.2f} days of {summary['steps']} steps: {shown}", flush=True)
    return found


def sweep(path: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Interval and half-life; the row that is best on one trace need not be on another."""
    found = []
    print(
        f"\n{path.stem}: exposed time over the oracle's, and saved over one plan's, by interval and half-life in steps"
    )
    for interval in SWEEP_INTERVALS:
        for half_life in SWEEP_HALF_LIVES:
            drift = measure(path, arguments, interval_steps=interval, half_life_steps=half_life)["drift"]
            found.append({"interval_steps": interval, "half_life_steps": half_life, **drift})
            saved = drift["exposed_saved_over_static"]
            print(
                f"  every {interval:3}, half-life {half_life:4g}: {drift['exposed_over_oracle']:.4f}  "
                f"{'-' if saved is None else f'{saved:.3f}'}",
                flush=True,
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", required=True, metavar="FILE.npz")
    parser.add_argument("--quick", action="store_true", help="60 steps instead of 300: figures only, no checks")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--micro-batches", type=int, default=1, help="passes of a step; the step has as many samples")
    parser.add_argument("--samples", choices=[kind.value for kind in SampleKind], default=SampleKind.SEQUENCES.value)
    parser.add_argument("--lengths", choices=[kind.value for kind in SampleLengths], default=SampleLengths.FIXED.value)
    parser.add_argument("--replica-fraction", type=float, default=SimulationSettings.replica_fraction)
    parser.add_argument("--sweep", action="store_true", help="also sweep interval and half-life (minutes)")
    parser.add_argument("--over-time", action="store_true", help="also intervals in event time, three seeds (minutes)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = 60
    traces: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    for path in arguments.trace:
        summary = measure(path, arguments)
        show(summary)
        if arguments.sweep:
            summary["sweep"] = sweep(path, arguments)
        if arguments.over_time:
            summary["over_time"] = over_time(path, arguments)
        traces[path.stem] = summary
        found += [] if arguments.quick else checks(path.stem, summary)
    if arguments.json:
        print(last_line(traces, found))
    return 0 if all(entry["ok"] for entry in found) else 1


if __name__ == "__main__":
    sys.exit(main())
