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
    """A reader ignores fields it does not know, so that an older command line reads a newer daemon."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="ignore", use_attribute_docstrings=True)
