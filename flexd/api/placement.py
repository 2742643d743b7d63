"""The placement of rows that every rank has agreed on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from flexd.api.base import Model, RowsByTier
from flexd.api.families import counter, gauge, gauges

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.core.keyspace import KeySpace
    from flexd.core.placement import Placement


class PlacementStatus(Model):
    """The placement that every rank has agreed on."""

    version: int = 0
    """Counts the applied chunks."""
    rows: RowsByTier = Field(default_factory=dict)
    """Rows in each tier."""
    moved_rows: int = 0
    """Rows at HOME that live in another node than that of their home rank."""
    digest: str = "0" * 16
    """Order-free digest of the hot rows, 16 hexadecimal digits."""
    digest_mismatches: int = 0
    """Reports whose placement digest was not the daemon's for that version, since the daemon started."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the placement."""
        yield gauge("flexd_placement_version", "Chunks applied by every rank.", self.version)
        yield gauges("flexd_placement_rows", "Rows in each tier.", "tier", by_metric_tier(self.rows))
        yield gauge(
            "flexd_placement_moved_rows",
            "Rows that live in another node than that of their home rank.",
            self.moved_rows,
        )
        yield counter(
            "flexd_placement_digest_mismatches",
            "Reports whose placement digest was not the daemon's.",
            self.digest_mismatches,
        )


def by_metric_tier(rows: RowsByTier) -> dict[str, int]:
    """Return the counts by the tier's label value, in the order of the tiers."""
    return {"home": rows.get("HOME", 0), "node": rows.get("NODE", 0), "device": rows.get("DEVICE", 0)}


def rows_above_home(placement: Placement) -> RowsByTier:
    """Return the number of rows in each replicated tier; all other rows are HOME."""
    from flexd.core.layout import Tier

    return {
        "NODE": int((placement.tiers == Tier.NODE).sum()),
        "DEVICE": int((placement.tiers == Tier.DEVICE).sum()),
    }


def placement_status(placement: Placement, keyspace: KeySpace, digest_mismatches: int) -> PlacementStatus:
    """Return the placement of the rows of all tables."""
    total_rows = keyspace.total_rows
    return PlacementStatus(
        version=placement.version,
        rows={**rows_above_home(placement), "HOME": total_rows - len(placement.copies)},
        moved_rows=len(placement.moved),
        digest=f"{placement.digest():016x}",
        digest_mismatches=digest_mismatches,
    )
