"""The links whose prices plans are made at, and what training steps have shown of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flexd.api.base import FiniteOrNone, Model
from flexd.api.families import gauges, gauges_by

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.operations.live_prices import LivePrices


class LinkPrices(Model):
    """One link. Errors are held-out: every report is predicted before it is learnt from; newer reports weigh more."""

    link: str
    """``intra_node`` or ``inter_node``."""
    reports: int = 0
    """Times that enough steps of all ranks were learnt from."""
    factor: float = 1.0
    """Factor of the probed seconds at which plans are priced; 1 unless it predicts better."""
    probed_error: FiniteOrNone = None
    """Held-out error of the prices as probed, as a share of the measured time."""
    corrected_error: FiniteOrNone = None
    """Held-out error with the factor that reports show."""
    reason: str = ""
    """Why they are corrected or not, in words."""


class PricesStatus(Model):
    """The prices of plans."""

    links: tuple[LinkPrices, ...] = ()
    """The links that steps of the live ranks have shown."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of corrected prices."""
        yield gauges(
            "flexd_price_factor", "Factor of the probed seconds of a link at which plans are priced.", "link",
            {link.link: link.factor for link in self.links},
        )  # fmt: skip
        yield gauges_by(
            "flexd_price_error",
            "Held-out error as a share of the measured time, of a link's prices as probed and with a factor.",
            ("link", "prices"),
            {
                (link.link, prices): error
                for link in self.links
                for prices, error in (("probed", link.probed_error), ("corrected", link.corrected_error))
            },
        )


def prices_status(prices: LivePrices) -> PricesStatus:
    """Return what was learnt of each link in this topology generation."""
    shown = []
    for link, learnt in prices.corrections().items():
        probed, corrected = learnt.error_shares()
        shown.append(
            LinkPrices(
                link=link.value, reports=learnt.reports, factor=learnt.factor, probed_error=probed,
                corrected_error=corrected, reason=learnt.reason(),
            )
        )  # fmt: skip
    return PricesStatus(links=tuple(shown))
