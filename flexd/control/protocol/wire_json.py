"""Dataclasses as JSON and back, checked field by field: what messages between daemon and ranks are made of.

A field states its bounds in its type (``flexd.core.bounds``). ``build`` refuses a value outside of them and names the
field; ``clamp`` brings what is to be sent inside.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import types
import typing
from collections.abc import Mapping, Sized
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, NamedTuple

from flexd.core.bounds import Longest, Range

_MAX_INT = 2**64
_MAX_INT_CHARACTERS = 21


class FieldError(ValueError):
    """A field is missing, of another type, or outside its bounds.

    Attributes:
        field: class and name, as declared.
    """

    def __init__(self, field: str, fault: str) -> None:
        self.field = field
        super().__init__(fault)


def to_json(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, and of dataclasses in them."""
    out: dict[str, Any] = {}
    for item in fields(value):
        out[item.name] = _json_value(getattr(value, item.name))
    return out


def _json_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_json(value)
    return [_json_value(part) for part in value] if isinstance(value, tuple) else value


def parsed(text: bytes) -> Any:
    """Return what a JSON text says. Raises ValueError, RecursionError."""
    return json.loads(text, parse_int=_whole_number)


def _whole_number(text: str) -> int | float:
    # Python refuses to parse thousands of digits, which an unknown field may have. No known field has so many.
    return int(text) if len(text) <= _MAX_INT_CHARACTERS else float(text)


class FieldType(NamedTuple):
    """The type of a field, taken apart.

    Attributes:
        base: a class, or ``tuple``.
        bounds: of the value; None for a part that has bounds of its own, and where any value will do.
        items: the type of each item of a tuple.
        size: number of items of a tuple, None for any.
        or_none: whether it may be None.
    """

    base: Any
    bounds: Range | Longest | None = None
    items: FieldType | None = None
    size: int | None = None
    or_none: bool = False


class WireField(NamedTuple):
    """One field of a message or of a part of one.

    Attributes:
        hint: its type as declared, without bounds.
        optional: whether it has a default.
    """

    hint: Any
    optional: bool
    type: FieldType


@cache
def wire_fields(cls: Any) -> Mapping[str, WireField]:
    """Return the fields of a message or of a part of one. Those with a default are optional."""
    hints, declared = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
    return {
        item.name: WireField(
            hints[item.name],
            item.default is not MISSING or item.default_factory is not MISSING,
            _field_type(declared[item.name]),
        )
        for item in fields(cls)
    }


def _field_type(hint: Any) -> FieldType:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        return _field_type(arguments[0])._replace(bounds=arguments[1])
    if isinstance(hint, types.UnionType):
        return _field_type(arguments[0])._replace(or_none=True)
    if typing.get_origin(hint) is tuple:
        size = None if arguments[-1] is Ellipsis else len(arguments)
        return FieldType(tuple, items=_field_type(arguments[0]), size=size)
    return FieldType(hint)


def build(cls: Any, data: dict[str, Any]) -> Any:
    """Make a dataclass of fields; unknown ones are ignored.

    Raises:
        FieldError: a field is missing, of another type, or outside its bounds.
    """
    known = wire_fields(cls)
    missing = [name for name, field in known.items() if not field.optional and name not in data]
    if missing:
        raise FieldError(f"{cls.__name__}.{missing[0]}", f"{cls.__name__} without {', '.join(missing)}")
    return cls(**{
        name: _checked(field.type, data[name], f"{cls.__name__}.{name}")
        for name, field in known.items()
        if name in data
    })  # fmt: skip


def _checked(type_: FieldType, value: Any, where: str) -> Any:
    base, bounds = type_.base, type_.bounds
    if value is None and type_.or_none:
        return None
    if dataclasses.is_dataclass(base) and isinstance(value, dict):
        return build(base, value)
    if type_.items is not None and isinstance(value, list):
        if (type_.size is not None and len(value) != type_.size) or _too_long(bounds, value):
            raise FieldError(where, f"{where} has {len(value)} items")
        return tuple(_checked(type_.items, item, where) for item in value)
    if base in (str, bool) and type(value) is base:
        if _too_long(bounds, value):
            raise FieldError(where, f"{where} has {len(value)} characters")
        return value
    whole = base is int and type(value) is int and abs(value) < _MAX_INT
    real = base is float and isinstance(value, int | float) and not isinstance(value, bool)
    if not whole and not real:
        raise FieldError(where, f"{where} is a {type(value).__name__}")
    if not math.isfinite(value) or (isinstance(bounds, Range) and not bounds.low <= value <= bounds.high):
        raise FieldError(where, f"{where} is {value}")
    return value if whole else float(value)


def _too_long(bounds: Range | Longest | None, value: Sized) -> bool:
    return isinstance(bounds, Longest) and len(value) > bounds.length


def clamp(value: Any) -> Any:
    """Return a dataclass with every field within its bounds: itself if all are.

    A number outside is set to the nearest bound, one that is not finite to the lowest; a text or a tuple that is too
    long is cut. Ranks call it in every step, so fields that have no bounds cost nothing.
    """
    changed: dict[str, Any] = {}
    cls: Any = type(value)
    numbers, others = _bounded_fields(cls)
    for name, base, low, high in numbers:
        before = getattr(value, name)
        if type(before) is not base or not low <= before <= high:
            changed[name] = base(min(max(before, low), high) if math.isfinite(before) else low)
    for name, type_ in others:
        before = getattr(value, name)
        if before and (after := _clamped(type_, before)) is not before:
            changed[name] = after
    return dataclasses.replace(value, **changed) if changed else value


@cache
def _bounded_fields(
    cls: Any,
) -> tuple[tuple[tuple[str, Any, float, float], ...], tuple[tuple[str, FieldType], ...]]:
    """Return the numbers of a class that have bounds, and the other fields that have, in them or in a part."""
    known = {name: field.type for name, field in wire_fields(cls).items()}
    numbers = tuple(
        (name, type_.base, *type_.bounds) for name, type_ in known.items() if isinstance(type_.bounds, Range)
    )
    others = tuple(
        (name, type_)
        for name, type_ in known.items()
        if isinstance(type_.bounds, Longest) or type_.items is not None or dataclasses.is_dataclass(type_.base)
    )
    return numbers, others


def _clamped(type_: FieldType, value: Any) -> Any:
    bounds, items = type_.bounds, type_.items
    if isinstance(bounds, Longest) and len(value) > bounds.length:
        value = value[: bounds.length]
    if items is None:
        return clamp(value) if dataclasses.is_dataclass(value) else value
    if isinstance(items.bounds, Range):
        low, high = items.bounds
        if all(type(item) is items.base and low <= item <= high for item in value):
            return value
        return tuple([items.base(min(max(i, low), high) if math.isfinite(i) else low) for i in value])
    after = tuple([_clamped(items, item) for item in value])
    return value if all(map(operator.is_, after, value)) else after
