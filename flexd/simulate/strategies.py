"""Strategies to compare: exchange, planner, and the accesses that the planner knows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flexd.planner.model.row_bytes import Exchange


class Knowledge(Enum):
    """Accesses that a strategy plans from."""

    NOTHING = "nothing"
    """It keeps every row at HOME."""
    FIRST_QUARTER = "first_quarter"
    """The exact counts of the first quarter of the run, once: a plan made offline."""
    STREAM = "stream"
    """The daemon's sketches of all steps so far, with decay, again and again."""
    NEXT_WINDOW = "next_window"
    """The exact counts of the steps up to the next plan, which no planner can know, and rows move at no cost."""


@dataclass(frozen=True)
class Strategy:
    """One strategy.

    Attributes:
        name: key in the results.
        title: for tables.
        merges_passes: each row's gradient is pushed once a step, not once a micro-batch.
    """

    name: str
    title: str
    exchange: Exchange
    knowledge: Knowledge = Knowledge.NOTHING
    merges_passes: bool = True


ROW_WISE = Strategy("row_wise", "row-wise", Exchange.DIRECT, merges_passes=False)
ROW_WISE_DEDUP = Strategy("row_wise_dedup", "row-wise, dedup", Exchange.DIRECT_DEDUP, merges_passes=False)
DIRECT = Strategy("direct", "flexd, direct with dedup", Exchange.DIRECT_DEDUP)
TWO_HOP = Strategy("two_hop", "two-hop chain", Exchange.CHAIN)
STATIC = Strategy("static", "flexd, planned once", Exchange.CHAIN, Knowledge.FIRST_QUARTER)
REPLANNED = Strategy("replanned", "flexd, re-planned", Exchange.CHAIN, Knowledge.STREAM)
ORACLE = Strategy("oracle", "oracle of the next window", Exchange.CHAIN, Knowledge.NEXT_WINDOW)

STRATEGIES = (ROW_WISE, ROW_WISE_DEDUP, TWO_HOP, STATIC, REPLANNED, ORACLE)
