"""The curves that price plans, and what training steps have shown of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flexd.api.base import FiniteOrNone, Model
from flexd.api.families import gauges, gauges_by

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.operations.live_prices import LivePrices


class CurvePrices(Model):
    """One curve. Errors are held-out: every report is predicted before it is learnt from; newer reports weigh more."""

    curve: str
    """``intra_all_to_all``, ``inter_all_to_all`` (over the rail), ``world_all_to_all`` (over all ranks) or
    ``inter_all_reduce``."""
    reports: int = 0
    """Times that enough steps of all ranks were learnt from."""
    correction: str = "probed"
    """``probed`` (the curve as it is), ``common`` (one factor) or ``separate`` (two)."""
    latency_factor: float = 1.0
    """Of the latency, if corrections are used."""
    transfer_factor: float = 1.0
    """Of the time of the bytes, if corrections are used."""
    probed_error: FiniteOrNone = None
    """Held-out error of the curve as it is, as a share of the measured time."""
    common_error: FiniteOrNone = None
    """Held-out error with one factor."""
    separate_error: FiniteOrNone = None
    """Held-out error with two factors."""
    reason: str = ""
    """Why it is corrected or not, in words."""


class PricesStatus(Model):
    """The prices of plans."""

    used: bool = False
    """``planner.correct_prices``: plans are priced with the corrections."""
    curves: tuple[CurvePrices, ...] = ()
    """The curves that steps of the live ranks have shown."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of corrected prices."""
        yield gauges_by(
            "flexd_price_factor",
            "What the curve's latency and transfer time are multiplied with (applied with planner.correct_prices).",
            ("curve", "part"),
            {
                (curve.curve, part): factor
                for curve in self.curves
                for part, factor in (("latency", curve.latency_factor), ("transfer", curve.transfer_factor))
            },
        )
        yield gauges_by(
            "flexd_price_error",
            "Held-out error as a share of the measured time, of the curve as probed and with one or two factors.",
            ("curve", "prices"),
            {
                (curve.curve, prices): error
                for curve in self.curves
                for prices, error in (
                    ("probed", curve.probed_error), ("common", curve.common_error), ("separate", curve.separate_error)
                )
            },
        )  # fmt: skip
        yield gauges(
            "flexd_price_corrected", "1 if reports show that a correction predicts better than the curve.", "curve",
            {curve.curve: float(curve.correction != "probed") for curve in self.curves},
        )  # fmt: skip
        yield gauges(
            "flexd_price_reports", "Times that steps of all ranks were learnt from, by curve.", "curve",
            {curve.curve: curve.reports for curve in self.curves},
        )  # fmt: skip


def prices_status(prices: LivePrices) -> PricesStatus:
    """Return what was learnt of each curve in this topology generation."""
    from flexd.planner.model.price_correction import Correction

    return PricesStatus(
        used=prices.used,
        curves=tuple(
            CurvePrices(
                curve=curve.value,
                reports=learnt.reports,
                correction=learnt.correction.name.lower(),
                latency_factor=learnt.factors[0],
                transfer_factor=learnt.factors[1],
                probed_error=learnt.error_share(Correction.PROBED),
                common_error=learnt.error_share(Correction.COMMON),
                separate_error=learnt.error_share(Correction.SEPARATE),
                reason=learnt.reason(),
            )
            for curve, learnt in prices.corrections().items()
        ),
    )
