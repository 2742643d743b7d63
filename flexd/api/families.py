"""Metric families from plain numbers. prometheus_client is imported where it is used: the command line needs none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

MAX_LABEL_VALUES = 4096
"""Limit on the series of one metric; the rest is summed (counters) or left out (gauges), as the metrics docs say."""


def with_zeros(values: Iterable[str], counts: Mapping[str, int]) -> dict[str, int]:
    """Return ``counts`` with 0 for those of ``values`` that it does not have.

    ``rate()`` and ``increase()`` do not see the first increment of a series that appears with it, so an alert on "any"
    would miss it.
    """
    return {**dict.fromkeys(values, 0), **counts}


def gauge(name: str, text: str, value: float | None) -> Metric:
    """Return a gauge; NaN if ``value`` is unknown."""
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(name, text, value=_number(value))


def counter(name: str, text: str, value: float) -> Metric:
    """Return a counter."""
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(name, text, value=float(value))


def summary(name: str, text: str, count: int, total: float) -> Metric:
    """Return a summary of a count and a total."""
    from prometheus_client.core import SummaryMetricFamily

    return SummaryMetricFamily(name, text, count_value=count, sum_value=total)


def info(name: str, text: str, values: Mapping[str, str]) -> Metric:
    """Return an info family."""
    from prometheus_client.core import InfoMetricFamily

    return InfoMetricFamily(name, text, value=dict(values))


def gauges(
    name: str, text: str, label: str, values: Mapping[str, float | None], keep: int = MAX_LABEL_VALUES
) -> Metric:
    """Return a gauge with one label; NaN for unknown values."""
    return gauges_by(name, text, (label,), {(key,): value for key, value in list(values.items())[:keep]})


def gauges_by(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float | None]) -> Metric:
    """Return a gauge with several labels; NaN for unknown values."""
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, _number(value))
    return family


def counters(name: str, text: str, label: str, values: Mapping[str, float], keep: int = MAX_LABEL_VALUES) -> Metric:
    """Return a counter with one label."""
    items = list(values.items())
    kept: dict[tuple[str, ...], float] = {(key,): value for key, value in items[:keep]}
    if len(items) > keep:
        kept["other",] = sum(value for _, value in items[keep:])
    return counters_by(name, text, (label,), kept)


def counters_by(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
    """Return a counter with several labels."""
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, float(value))
    return family


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
