"""Summarise a simulation: figures with units in the names, and sentences."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from flexd.core.model import DETAIL, HIDDEN, FiniteOrNone, Model, Show
from flexd.planner.model.prices import EXCHANGE_PHASES, SYNC_PHASES, TrafficPhase
from flexd.simulate.byte_counter import MIGRATION
from flexd.simulate.simulation import ORACLE, REPLANNED, ROW_WISE, STATIC, TWO_HOP, Simulation, StrategyRun
from flexd.topology.cluster import INTER, Link

COMPARED_SHARE = 4
"""Strategies are compared over the last of so many parts of the run."""
_KINDS = {"all_to_all": EXCHANGE_PHASES, "sync": SYNC_PHASES, "migration": (MIGRATION,)}
_PHASES = (*(phase.name.lower() for phase in TrafficPhase), "migration")


class ReplayModel(Model):
    """A replay: its answer, whose look-ups, how many in a step of the job, on which ranks, and the cluster that prices
    them."""

    messages: Annotated[tuple[str, ...], Show("answer")] = ()
    accesses: str
    accesses_per_step: float
    nodes: int
    local_ranks: int
    cluster: str


class StrategyFigures(Model):
    """Means of one strategy. Bytes are of the whole job a step, seconds of the busiest rank a step.

    Attributes:
        exposed_seconds: what a step waits for.
        saved: against the two-hop chain with every row at HOME.
        critical_inter_node_bytes: what a step waits for before its forward pass or between steps: all-to-all and
            migration.
        inter_node_bytes: all that is sent between nodes.
        bytes: by link and kind of traffic.
        seconds: by phase.
        busiest_rank_share: bytes of the busiest rank over the mean of all.
        migrated_rows: of the whole run.
    """

    name: Annotated[str, HIDDEN]
    title: Annotated[str, HIDDEN]
    exposed_seconds: float
    saved: Annotated[dict[str, float], HIDDEN]
    critical_inter_node_bytes: Annotated[float, Show("waited-for bytes")]
    inter_node_bytes: Annotated[float, Show("bytes between nodes")]
    replicated_rows: float
    plans: int
    busiest_rank_share: Annotated[float, Show("busiest rank", "{:.2f}".format)]
    bytes: Annotated[dict[str, dict[str, float]], HIDDEN]
    seconds: Annotated[dict[str, float], HIDDEN]
    migrated_rows: Annotated[int, DETAIL]


class SimulationSummary(ReplayModel):
    """Means over the last quarter of a replay, ``compared_steps``.

    No saving can be in all inter-node bytes: exact synchronous training has a volume bound that the two-hop chain
    reaches (docs/cost-model.md).

    Attributes:
        samples: how the batches are made, in words.
        touches: distinct rows of a rank, its node and the job in a step.
        drift: the re-planned placement over that of the oracle.
    """

    samples: str
    touches: Annotated[dict[str, float | None], Show(unit="{:,.4g}".format)]
    tables: int
    rows: int
    steps: int
    compared_steps: tuple[int, int]
    settings: dict[str, int | FiniteOrNone]
    strategies: dict[str, StrategyFigures]
    drift: dict[str, float | None] | None


def compared_steps(steps: int) -> slice:
    """The last quarter."""
    return slice(steps - max(1, steps // COMPARED_SHARE), steps)


def summarise(simulation: Simulation) -> SimulationSummary:
    """Return the means of all strategies, and what they say."""
    accesses, steps = simulation.accesses, compared_steps(simulation.accesses.steps)
    home = simulation.runs.get(TWO_HOP.name)
    at_home = None if home is None else _figures(home, steps)
    strategies = {name: _figures(run, steps, at_home) for name, run in simulation.runs.items()}
    summary = SimulationSummary(
        **replay_fields(simulation),
        samples=accesses.made_of,
        touches=simulation.touches,
        tables=len(accesses.keyspace.tables),
        rows=accesses.keyspace.total_rows,
        steps=accesses.steps,
        compared_steps=(steps.start, steps.stop),
        settings=asdict(simulation.settings),
        strategies=strategies,
        drift=_drift(strategies),
    )
    return summary.model_copy(update={"messages": tuple(_messages(summary))})


def replay_fields(simulation: Simulation) -> dict[str, Any]:
    """Return the fields of ``ReplayModel``."""
    return {
        "accesses": simulation.accesses.name, "accesses_per_step": simulation.accesses_per_step,
        "nodes": simulation.layout.nodes, "local_ranks": simulation.layout.local_ranks,
        "cluster": simulation.cluster.name,
    }  # fmt: skip


def _figures(run: StrategyRun, steps: slice, home: StrategyFigures | None = None) -> StrategyFigures:
    seconds = run.seconds[steps].mean(axis=0)
    sent = {
        link.value: {kind: float(run.job_bytes(phases, at)[steps].mean()) for kind, phases in _KINDS.items()}
        for at, link in enumerate(Link)
    }
    for by_kind in sent.values():
        by_kind["total"] = sum(by_kind.values())
    by_rank = run.sent[steps, :, :, INTER].sum(axis=(0, 2))
    inter = sent["inter_node"]
    waited = {
        "exposed_seconds": float(run.exposed_seconds[steps].mean()),
        "critical_inter_node_bytes": inter["all_to_all"] + inter["migration"],
    }
    return StrategyFigures(
        **waited,
        name=run.strategy.name,
        title=run.strategy.title,
        saved={} if home is None else {name: getattr(home, name) - value for name, value in waited.items()},
        inter_node_bytes=inter["total"],
        seconds=dict(zip(_PHASES, seconds.tolist(), strict=True)),
        bytes=sent,
        busiest_rank_share=float(by_rank.max() / by_rank.mean()) if by_rank.any() else 1.0,
        replicated_rows=float(run.replicated_rows[steps].mean()),
        plans=len(run.plan_steps),
        migrated_rows=int(run.migrated_rows.sum()),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _drift(strategies: Mapping[str, StrategyFigures]) -> dict[str, float | None] | None:
    """Compare the re-planned placement with the oracle."""
    if not all(strategy.name in strategies for strategy in (TWO_HOP, STATIC, REPLANNED, ORACLE)):
        return None
    replanned, oracle = strategies[REPLANNED.name], strategies[ORACLE.name]
    return {
        "traffic_over_oracle": _ratio(replanned.inter_node_bytes, oracle.inter_node_bytes),
        "exposed_over_oracle": _ratio(replanned.exposed_seconds, oracle.exposed_seconds),
    }


def _messages(summary: SimulationSummary) -> list[str]:
    strategies, drift = summary.strategies, summary.drift
    first, last = summary.compared_steps
    messages = [
        f"Means over the last quarter, steps {first} to {last - 1}. Exposed is what a step waits for on the cluster "
        f"{summary.cluster}, of the busiest rank in every collective, migrations included."
    ]
    if drift is None:
        return messages
    home, static, replanned = (strategies[s.name] for s in (TWO_HOP, STATIC, REPLANNED))
    if replanned.replicated_rows == 0:
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
        inter = [strategies[s.name].inter_node_bytes for s in (ROW_WISE, REPLANNED)]
        if inter[1] > 0:
            messages.append(
                f"Row-wise sharding without dedup sends {inter[0] / inter[1]:.1f} times as many bytes between nodes."
            )
    return messages


def _effects(strategy: StrategyFigures, home: StrategyFigures) -> str:
    exposed, critical = (
        effect(strategy.saved[key], getattr(home, key), what)
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
