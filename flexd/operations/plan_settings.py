"""Translate the configuration, and what the trainer says of itself, into the planner's types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flexd.config.planner import PlannerConfig
from flexd.control.protocol.trainer_settings import TrainerSettings
from flexd.core.keyspace import DTYPE_BYTES, TableSpec
from flexd.core.layout import Tier
from flexd.planner.baselines import ROW_WISE_DEDUP, TWO_HOP
from flexd.planner.model.row_bytes import Exchange
from flexd.planner.model.training_shape import REPLICA_SUMS, TrainingShape
from flexd.planner.plan import Plan
from flexd.planner.solver.limits import PlanLimits, RowPin

_UNPOOLED = "a table without pooling"
_EXCHANGES = {
    "chain": Exchange.CHAIN,
    "direct": Exchange.DIRECT_DEDUP,
    "direct_no_dedup": Exchange.DIRECT,
}


def settings_of_job(
    settings: PlannerConfig, trainer: TrainerSettings | None, tables: Sequence[TableSpec]
) -> PlannerConfig:
    """Return the settings with what the trainer says of itself, which counts more than the configuration.

    Args:
        trainer: None: nothing is known, and the configuration counts.
        tables: of the job, in order.
    """
    return settings if trainer is None else settings.model_copy(update=dict(_told(trainer, tables)))


def contradictions(
    settings: PlannerConfig, trainer: TrainerSettings | None, tables: Sequence[TableSpec]
) -> tuple[str, ...]:
    """Name the keys that are configured otherwise than the trainer says."""
    if trainer is None:
        return ()
    found = []
    for key, told in _told(trainer, tables).items():
        configured = getattr(settings, key)
        if key not in settings.model_fields_set:
            continue
        if key == "pooled_tables":
            found += [
                _contradiction(f"{key}.{table}", answer, told.get(table, _UNPOOLED))
                for table, answer in configured.items()
                if told.get(table) != answer
            ]
        elif configured != told:
            found.append(_contradiction(key, configured, told))
    return tuple(found)


def _contradiction(key: str, configured: object, told: str | None) -> str:
    said = {None: "the tables' own dtype", _UNPOOLED: _UNPOOLED}.get(told, repr(told))
    return f"planner.{key} is {configured!r}, and the trainer has {said}, which counts: remove the key"


def _told(trainer: TrainerSettings, tables: Sequence[TableSpec]) -> Mapping[str, Any]:
    """Return the keys of ``planner`` that the trainer tells, without values that this version does not know."""
    told: dict[str, Any] = {"pooled_tables": trainer.answer_by_table(tables)}
    if trainer.exchange in _EXCHANGES:
        told["exchange"] = trainer.exchange
    if trainer.comm_dtype is None or trainer.comm_dtype in DTYPE_BYTES:
        told["comm_dtype"] = trainer.comm_dtype
    if trainer.replica_sums in REPLICA_SUMS:
        told["replica_sums"] = trainer.replica_sums
    return told


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
