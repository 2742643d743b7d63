"""From the planner's explanation to the API's."""

from __future__ import annotations

from collections.abc import Sequence

from flexd.api.base import TierName
from flexd.api.explanation import Explanation, RowReport, ThresholdReport
from flexd.api.planning import gate_report
from flexd.core.layout import Tier
from flexd.operations.gates import Gate
from flexd.planner.explanation import RowExplanation, TableExplanation

_NAMES: dict[Tier, TierName] = {Tier.HOME: "HOME", Tier.NODE: "NODE", Tier.DEVICE: "DEVICE"}


def explanation(made: TableExplanation, measured: Sequence[Gate]) -> Explanation:
    """The planner's explanation as the API tells it.

    Args:
        measured: the gates, on the profile that it was made from.
    """
    return Explanation(
        table=made.table,
        rows=made.rows,
        accesses_per_step=made.accesses_per_step,
        distinct_rows=made.distinct_rows,
        coverage=made.coverage,
        live_rows={name: int(made.live_rows[tier]) for tier, name in _NAMES.items()},
        planned_rows={name: int(made.planned_rows[tier]) for tier, name in _NAMES.items()},
        slots_used=made.slots_used,
        slots=made.slots,
        sync_latency_seconds=made.sync_latency_seconds,
        thresholds=tuple(
            ThresholdReport(
                tier=_NAMES[threshold.tier],
                slots=threshold.slots,
                slot_seconds=threshold.slot_seconds,
                promote_accesses=threshold.promote_accesses,
                demote_accesses=threshold.demote_accesses,
            )
            for threshold in made.thresholds
        ),
        explained=tuple(_row(row) for row in made.explained),
        gates=tuple(gate_report(gate) for gate in measured),
    )


def _row(row: RowExplanation) -> RowReport:
    share = row.source_node_share
    return RowReport(
        row=row.row,
        key=row.key,
        listed=row.listed,
        place=row.place,
        accesses_per_step=row.accesses_per_step,
        accesses_lower=row.accesses_lower,
        accesses_upper=row.accesses_upper,
        per_rank=row.per_rank,
        per_node=row.per_node,
        anywhere=row.anywhere,
        seconds={name: float(row.seconds[tier]) for tier, name in _NAMES.items()},
        live=_NAMES[row.live],
        planned=_NAMES[row.planned],
        why=row.why.value,
        home_rank=row.home_rank,
        source_node_share=None if share is None else tuple(float(node) for node in share),
    )
