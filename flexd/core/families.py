"""Metric families of the models. prometheus_client is imported where it is used: the command line needs none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

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


@dataclass(frozen=True)
class Family:
    """A metric family of a model.

    Attributes:
        text: its documentation.
        value: field of the model, or a function of it: a number (None: unknown), with ``labels`` a mapping of numbers
            by label value (by tuples of them for several labels), (count, total) of a summary, or labels of an info.
        keep: limit on its series, for one label.
    """

    kind: Literal["gauge", "counter", "summary", "info"]
    name: str
    text: str
    value: str | Callable[[Any], Any]
    labels: tuple[str, ...] = ()
    keep: int = MAX_LABEL_VALUES

    def of(self, model: object) -> Metric:
        """Return the family with the values of ``model``; NaN for unknown ones."""
        from prometheus_client import core

        value = getattr(model, self.value) if isinstance(self.value, str) else self.value(model)
        if self.kind == "info":
            return core.InfoMetricFamily(self.name, self.text, value=value)
        if self.kind == "summary":
            return core.SummaryMetricFamily(self.name, self.text, count_value=value[0], sum_value=value[1])
        make = core.CounterMetricFamily if self.kind == "counter" else core.GaugeMetricFamily
        if not self.labels:
            return make(self.name, self.text, value=_number(value))
        family, items = make(self.name, self.text, labels=self.labels), list(value.items())
        if self.kind == "counter" and len(items) > self.keep:
            items = [*items[: self.keep], ("other", sum(number for _, number in items[self.keep :]))]
        else:
            items = items[: self.keep]
        for key, number in items:
            family.add_metric((str(key),) if len(self.labels) == 1 else key, _number(number))
        return family


gauge = partial(Family, "gauge")
counter = partial(Family, "counter")
summary = partial(Family, "summary")
info = partial(Family, "info")


def by_table(field: str) -> Callable[[Any], dict[str, float | None]]:
    """Return the function to a field of a model's ``tables``, by table."""
    return lambda model: {each.table: getattr(each, field) for each in model.tables}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
