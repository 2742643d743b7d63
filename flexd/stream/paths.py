"""Paths to the fields of an event, ``$.impressions[*].item_id``, and comparisons of a field with a value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import eq, ne
from typing import Any, Literal

# One name behind the dollar, or a star: ``.name``, ``["any name"]``, ``[*]``.
_STEP = re.compile(r"""\.([A-Za-z_][\w-]*)|\[("(?:[^"\\]|\\.)*")\]|(\[\*\])""")
_COMPARISON = re.compile(r"(\$\S*)\s+(==|!=|in)\s+(.+)")
MAX_STEPS = 32


@dataclass(frozen=True)
class FieldPath:
    """The way from an event to a field.

    Attributes:
        text: as written.
        segments: names before the first ``[*]``, between two of them, and behind the last.
    """

    text: str
    segments: tuple[tuple[str, ...], ...]

    @property
    def stars(self) -> int:
        """Number of lists on the way."""
        return len(self.segments) - 1

    @staticmethod
    def parse(text: str) -> FieldPath:
        """Raises ValueError, which says what is wrong."""
        segments: list[list[str]] = [[]]
        at, steps = 1, 0
        while at < len(text):
            step = _STEP.match(text, at)
            if step is None:
                break
            name, quoted, star = step.groups()
            if star:
                segments.append([])
            else:
                segments[-1].append(name or json.loads(quoted))
            at, steps = step.end(), steps + 1
        if not text.startswith("$") or at < len(text) or steps > MAX_STEPS:
            raise ValueError(
                'must be a path: $ and up to 32 steps .name, ["any name"] or [*], as in $.impressions[*].item_id'
            )
        return FieldPath(text, tuple(map(tuple, segments)))

    def is_beside(self, other: FieldPath) -> bool:
        """Return True if every list on the way to this field is on the way to ``other`` too."""
        return self.stars <= other.stars and self.segments[: self.stars] == other.segments[: self.stars]


@dataclass(frozen=True)
class Comparison:
    """Events are kept whose field equals (``==``), does not equal (``!=``), or is one of (``in``) what is given."""

    path: FieldPath
    operator: Literal["==", "!=", "in"]
    value: Any

    @staticmethod
    def parse(text: str) -> Comparison:
        """Raises ValueError, which says what is wrong."""
        found = _COMPARISON.fullmatch(text.strip())
        problem = 'must compare a field with a JSON value: $.type == "impression", != or in ["a", "b"]'
        if found is None:
            raise ValueError(problem)
        path, operator = FieldPath.parse(found[1]), found[2]
        try:
            value = json.loads(found[3])
        except ValueError as error:
            raise ValueError(problem) from error
        if path.stars or isinstance(value, list) != (operator == "in") or isinstance(value, dict):
            raise ValueError(problem + "; the field is outside of lists")
        return Comparison(path, operator, value)  # type: ignore[arg-type]

    def predicate(self) -> Callable[[Any], bool]:
        """Return the function that is True for values of the field whose events are kept."""
        if self.operator == "in":
            kept: Callable[[Any], bool] = self.value.__contains__
            return kept
        return partial(eq if self.operator == "==" else ne, self.value)
