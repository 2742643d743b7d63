"""The base class of resources: what the daemon keeps, the history stores, the API returns and commands show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from flexd.core.families import Family

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Share = Annotated[float, Field(ge=0, le=1)]


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite_or_none)]
"""A number that may be unknown: NaN and infinities, which JSON cannot express, become null."""


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
