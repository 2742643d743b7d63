"""Translate the configuration, and what the trainer says of itself, into the planner's types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexd.config.planner import PlannerConfig
from flexd.control.protocol.trainer_settings import TrainerSettings
from flexd.core.keyspace import DTYPE_BYTES, TableSpec
from flexd.core.layout import Tier
from flexd.planner.baselines import ROW_WISE_DEDUP, TWO_HOP
from flexd.planner.model.row_bytes import Exchange
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.plan import Plan
from flexd.planner.solver.limits import PlanLimits, RowPin

_EXCHANGES = {"chain": Exchange.CHAIN, "direct": Exchange.DIRECT_DEDUP}


@dataclass(frozen=True)
class TrainingJob:
    """How the ranks train, as they say when they register.

    Attributes:
        exchange, comm_dtype: of their collections.
        answers: "rows" or "sums" by name of each pooled table.
        passes: forward passes for each step of the optimizer, as the ranks report them. Their gradients are pushed
            once.
    """

    exchange: Exchange = Exchange.CHAIN
    comm_dtype: str | None = None
    answers: Mapping[str, str] = field(default_factory=dict)
    passes: int = 1

    @classmethod
    def of(cls, trainer: TrainerSettings | None, tables: Sequence[TableSpec], passes: int = 1) -> TrainingJob:
        """Return what the trainer says of itself, and the defaults for values that this version does not know.

        Args:
            tables: of the job, in order.
        """
        if trainer is None:
            return cls(passes=passes)
        return cls(
            _EXCHANGES.get(trainer.exchange, cls.exchange),
            trainer.comm_dtype if trainer.comm_dtype in DTYPE_BYTES else None,
            trainer.answer_by_table(tables),
            passes,
        )

    @property
    def shape(self) -> TrainingShape:
        return TrainingShape(micro_batches=self.passes, merged_backward=True, comm_dtype=self.comm_dtype)

    @property
    def by_sums(self) -> frozenset[str]:
        """Tables that answer by sums; none of their rows is copied or moves."""
        return frozenset(name for name, answer in self.answers.items() if answer == "sums")


def cheaper_exchange(plan: Plan) -> str:
    """Return the configured name of the cheaper of the chain, with the plan's copies if it is for the chain, and the
    direct exchange with dedup."""
    chain, direct = plan.baselines[TWO_HOP.name], plan.baselines[ROW_WISE_DEDUP.name]
    if plan.exchange is Exchange.CHAIN:
        chain = plan.after
    elif plan.exchange is Exchange.DIRECT_DEDUP:
        direct = plan.after
    return "direct" if direct.exposed_seconds < chain.exposed_seconds else "chain"


def plan_limits(settings: PlannerConfig, job: TrainingJob) -> PlanLimits:
    """Return pins, excluded tables and table budgets. No row of a table that answers by sums is copied."""
    return PlanLimits(
        pins=tuple(
            RowPin(pin.table, Tier[pin.tier], None if pin.rows is None else np.array(pin.rows, dtype=np.int64))
            for pin in settings.pins
        ),
        exclude_tables=job.by_sums.union(settings.exclude_tables),
        table_slots=dict(settings.table_budgets),
    )
