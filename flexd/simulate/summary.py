"""Summarise a simulation: figures, JSON-able with units in the names, and sentences."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from flexd.planner.model.row_bytes import EXCHANGE_PHASES, SYNC_PHASES, TrafficPhase
from flexd.simulate.byte_counter import MIGRATION
from flexd.simulate.simulation import ORACLE, REPLANNED, ROW_WISE, STATIC, TWO_HOP, Simulation, StrategyRun
from flexd.topology.cluster import INTER, Link

COMPARED_SHARE = 4
"""Strategies are compared over the last of so many parts of the run."""
_KINDS = {"all_to_all": EXCHANGE_PHASES, "sync": SYNC_PHASES, "migration": (MIGRATION,)}
_PHASES = (*(phase.name.lower() for phase in TrafficPhase), "migration")


def compared_steps(steps: int) -> slice:
    """The last quarter."""
    return slice(steps - max(1, steps // COMPARED_SHARE), steps)


def summarise(simulation: Simulation) -> dict[str, Any]:
    """Means over the last quarter. Bytes are of the whole job a step, seconds of the busiest rank a step.

    ``critical`` bytes are what a step waits for before its forward pass or between steps: all-to-all and migration.
    Savings are against the two-hop chain with every row at HOME. None of them can be in all inter-node bytes: exact
    synchronous training has a volume bound that the two-hop chain reaches (docs/cost-model.md).
    """
    accesses, layout = simulation.accesses, simulation.layout
    steps = compared_steps(accesses.steps)
    strategies = {name: _figures(run, steps) for name, run in simulation.runs.items()}
    home = strategies.get(TWO_HOP.name)
    if home is not None:
        for figures in strategies.values():
            _add_savings(figures, home)
    settings = asdict(simulation.settings)
    settings["half_life_steps"] = (
        None if np.isinf(simulation.settings.half_life_steps) else simulation.settings.half_life_steps
    )
    summary: dict[str, Any] = {
        "accesses": accesses.name,
        "samples": accesses.made_of,
        "touches": simulation.touches,
        "tables": len(accesses.keyspace.tables),
        "rows": accesses.keyspace.total_rows,
        "nodes": layout.nodes,
        "local_ranks": layout.local_ranks,
        "cluster": simulation.cluster.name,
        "steps": accesses.steps,
        "compared_steps": [steps.start, steps.stop],
        "accesses_per_step": simulation.accesses_per_step,
        "settings": settings,
        "strategies": strategies,
    }
    summary["drift"] = _drift(strategies)
    summary["messages"] = _messages(summary)
    return summary


def _figures(run: StrategyRun, steps: slice) -> dict[str, Any]:
    seconds = run.seconds[steps].mean(axis=0)
    sent = {
        link.value: {kind: float(run.job_bytes(phases, at)[steps].mean()) for kind, phases in _KINDS.items()}
        for at, link in enumerate(Link)
    }
    for by_kind in sent.values():
        by_kind["total"] = sum(by_kind.values())
    by_rank = run.sent[steps, :, :, INTER].sum(axis=(0, 2))
    inter = sent["inter_node"]
    return {
        "name": run.strategy.name,
        "title": run.strategy.title,
        "exposed_seconds": float(run.exposed_seconds[steps].mean()),
        "seconds": dict(zip(_PHASES, seconds.tolist(), strict=True)),
        "bytes": sent,
        "critical_inter_node_bytes": inter["all_to_all"] + inter["migration"],
        "busiest_rank_share": float(by_rank.max() / by_rank.mean()) if by_rank.any() else 1.0,
        "replicated_rows": float(run.replicated_rows[steps].mean()),
        "plans": len(run.plan_steps),
        "migrated_rows": int(run.migrated_rows.sum()),
    }


def _add_savings(figures: dict[str, Any], home: dict[str, Any]) -> None:
    figures["saved"] = {
        "exposed_seconds": home["exposed_seconds"] - figures["exposed_seconds"],
        "critical_inter_node_bytes": home["critical_inter_node_bytes"] - figures["critical_inter_node_bytes"],
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _drift(strategies: dict[str, dict[str, Any]]) -> dict[str, float | None] | None:
    """Compare the re-planned placement with the oracle."""
    if not all(strategy.name in strategies for strategy in (TWO_HOP, STATIC, REPLANNED, ORACLE)):
        return None
    replanned, oracle = strategies[REPLANNED.name], strategies[ORACLE.name]
    totals = [found["bytes"]["inter_node"]["total"] for found in (replanned, oracle)]
    return {
        "traffic_over_oracle": _ratio(*totals),
        "exposed_over_oracle": _ratio(replanned["exposed_seconds"], oracle["exposed_seconds"]),
    }


def _messages(summary: dict[str, Any]) -> list[str]:
    strategies, drift = summary["strategies"], summary["drift"]
    first, last = summary["compared_steps"]
    messages = [
        f"Means over the last quarter, steps {first} to {last - 1}. Exposed is what a step waits for on the cluster "
        f"{summary['cluster']}, of the busiest rank in every collective, migrations included."
    ]
    if drift is None:
        return messages
    home, static, replanned = (strategies[s.name] for s in (TWO_HOP, STATIC, REPLANNED))
    if replanned["replicated_rows"] == 0:
        messages.append(
            "No row is replicated: at these message sizes, latencies and budgets no copy pays for its synchronisation. "
            "If the replayed steps are smaller than those of the job they stand for, say so with --scale."
        )
        return messages
    messages.append(
        f"Against the same chain without replicas, re-planning {_effects(replanned, home)}; "
        f"the plan made once {_effects(static, home)}."
    )
    if drift["traffic_over_oracle"] is not None and drift["exposed_over_oracle"] is not None:
        messages.append(
            "Against an oracle that knows the next window and migrates for nothing: "
            f"{drift['traffic_over_oracle']:.3f} times its inter-node traffic, "
            f"{drift['exposed_over_oracle']:.3f} times its exposed time."
        )
    messages.append(
        "Replicas do not save inter-node bytes in all: the two-hop chain is at the volume bound of exact synchronous "
        "training. They turn an all-to-all that the step waits for into an all-reduce at its end."
    )
    if ROW_WISE.name in strategies:
        inter = [strategies[s.name]["bytes"]["inter_node"]["total"] for s in (ROW_WISE, REPLANNED)]
        if inter[1] > 0:
            messages.append(
                f"Row-wise sharding without dedup sends {inter[0] / inter[1]:.1f} times as many bytes between nodes."
            )
    return messages


def _effects(strategy: dict[str, Any], home: dict[str, Any]) -> str:
    exposed, critical = (
        effect(strategy["saved"][key], home[key], what)
        for key, what in (
            ("exposed_seconds", "exposed time"),
            ("critical_inter_node_bytes", "inter-node bytes that a step waits for"),
        )
    )
    return f"{exposed} and {critical}"


def effect(saved: float, whole: float, what: str) -> str:
    """Return a saving in words: "saves 8.4 % of the ...", "costs 8.4 % more ..." or "leaves the ... unchanged"."""
    percent = 100 * saved / whole if whole > 0 else 0.0
    if abs(percent) < 0.05:
        return f"leaves the {what} unchanged"
    return f"saves {percent:.1f} % of the {what}" if percent > 0 else f"costs {-percent:.1f} % more {what}"
