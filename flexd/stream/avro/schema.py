"""Avro schemas as trees of types (Apache Avro 1.12, "Schema Declaration"), with names resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# In the order of ``kernel``.
KINDS = (
    "null", "boolean", "long", "float", "double", "bytes", "string", "fixed", "enum", "record", "array", "map", "union",
)  # fmt: skip
_PRIMITIVE = {*KINDS[:7], "int"}
MAX_LEVELS = 32


@dataclass(eq=False)
class Type:
    """A type of a schema; an ``int`` is a ``long``, which has the same bytes.

    Attributes:
        kind: one of ``KINDS``.
        inner: types of a record's fields, of a union's branches, or the one of an array's items or a map's values.
        names: of a record's fields, or the symbols of an enumeration.
        size: bytes of a ``fixed``.
        logical: the ``logicalType``, or "".
        is_empty: its values take no bytes.
        levels: types below one another, at most ``MAX_LEVELS``.
    """

    kind: str
    inner: list[Type] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    size: int = 0
    logical: str = ""
    is_empty: bool = False
    levels: int = field(init=False)

    def __post_init__(self) -> None:
        self.levels = 1 + max((part.levels for part in self.inner), default=0)
        if self.levels > MAX_LEVELS:
            raise ValueError(f"it has more than {MAX_LEVELS} levels")


def parse(schema: Any, references: Any = ()) -> Type:
    """Return the type of a schema.

    Args:
        schema: its JSON, parsed.
        references: schemas whose names it uses, likewise; each may use names of those before it.

    Raises:
        ValueError: it is none; or a record holds itself, or an array has items that take no bytes: a short message
            could make the reader recurse, or count, without end.
    """
    parser = _Parser()
    for each in references:
        parser.type(each, "")
    return parser.type(schema, "")


class _Parser:
    def __init__(self) -> None:
        # By full name; None while its fields are being read.
        self._named: dict[str, Type | None] = {}

    def type(self, node: Any, namespace: str) -> Type:
        if isinstance(node, str):
            return self._by_name(node, namespace)
        if isinstance(node, list):
            return Type("union", [self.type(each, namespace) for each in node])
        if not isinstance(node, dict):
            raise ValueError(f"{str(node)[:40]!r} is no type")
        kind = node.get("type")
        if kind in ("record", "error", "enum", "fixed"):
            return self._definition(kind, node, namespace)
        if kind in ("array", "map"):
            part = self.type(node.get("items" if kind == "array" else "values"), namespace)
            if kind == "array" and part.is_empty:
                raise ValueError("an array has items without bytes")
            return Type(kind, [part])
        found = self.type(kind, namespace)
        logical = node.get("logicalType")
        if not isinstance(logical, str) or found.kind not in ("long", "string", "bytes"):
            return found
        return Type(found.kind, logical=logical)

    def _by_name(self, name: str, namespace: str) -> Type:
        if name in _PRIMITIVE:
            return Type("long" if name == "int" else name, is_empty=name == "null")
        for full in (name,) if "." in name or not namespace else (f"{namespace}.{name}", name):
            if full in self._named:
                known = self._named[full]
                if known is None:
                    raise ValueError(f"record {full} holds itself")
                return known
        raise ValueError(f"{name!r} is no type and no name of one")

    def _definition(self, kind: str, node: dict[str, Any], namespace: str) -> Type:
        name = node.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"a type {kind} has no name")
        given = node.get("namespace", namespace)
        full = name if "." in name or not given else f"{given}.{name}"
        if full in self._named:
            raise ValueError(f"{full} is defined twice")
        if kind == "fixed":
            size = node.get("size")
            if type(size) is not int or not 0 <= size < 2**31:
                raise ValueError(f"{full} has no size")
            made = Type("fixed", size=size, logical=str(node.get("logicalType", "")), is_empty=not size)
        elif kind == "enum":
            symbols = node.get("symbols")
            if not isinstance(symbols, list) or not all(isinstance(each, str) for each in symbols):
                raise ValueError(f"{full} has no symbols")
            made = Type("enum", names=symbols)
        else:
            self._named[full] = None
            fields = node.get("fields")
            if not isinstance(fields, list) or not all(isinstance(each, dict) for each in fields):
                raise ValueError(f"{full} has no fields")
            inner = full.rpartition(".")[0]
            parts = [self.type(each.get("type"), inner) for each in fields]
            names = [str(each.get("name")) for each in fields]
            if len(set(names)) < len(names):
                raise ValueError(f"{full} has a field twice")
            made = Type("record", parts, names, is_empty=all(part.is_empty for part in parts))
        self._named[full] = made
        return made
