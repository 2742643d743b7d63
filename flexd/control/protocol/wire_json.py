"""Dataclasses as JSON and back, checked field by field: what messages between daemon and ranks are made of."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NamedTuple

_MAX_INT = 2**64
_MAX_INT_CHARACTERS = 21


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
    return json.loads(text, parse_constant=_no_constant, parse_int=_whole_number)


def _no_constant(text: str) -> Any:
    raise ValueError(f"number {text}")


def _whole_number(text: str) -> int | float:
    # Python refuses to parse thousands of digits, which an unknown field may have. No known field has so many.
    return int(text) if len(text) <= _MAX_INT_CHARACTERS else float(text)


class WireField(NamedTuple):
    hint: Any
    optional: bool


@cache
def wire_fields(cls: Any) -> Mapping[str, WireField]:
    """Return the fields of a message or of a part of one. Those with a default are optional."""
    hints = typing.get_type_hints(cls)
    return {
        item.name: WireField(hints[item.name], item.default is not MISSING or item.default_factory is not MISSING)
        for item in fields(cls)
    }


def build(cls: Any, data: dict[str, Any]) -> Any:
    """Make a dataclass of fields; unknown ones are ignored. Raises ValueError: one is missing or of another type."""
    known = wire_fields(cls)
    missing = [name for name, field in known.items() if not field.optional and name not in data]
    if missing:
        raise ValueError(f"{cls.__name__} without {', '.join(missing)}")
    return cls(**{
        name: _checked(field.hint, data[name], f"{cls.__name__}.{name}")
        for name, field in known.items()
        if name in data
    })  # fmt: skip


def _checked(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        return None if value is None else _checked(typing.get_args(hint)[0], value, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return build(hint, value)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        inner = typing.get_args(hint)
        if inner[-1] is not Ellipsis and len(inner) != len(value):
            raise ValueError(f"{where} has {len(value)} items")
        return tuple(_checked(inner[0], item, where) for item in value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint is int and type(value) is int and abs(value) < _MAX_INT:
        return value
    if hint in (str, bool) and type(value) is hint:
        return value
    raise ValueError(f"{where} is a {type(value).__name__}")
