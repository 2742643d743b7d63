"""Other ways to place and exchange rows, priced by the same cost model.

A plan shows the exchanges beside itself. ``peers`` lists all strategies; it needs scipy.
"""

from flexd.planner.baselines.exchanges import ROW_WISE, ROW_WISE_DEDUP, TWO_HOP, ExchangeBaseline
from flexd.planner.baselines.problem import BaselineResult, PlanningProblem
from flexd.planner.baselines.protocol import Baseline

PLAN_BASELINES: tuple[ExchangeBaseline, ...] = (ROW_WISE, ROW_WISE_DEDUP, TWO_HOP)
"""Every baseline a plan shows, in the order they are shown."""

__all__ = [
    "PLAN_BASELINES",
    "ROW_WISE",
    "ROW_WISE_DEDUP",
    "TWO_HOP",
    "Baseline",
    "BaselineResult",
    "ExchangeBaseline",
    "PlanningProblem",
]
