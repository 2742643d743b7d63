"""Home rule and answer of every table of a list for a flexd trainer, and the document that names them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flexd.core.layout import RankLayout
from flexd.planner.tables.chain_costs import chain_options
from flexd.planner.tables.options import Answer, HomeKind
from flexd.planner.tables.sharding import TableStatistics, listed_work, predicted, short_name
from flexd.planner.tables.solve import EVALUATIONS, TablePlacement, place_tables
from flexd.planner.tables.table_list import ListedTable
from flexd.topology.cluster import Cluster

FORMAT = 1
SHARDING_TYPES = {
    HomeKind.ALL: "row_wise",
    HomeKind.NODE: "table_row_wise",
    HomeKind.RANK: "table_wise",
    HomeKind.COPIES: "data_parallel",
}
"""What TorchRec calls a table that is held in this way."""


@dataclass(frozen=True)
class RulePlan:
    """Home rule and answer of every table.

    Attributes:
        tables: as listed.
        placement: of them, over ``chain_costs.OPTIONS``.
    """

    tables: tuple[ListedTable, ...]
    placement: TablePlacement

    @property
    def chosen(self) -> list[tuple[str, str | None]]:
        """(home rule, answer) by table; un-pooled tables have no answer, and copies are pooled where they are read."""
        return [
            (rule, None if table.bags == 0 else str(Answer.ROWS if answer is Answer.NONE else answer))
            for table, (rule, answer) in zip(self.tables, self.placement.rules(), strict=True)
        ]

    def document(self) -> dict[str, Any]:
        """Return what ``flexd.TableRules.read`` reads, JSON-able."""
        layout = self.placement.layout
        return {
            "format": FORMAT,
            "for": "flexd",
            "nodes": layout.nodes,
            "local_ranks": layout.local_ranks,
            "predicted": predicted(self.placement),
            "tables": [
                {
                    "name": short_name(table), "module": table.module, "rows": table.rows, "dim": table.dim,
                    "homes": rule, "answer": answer,
                }
                for table, (rule, answer) in zip(self.tables, self.chosen, strict=True)
            ],
        }  # fmt: skip


def plan_rules(
    tables: Sequence[ListedTable],
    layout: RankLayout,
    cluster: Cluster,
    memory_bytes: float,
    statistics: TableStatistics | None = None,
    evaluations: int = EVALUATIONS,
    without: Collection[str] = (),
) -> RulePlan:
    """Choose home rule and answer of every table for the shortest step of the busiest rank in flexd's exchange.

    Args:
        memory_bytes: of a rank, for rows and optimizer state.
        without: rules that no table may get, by the names of ``SHARDING_TYPES``.

    Raises:
        PlanError: no placement within the memory was found.
    """
    work = listed_work(tables, layout, statistics or TableStatistics())
    options = chain_options(work, layout, cluster.of_layout(layout.nodes, layout.local_ranks))
    banned = np.array([SHARDING_TYPES[option.rule] in without for option in options.options])
    options = replace(options, allowed=options.allowed & ~banned)
    return RulePlan(tuple(tables), place_tables(options, layout, memory_bytes, evaluations=evaluations))
