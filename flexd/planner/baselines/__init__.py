"""Other ways to place and exchange rows, priced by the same cost model so that a plan can show them beside itself."""

from flexd.planner.baselines.exchanges import ROW_WISE, ROW_WISE_DEDUP, TWO_HOP
from flexd.planner.baselines.protocol import Baseline

BASELINES: tuple[Baseline, ...] = (ROW_WISE, ROW_WISE_DEDUP, TWO_HOP)
"""Every baseline a plan shows, in the order they are shown."""

__all__ = ["BASELINES", "ROW_WISE", "ROW_WISE_DEDUP", "TWO_HOP", "Baseline"]
