"""Metric families from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

MAX_LABEL_VALUES = 4096
"""Series of one metric, at most; the rest is summed (counters) or left out (gauges) and the metrics page says so."""


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=float(value))


def gauges(
    name: str, text: str, label: str, values: Mapping[str, float], keep: int = MAX_LABEL_VALUES
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in list(values.items())[:keep]:
        family.add_metric([key], float(value))
    return family


def counters(
    name: str, text: str, label: str, values: Mapping[str, float], keep: int = MAX_LABEL_VALUES
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    items = list(values.items())
    for key, value in items[:keep]:
        family.add_metric([key], float(value))
    if len(items) > keep:
        family.add_metric(["other"], float(sum(value for _, value in items[keep:])))
    return family
