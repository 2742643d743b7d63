"""Reads data of one schema: the program for ``kernel.read``, and the values of Python that its columns become.

Why not a library: docs/decisions/stream-and-ingest.md, "Avro is read by flexd".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from itertools import accumulate, islice, pairwise, repeat, starmap
from typing import Any, NoReturn
from uuid import UUID

import numpy as np

from flexd.stream.avro import kernel
from flexd.stream.avro.schema import KINDS, Type

# Fields that are asked for, by name, and below ``ITEMS`` of the items of a list; None: all.
Wanted = Mapping[str, Any] | None
ITEMS = "[*]"
MAX_COLUMNS = 4096
# Of the longest message whose scratch is kept for the next one.
_KEPT_BYTES = 2**16
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SINCE_EPOCH: dict[str, Callable[[int], timedelta]] = {
    "date": timedelta,
    "timestamp-millis": lambda ticks: timedelta(milliseconds=ticks),
    "timestamp-micros": lambda ticks: timedelta(microseconds=ticks),
    "timestamp-nanos": lambda ticks: timedelta(microseconds=ticks / 1000),
}
_REASONS = {
    kernel.SHORT: "the message ends",
    kernel.LONG_NUMBER: "a number has more than 10 bytes",
    kernel.LENGTH: "a length is negative",
    kernel.BRANCH: "there is no such branch of the union",
    kernel.SYMBOL: "there is no such symbol of the enumeration",
}


class Decoder:
    """Reads data of a type. Belongs to one thread.

    Records and maps become dictionaries with the fields that are asked for, arrays lists, unions the value of their
    branch, ``timestamp-*`` and ``date`` datetimes, a ``fixed`` of logical type ``uuid`` a UUID. Fields without bytes
    are left out.

    Args:
        type_: of the datum.
        wanted: the fields of each event. Where the datum is an array, its items are the events.

    Raises:
        ValueError: more than ``MAX_COLUMNS`` columns would be read.
    """

    def __init__(self, type_: Type, wanted: Wanted) -> None:
        self._words: list[int] = []
        self._names: dict[int, str] = {}
        # Types that nothing is asked of have no columns: one program serves all places.
        self._skipped: dict[Type, int] = {}
        self._count = 0
        if type_.kind == "array" and wanted is not None:
            wanted = {ITEMS: wanted}
        _, value = self._place(type_, wanted, "the datum", once=True)
        # One expression, in which names of the schema are literals: a third of the time of functions that call others.
        self._value = eval(f"lambda r, d: {value}", _FUNCTIONS)  # noqa: S307
        self._program = np.array(self._words, dtype=np.int32)
        self._make_room(_KEPT_BYTES)

    def _make_room(self, length: int) -> None:
        self._room = length
        self._result = np.empty(2 * length + self._count + 2, dtype=np.int64)
        scratch = np.empty(4 * length + 2, dtype=np.int64)
        self._arguments = self._program, self._count, scratch, self._result

    def read(self, data: bytes, at: int) -> tuple[Any, int]:
        """Return the datum that begins there, and the place behind it.

        Raises:
            ValueError: there is none; it names the field.
        """
        if len(data) > self._room:
            self._make_room(len(data))
        length = kernel.read(data, at, *self._arguments)
        if length < 0:
            self._refuse(length)
        result = self._result[:length].tolist()
        if self._room > _KEPT_BYTES:
            self._make_room(_KEPT_BYTES)
        return self._value(result, data), result[0]

    def _refuse(self, reason: int) -> NoReturn:
        node, began = self._result[:2].tolist()
        raise ValueError(f"{_REASONS[reason]} in {self._names[node]}, from byte {began}")

    def _place(self, type_: Type, wanted: Wanted, name: str, once: bool = False) -> tuple[int, str]:
        """Append the programs of a type and of its parts.

        Args:
            once: whether a datum has one value of it.

        Returns:
            Its position; and the expression of its value, or of all its values in a message, in order: ``r`` is the
            result of ``kernel.read``, ``d`` the message.
        """
        kind = type_.kind
        if type_.is_empty:
            nothing = "None" if kind == "null" else "{}"
            return self._skip(type_, name), nothing if once else f"repeat({nothing})"
        at = self._reserve(name)
        if kind == "record":
            column, parts, values = self._record(type_, wanted, once)
        elif kind in ("array", "map"):
            column, parts, values = self._list(type_, wanted, name, once)
        elif kind == "union":
            column = self._take(1)
            placed = [self._place(each, wanted, name) for each in type_.inner]
            parts = [part for part, _ in placed]
            values = _first(f"branches({_of(column)}, {', '.join(each for _, each in placed)})", once)
        else:
            column, parts = self._take(2 if kind in ("bytes", "string", "fixed") else 1), []
            values = _first(_scalars(type_, column), once)
        self._finish(at, type_, parts, column)
        return at, values

    def _record(self, type_: Type, wanted: Wanted, once: bool) -> tuple[int, list[int], str]:
        """Return the column, the positions of the fields, and the expression."""
        parts, fields = [], []
        for name, each in zip(type_.names, type_.inner, strict=True):
            if each.is_empty or (wanted is not None and name not in wanted):
                parts.append(self._skip(each, name))
                continue
            part, values = self._place(each, None if wanted is None else wanted[name], name, once)
            parts.append(part)
            fields.append((name, values))
        if not fields:
            column = self._take(1)
            return column, parts, _first(f"[{{}}] * len({_of(column)})", once)
        if once:
            return -1, parts, f"{{{', '.join(f'{name!r}: {value}' for name, value in fields)}}}"
        made = ", ".join(f"{name!r}: x[{i}]" for i, (name, _) in enumerate(fields))
        return -1, parts, f"[{{{made}}} for x in zip({', '.join(values for _, values in fields)})]"

    def _list(self, type_: Type, wanted: Wanted, name: str, once: bool) -> tuple[int, list[int], str]:
        """Return the same of an array or a map."""
        is_array, items = type_.kind == "array", type_.inner[0]
        column = self._take(1 if is_array else 3)
        if not (wanted is None or (ITEMS in wanted if is_array else wanted)):
            return column, [self._skip(items, name)], _first(f"[{[] if is_array else {}}] * len({_of(column)})", once)
        part, values = self._place(items, wanted and wanted[ITEMS] if is_array else None, name)
        if not is_array:
            return column, [part], _first(f"maps(r, d, {column}, {values})", once)
        return column, [part], values if once else f"lists({_of(column)}, {values})"

    def _skip(self, type_: Type, name: str) -> int:
        """Append the program of values that nothing is asked of. Return its position."""
        if type_ in self._skipped:
            return self._skipped[type_]
        at = self._skipped[type_] = self._reserve(name)
        names = type_.names if type_.kind == "record" else [name] * len(type_.inner)
        parts = [self._skip(each, each_name) for each, each_name in zip(type_.inner, names, strict=True)]
        self._finish(at, type_, parts, -1)
        return at

    def _reserve(self, name: str) -> int:
        at = len(self._words)
        self._words += [0, 0, 0, 0]
        self._names[at] = name
        return at

    def _finish(self, at: int, type_: Type, parts: list[int], column: int) -> None:
        number = type_.size if type_.kind == "fixed" else len(type_.names) if type_.kind == "enum" else len(parts)
        self._words[at : at + 4] = [KINDS.index(type_.kind), len(self._words), number, column]
        self._words += parts

    def _take(self, columns: int) -> int:
        first = self._count
        self._count += columns
        if self._count > MAX_COLUMNS:
            raise ValueError(f"it has more than {MAX_COLUMNS} fields to read")
        return first


def _of(column: int) -> str:
    return f"r[r[{column + 1}]:r[{column + 2}]]"


def _first(values: str, once: bool) -> str:
    return f"({values})[0]" if once else values


def _scalars(type_: Type, column: int) -> str:
    kind, logical = type_.kind, type_.logical
    if kind == "long":
        logical = logical.removeprefix("local-")
        return f"times({logical!r}, {_of(column)})" if logical in _SINCE_EPOCH else _of(column)
    if kind in ("bytes", "string", "fixed"):
        parts = f"parts(r, d, {column})"
        as_uuid = kind == "fixed" and logical == "uuid" and type_.size == 16
        return f"texts({parts})" if kind == "string" else f"uuids({parts})" if as_uuid else parts
    if kind == "enum":
        return f"symbols({type_.names!r}, {_of(column)})"
    return f"bools({_of(column)})" if kind == "boolean" else f"floats({4 if kind == 'float' else 8}, {_of(column)})"


def _parts(result: list[int], data: bytes, column: int) -> list[bytes]:
    """Return the parts of the message from the places in this column to those in the next."""
    begin, between, end = result[column + 1 : column + 4]
    return list(map(data.__getitem__, map(slice, result[begin:between], result[between:end])))


def _texts(parts: list[bytes]) -> list[str]:
    return list(map(str, parts, repeat("utf-8")))


def _lists(lengths: list[int], items: list[Any]) -> list[list[Any]]:
    return list(map(items.__getitem__, starmap(slice, pairwise(accumulate(lengths, initial=0)))))


def _maps(result: list[int], data: bytes, column: int, items: Iterable[Any]) -> list[dict[str, Any]]:
    lengths = result[result[column + 1] : result[column + 2]]
    keys = iter(_texts(_parts(result, data, column + 1)))
    # Each dictionary takes its share of both before the next one begins; the key first.
    return list(map(dict, map(zip, map(islice, repeat(keys), lengths), repeat(iter(items)))))


def _branches(taken: list[int], *branches: Iterable[Any]) -> list[Any]:
    return list(map(next, map(list(map(iter, branches)).__getitem__, taken)))


def _floats(size: int, bits: list[int]) -> list[float]:
    found: list[float] = np.array(bits, dtype=np.int64).astype(f"u{size}").view(f"f{size}").tolist()
    return found


def _times(logical: str, ticks: list[int]) -> list[datetime | int]:
    return [_time(_SINCE_EPOCH[logical], each) for each in ticks]


def _time(since: Callable[[int], timedelta], ticks: int) -> datetime | int:
    """Return a time, or the number that is none: for the mapping to complain of."""
    try:
        return _EPOCH + since(ticks)
    except OverflowError:
        return ticks


# All that the expression of a value may call.
_FUNCTIONS: dict[str, Any] = {
    "__builtins__": {}, "len": len, "zip": zip, "repeat": repeat, "parts": _parts, "texts": _texts, "lists": _lists,
    "maps": _maps, "branches": _branches, "floats": _floats, "times": _times,
    "uuids": lambda parts: [UUID(bytes=each) for each in parts],
    "symbols": lambda names, numbers: list(map(names.__getitem__, numbers)),
    "bools": lambda numbers: list(map(bool, numbers)),
}  # fmt: skip
