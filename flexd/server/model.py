"""What every model of the admin API stands on."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Measured = Annotated[float | None, BeforeValidator(_finite_or_none)]
"""A figure that may not be known yet: NaN and infinities (which JSON has no word for) become null."""


class Model(BaseModel):
    """A reader ignores fields it does not know, so that an older command line reads a newer daemon.

    Validators are built when a model is first used: a command uses a few of sixty.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="ignore", use_attribute_docstrings=True)


def build_models() -> None:
    """Builds what is left, before several threads use them: pydantic does it under a lock only in newer versions."""
    waiting = Model.__subclasses__()
    while waiting:
        model = waiting.pop()
        model.model_rebuild()
        waiting += model.__subclasses__()
