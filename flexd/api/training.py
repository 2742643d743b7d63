"""The training steps as the ranks report them, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from flexd.api.base import Model, RowsByTier
from flexd.api.families import counter, counters, counters_by, gauge, summary
from flexd.api.placement import by_metric_tier

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.operations.training_monitor import TrainingTotals


class TrainingStatus(Model):
    """Sums over all ranks since the daemon started."""

    accesses: RowsByTier = Field(default_factory=dict)
    """Look-ups by the tier of the row that served them."""
    sent_bytes: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Bytes measured by the senders, by kind of traffic (``all_to_all``, ``sync``, ``migration``) and link
    (``intra``, ``inter``)."""
    steps: int = 0
    """Steps of all ranks."""
    step_seconds: float = 0.0
    """Wall time of these steps."""
    apply_seconds: float = 0.0
    """Step time spent in applying chunks."""
    newest_step: int = 0
    """The newest step that any rank reported."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of training."""
        from flexd.operations.training_monitor import LINKS, TRAFFIC_KINDS

        yield counters(
            "flexd_training_accesses", "Lookups, by the tier of the row that served them.", "tier",
            by_metric_tier(self.accesses),
        )  # fmt: skip
        yield counters_by(
            "flexd_training_sent_bytes",
            "Bytes that the ranks measured where they send, by kind of traffic and link.",
            ("kind", "link"),
            {(kind, link): self.sent_bytes.get(kind, {}).get(link, 0) for kind in TRAFFIC_KINDS for link in LINKS},
        )
        yield summary(
            "flexd_training_step_duration_seconds", "Wall time of training steps, over all ranks.", self.steps,
            self.step_seconds,
        )  # fmt: skip
        yield counter(
            "flexd_training_apply_seconds", "Step time spent in applying chunks, over all ranks.", self.apply_seconds
        )
        yield gauge("flexd_training_step", "The newest step that any rank reported.", self.newest_step)


def training_status(totals: TrainingTotals) -> TrainingStatus:
    """Return the sums over all step reports."""
    from flexd.operations.training_monitor import LINKS, TRAFFIC_KINDS

    home, node, device = totals.accesses_by_tier
    return TrainingStatus.from_object(
        totals,
        accesses={"HOME": home, "NODE": node, "DEVICE": device},
        sent_bytes={kind: {link: totals.sent_bytes[kind, link] for link in LINKS} for kind in TRAFFIC_KINDS},
    )
