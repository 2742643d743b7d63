"""The saved state as the newest start found and left it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from flexd.api.base import Model
from flexd.api.families import gauge, gauges, with_zeros

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.ingest import Ingestor

MAX_TABLES = 100


class RestoredTable(Model):
    """One table of the restored snapshot that is not as it was saved."""

    table: str
    """Name."""
    outcome: str
    """``emptied``, ``new`` or ``removed``."""
    accesses: int = 0
    """Accesses counted in the snapshot."""
    detail: str = ""
    """The change, or the reason why the table starts empty."""


class StateStatus(Model):
    """The saved state: what the newest start kept of it."""

    restored_from: str | None = None
    """The snapshot that this start continued from; null if there was none."""
    outcomes: dict[str, int] = Field(default_factory=dict)
    """Tables of that snapshot by outcome."""
    tables: tuple[RestoredTable, ...] = ()
    """The tables that are not as they were saved; at most 100."""
    lost_accesses: int = 0
    """Accesses of tables that were emptied or removed."""
    problems: tuple[str, ...] = ()
    """Why snapshots were not used by this start."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the saved state."""
        from flexd.sketch.table_restore import OUTCOMES

        yield gauges(
            "flexd_state_tables",
            "Tables of the snapshot that this start continued from, by outcome.",
            "outcome",
            with_zeros(OUTCOMES, self.outcomes),
        )
        yield gauge(
            "flexd_state_lost_accesses",
            "Counted accesses of the tables that this start emptied or removed.",
            self.lost_accesses,
        )


def state_status(ingestor: Ingestor) -> StateStatus:
    """Return what the ingest restored."""
    changed = [outcome for outcome in ingestor.outcomes if outcome.outcome != "kept"]
    # Those that lost counts first: the list is bounded.
    changed.sort(key=lambda outcome: -outcome.lost)
    return StateStatus(
        restored_from=None if ingestor.restored_from is None else ingestor.restored_from.name,
        outcomes=dict(Counter(outcome.outcome for outcome in ingestor.outcomes)),
        tables=tuple(RestoredTable.from_object(outcome) for outcome in changed[:MAX_TABLES]),
        lost_accesses=sum(outcome.lost for outcome in ingestor.outcomes),
        problems=ingestor.stats().restore_problems,
    )
