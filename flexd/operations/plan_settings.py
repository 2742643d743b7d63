"""Translate the configuration into the planner's types."""

from __future__ import annotations

import numpy as np

from flexd.config.planner import PlannerConfig
from flexd.core.layout import Tier
from flexd.planner.baselines import ROW_WISE_DEDUP, TWO_HOP
from flexd.planner.model.row_bytes import Exchange
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.plan import Plan
from flexd.planner.solver.limits import PlanLimits, RowPin

_EXCHANGES = {
    "chain": Exchange.CHAIN,
    "direct": Exchange.DIRECT_DEDUP,
    "direct_no_dedup": Exchange.DIRECT,
}


def running_exchange(settings: PlannerConfig) -> Exchange:
    """Return the exchange that the trainers run, from its configured name."""
    return _EXCHANGES[settings.exchange]


def cheaper_exchange(plan: Plan) -> str:
    """Return the configured name of the cheaper of the chain, with the plan's copies if it is for the chain, and the
    direct exchange with dedup."""
    chain, direct = plan.baselines[TWO_HOP.name], plan.baselines[ROW_WISE_DEDUP.name]
    if plan.exchange is Exchange.CHAIN:
        chain = plan.after
    elif plan.exchange is Exchange.DIRECT_DEDUP:
        direct = plan.after
    return "direct" if direct.exposed_seconds < chain.exposed_seconds else "chain"


def training_shape(settings: PlannerConfig) -> TrainingShape:
    """Return how the job trains. The collection pushes the gradients of all micro-batches of a step once."""
    return TrainingShape(
        micro_batches=settings.micro_batches,
        merged_backward=True,
        comm_dtype=settings.comm_dtype,
        replica_sums=settings.replica_sums,
        frozen_tables=frozenset(settings.frozen_tables),
    )


def plan_limits(settings: PlannerConfig) -> PlanLimits:
    """Return pins, excluded tables and table budgets. No row of a table that answers by sums is copied."""
    by_sums = {name for name, answer in settings.pooled_tables.items() if answer == "sums"}
    return PlanLimits(
        pins=tuple(
            RowPin(pin.table, Tier[pin.tier], None if pin.rows is None else np.array(pin.rows, dtype=np.int64))
            for pin in settings.pins
        ),
        exclude_tables=frozenset(settings.exclude_tables) | by_sums,
        table_slots=dict(settings.table_budgets),
    )
