"""Every number and text of a step report, found by its declared fields, with values inside and outside its bounds."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from hypothesis import strategies as st

from flexd.control.protocol.report import StepReport
from flexd.control.protocol.wire import FieldType, wire_fields
from flexd.core.bounds import Longest, Range


class Leaf(NamedTuple):
    """A number or a text of a report.

    Attributes:
        path: names and numbers that lead to it in the JSON form of ``full_report``.
        field: class and name of its field.
    """

    path: tuple[str | int, ...]
    field: str
    type: FieldType


def leaves(cls: Any = StepReport, path: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    """Yield the leaves of a report whose tuples have one item or as many as declared."""
    for name, type_ in wire_fields(cls).items():
        yield from _leaves(type_, (*path, name), f"{cls.__name__}.{name}")


def _leaves(type_: FieldType, path: tuple[str | int, ...], field: str) -> Iterator[Leaf]:
    if type_.items is not None:
        yield from _leaves(type_.items, (*path, 0), field)
    elif dataclasses.is_dataclass(type_.base):
        yield from leaves(type_.base, path)
    else:
        yield Leaf(path, field, type_)


def reports(cls: Any = StepReport) -> st.SearchStrategy[Any]:
    """Any report within its bounds."""
    return st.builds(cls, **{name: _values(type_) for name, type_ in wire_fields(cls).items()})


def full_report() -> StepReport:
    """Return a report with an item in each of its tuples."""
    return _full(StepReport)  # type: ignore[no-any-return]


def _full(cls: Any) -> Any:
    return cls(**{name: _full_value(type_) for name, type_ in wire_fields(cls).items()})


def _full_value(type_: FieldType) -> Any:
    if type_.items is not None:
        return tuple(_full_value(type_.items) for _ in range(type_.size or 1))
    return _full(type_.base) if dataclasses.is_dataclass(type_.base) else type_.base(1)


def _values(type_: FieldType) -> st.SearchStrategy[Any]:
    bounds = type_.bounds
    if type_.items is not None:
        most = type_.size if bounds is None else min(3, bounds.length)  # type: ignore[union-attr]
        found: Any = st.lists(_values(type_.items), min_size=type_.size or 0, max_size=most).map(tuple)
    elif dataclasses.is_dataclass(type_.base):
        found = reports(type_.base)
    elif isinstance(bounds, Range):
        few = st.sampled_from([bounds.low, bounds.high]).map(type_.base)
        found = few | (st.integers(int(bounds.low), int(bounds.high)) if type_.base is int else st.floats(*bounds))
    else:
        assert isinstance(bounds, Longest)
        found = st.text(max_size=bounds.length)
    return st.none() | found if type_.or_none else found
