"""The base class of resources: what the daemon keeps, the history stores, the API returns and commands show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict

if TYPE_CHECKING:
    from prometheus_client.core import Metric


# Limit on the series of one metric; the rest is summed (counters) or left out (gauges), as the metrics docs say.
MAX_LABEL_VALUES = 4096


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


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# A number that may be unknown: NaN and infinities, which JSON cannot express, become null.
FiniteOrNone = Annotated[float | None, BeforeValidator(_finite_or_none)]


@dataclass(frozen=True)
class Show:
    """The way in which the command line shows a field, in its annotation.

    Attributes:
        title: heading; empty for the name of the field without its unit.
        unit: formats a value; None follows from the name.
        hidden: not shown: ``-o json`` has it.
        always: shown although it has its default.
        detail: a fact, no column of a table.
        brief: of a resource only its facts, without details.
    """

    title: str = ""
    unit: Callable[[Any], str] | None = None
    hidden: bool = False
    always: bool = False
    detail: bool = False
    brief: bool = False


HIDDEN = Show(hidden=True)
DETAIL = Show(detail=True)
ALWAYS = Show(always=True)


class Model(BaseModel):
    """A resource or a part of one.

    Unknown fields are ignored, so that an older command line reads a newer daemon. Validators are built when a model
    is first used, because a command uses a few of sixty.

    Attributes:
        FAMILIES: metric families of the model itself.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="ignore", use_attribute_docstrings=True)
    FAMILIES: ClassVar[tuple[Family, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Describe fields without a docstring by the text of their metric family."""
        for family in cls.FAMILIES:
            field = cls.model_fields.get(family.value) if isinstance(family.value, str) else None
            if field is not None and field.description is None:
                field.description = family.text

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the model and of its parts."""
        yield from (family.of(self) for family in self.FAMILIES)
        for part in (getattr(self, name) for name in type(self).model_fields):
            if isinstance(part, Model):
                yield from part.metrics()

    @classmethod
    def from_object(cls, source: object, /, **fields: Any) -> Self:
        """Build the model from the attributes of ``source`` that have its fields' names; ``fields`` take precedence.

        Raises:
            AttributeError: a field has neither, so that a renamed attribute never becomes a silent default.
        """
        return cls(**{name: getattr(source, name) for name in cls.model_fields if name not in fields}, **fields)


def build_models() -> None:
    """Build the remaining validators before several threads use them: only newer pydantic does that under a lock."""
    waiting = Model.__subclasses__()
    while waiting:
        model = waiting.pop()
        model.model_rebuild()
        waiting += model.__subclasses__()
