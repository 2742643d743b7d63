"""What a baseline is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flexd.planner.cost import CostBreakdown, LoadSums
from flexd.topology.model import Cluster


class Baseline(Protocol):
    """One strategy. Implementations are stateless and deterministic."""

    @property
    def name(self) -> str:
        """Key in a plan's summary."""
        ...

    @property
    def source(self) -> str:
        """Who does it, or the paper and section."""
        ...

    def price(self, sums: Sequence[LoadSums], cluster: Cluster) -> CostBreakdown:
        """Cost of the best that this strategy does with the load, per rank and step."""
        ...
