"""A guess at the mapping of messages that nobody has described: fields and their values, and the configuration that
would count them."""

from __future__ import annotations

import operator
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from flexd.core.errors import CodecError, StreamError
from flexd.stream.formats import Reader
from flexd.stream.paths import MAX_STEPS
from flexd.stream.types import RefusedMessages, StreamMessage

MAX_FIELDS = 200
MAX_VALUES = 20_000
_TIME = re.compile(r"time|(^|_)ts($|_)|stamp|date|(^|_)at(_|$)", re.IGNORECASE)
_USER = re.compile(r"user|member|customer|visitor|uid|account|viewer|reader|session", re.IGNORECASE)
_ITEM = re.compile(
    r"item|product|article|video|track|song|sku|movie|doc|content|listing|hotel|asin|(^|_)ads?($|_)|candidate", re.I
)
_ID = re.compile(r"(id|ids|key|code)$", re.IGNORECASE)
_SAMPLE = re.compile(r"request|impression|event|trace|message|^_?id$|uuid", re.IGNORECASE)
_TABLE = re.compile(r"feature|table|embedding", re.IGNORECASE)
_HASH = re.compile(r"[0-9a-f]{8,}", re.IGNORECASE)
_TYPE = re.compile(r"type|event|kind|action|name", re.IGNORECASE)
# Of the present time in each unit.
_UNITS = {"seconds": 1e9, "milliseconds": 1e12, "microseconds": 1e15, "nanoseconds": 1e18}


@dataclass
class FieldSeen:
    """The values of one path.

    Attributes:
        events: that have the field.
        values: up to ``MAX_VALUES``.
        lengths: of its innermost list, in each place of it.
    """

    path: str
    events: int = 0
    values: list[Any] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return re.split(r"[.\[]", self.path.replace("[*]", "").replace('"]', ""))[-1].strip('"')

    @property
    def stars(self) -> int:
        return self.path.count("[*]")

    @property
    def kind(self) -> str:
        return Counter(type(value).__name__ for value in self.values).most_common(1)[0][0] if self.values else "null"

    @property
    def distinct(self) -> int:
        return len(set(map(str, self.values)))


@dataclass(frozen=True)
class EventsSeen:
    """The fields of some messages' events, the most frequent first."""

    events: tuple[dict[str, Any], ...]
    fields: dict[str, FieldSeen]


def guess_format(sample: Sequence[StreamMessage | RefusedMessages]) -> str:
    """Return the format by the first bytes of most messages.

    Raises:
        StreamError: there are none, or their bytes need a definition to be read.
    """
    heads = Counter(_format_of(bytes(each.payload[:6])) for each in sample if isinstance(each, StreamMessage))
    if not heads:
        raise StreamError("no messages to inspect", remedy="start a producer, or correct the topic's name")
    found = heads.most_common(1)[0][0]
    if found in ("json", "arrow"):
        return found
    raise StreamError(
        f"most messages begin with {found}",
        remedy="give --format avro or protobuf with --definition: a schema file, a directory of ID.avsc, a registry's "
        "URL, or a descriptor set with --message",
    )


def _format_of(head: bytes) -> str:
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") or (head[:1] == b"\0" and head[5:] in (b"{", b"[")):
        return "json"
    if head[:4] == b"\xff\xff\xff\xff":
        return "arrow"
    if head[:1] == b"\0":
        return f"a schema registry's header (schema {int.from_bytes(head[1:5], 'big')})"
    return repr(head[:4])


def read_fields(sample: Iterable[StreamMessage | RefusedMessages], reader: Reader) -> EventsSeen:
    """Return the fields of all events that can be read."""
    fields: dict[str, FieldSeen] = {}
    events: list[dict[str, Any]] = []
    for message in sample:
        if isinstance(message, RefusedMessages):
            continue
        try:
            parsed = reader.events(bytes(message.payload))
        except CodecError:
            continue  # explained by the doctor's checks
        for event in parsed:
            plain = _plain(event)
            if isinstance(plain, dict):
                events.append(plain)
                paths: set[str] = set()
                _walk(plain, "$", fields, paths)
                for path in paths:
                    fields[path].events += 1
    return EventsSeen(tuple(events), dict(sorted(fields.items(), key=lambda each: -each[1].events)))


def _plain(event: Any) -> Any:
    """Return a Protobuf message as a dictionary of the fields that are set; other values as they are."""
    if not hasattr(event, "ListFields"):
        return event
    return {
        kind.name: [_plain(each) for each in value] if kind.is_repeated else _plain(value)
        for kind, value in event.ListFields()
    }


def _walk(value: Any, path: str, fields: dict[str, FieldSeen], paths: set[str], steps: int = 0) -> None:
    if steps > MAX_STEPS:
        return  # no path can name it
    if isinstance(value, dict):
        for name, child in list(value.items())[:MAX_FIELDS]:
            plain = re.fullmatch(r"[A-Za-z_][\w-]*", str(name))
            quoted = str(name).replace("\\", "\\\\").replace('"', '\\"')
            _walk(child, f"{path}.{name}" if plain else f'{path}["{quoted}"]', fields, paths, steps + 1)
        return
    if path not in fields and len(fields) >= MAX_FIELDS:
        return
    if isinstance(value, list):
        seen = fields.setdefault(f"{path}[*]", FieldSeen(f"{path}[*]"))
        seen.lengths.append(len(value))
        for child in value[:1000]:
            _walk(child, f"{path}[*]", fields, paths, steps + 1)
    elif value is not None:
        seen = fields.setdefault(path, FieldSeen(path))
        paths.add(path)
        if len(seen.values) < MAX_VALUES:
            seen.values.append(value)


@dataclass(frozen=True)
class Guess:
    """A likely mapping.

    Attributes:
        mapping: ``stream.mapping`` without format and definition.
        tables: rows by table: the smallest power of two that holds the ids seen, or sixteen times the distinct texts.
        seconds: event times seen, Unix seconds.
    """

    mapping: dict[str, Any]
    tables: dict[str, int]
    seconds: tuple[float, ...]


def guess(seen: EventsSeen) -> Guess:
    """Return the likeliest mapping.

    Raises:
        StreamError: no field looks like ids.
    """
    leaves = [each for each in seen.fields.values() if each.values]
    time, unit = _time(leaves)
    ids = [each for each in leaves if each is not time and each.kind in ("int", "str", "UUID", "bytes")]
    user = _best(ids, _user_likeness)
    sample = _best(
        ids, lambda each: 0 if each.stars or each is user or each.distinct < len(seen.events) else
        bool(_SAMPLE.search(each.name)),
    )  # fmt: skip
    rows = _best([each for each in ids if each not in (user, sample)], _likeness)
    rows = rows or user
    if rows is None:
        raise StreamError("no field looks like ids", remedy="write stream.mapping by hand: docs/stream.md")
    mapping: dict[str, Any] = {}
    name = _best(
        [each for each in leaves if each.kind == "str" and each is not rows],
        lambda each: bool(_TABLE.search(each.path)) and each.distinct <= 64 and 0 < each.stars < rows.stars
        and rows.path.startswith(each.path.rpartition("[*]")[0]),
    )  # fmt: skip
    tables: dict[str, FieldSeen] = {}
    if name is not None:
        mapping |= {"table": name.path, "rows": rows.path}
        tables = dict.fromkeys(sorted(set(name.values)), rows)
    else:
        tables = {_table_name(rows): rows}
        for each in _beside(rows, [each for each in ids if each not in (rows, user, sample)]):
            tables.setdefault(_table_name(each), each)
        # A user who is often unknown has no row to count.
        if user is not None and user is not rows and user.events >= 0.99 * rows.events:
            tables.setdefault(_table_name(user), user)
        mapping["table"] = {table: each.path for table, each in tables.items()}
    if time is not None:
        mapping |= {"time": time.path} | ({} if unit is None or unit == "seconds" else {"time_unit": unit})
    mapping |= {key: each.path for key, each in (("user", user), ("sample", sample)) if each is not None}
    where = _where(seen, leaves, rows)
    if where is not None:
        mapping["where"] = where
    sizes: dict[str, int] = {}
    for table, each in tables.items():
        way, sizes[table] = _ids(each)
        if way:
            mapping.setdefault("ids", {})[table] = way
    return Guess(mapping, sizes, () if time is None else tuple(_seconds(time, unit)))


def _best(fields: Iterable[FieldSeen], score: Any) -> FieldSeen | None:
    best = max(
        ((score(each), each.events, -len(each.path), each) for each in fields), key=lambda it: it[:3], default=None
    )
    return best[3] if best is not None and best[0] else None


def _beside(rows: FieldSeen, others: Iterable[FieldSeen]) -> list[FieldSeen]:
    """Return further ids of the object that has the rows, such as an event of many features has: those whose names say
    so, lists beside a list, and names that differ by their number."""
    parent = rows.path.removesuffix("[*]").rpartition(".")[0]
    stem = re.sub(r"\d+$", "", rows.name)
    found = []
    for each in others:
        # A number for each event names nothing that is seen again.
        is_unique = each.distinct == len(each.values) > 8
        if each.path.removesuffix("[*]").rpartition(".")[0] != parent or each.distinct < 3 or is_unique:
            continue
        both_lists = rows.path.endswith("[*]") and each.path.endswith("[*]")
        is_numbered = stem != rows.name and re.fullmatch(re.escape(stem) + r"\d+", each.name)
        if both_lists or is_numbered or _ID.search(each.name):
            found.append(each)
    return found


def _user_likeness(each: FieldSeen) -> int:
    parents = each.path.rpartition(".")[0].rpartition(".")[2]
    by_name, by_parent = bool(_USER.search(each.name)), bool(_USER.search(parents))
    is_id = bool(_ID.search(each.name))
    return 0 if each.stars else 2 * (by_name or (by_parent and is_id)) + (by_name and is_id)


def _likeness(each: FieldSeen) -> float:
    """Return how much a field looks like the ids of items; 0 for what has only a few values."""
    if each.distinct < 3 and len(each.values) > 8:
        return 0
    path_says = bool(_ITEM.search(each.name)) or bool(_ITEM.search(each.path)) * 0.5
    ends = bool(_ID.search(each.name))
    is_hash = all(type(value) is str and _HASH.fullmatch(value) for value in each.values)
    return 4 * path_says + 2 * ends + is_hash + bool(each.stars) + min(each.distinct / max(len(each.values), 1), 0.9)


def _time(leaves: Iterable[FieldSeen]) -> tuple[FieldSeen | None, str | None]:
    found: list[tuple[bool, int, FieldSeen, str | None]] = []
    for each in leaves:
        unit = None if each.stars else _unit(each)
        if unit is not None:
            found.append((bool(_TIME.search(each.name)), each.events, each, unit))
    best = max(found, key=lambda it: it[:2], default=None)
    if best is None or not (best[0] or best[3] != "seconds" or _ascends(best[2].values)):
        return None, None
    return best[2], None if best[3] == "typed" else best[3]


def _ascends(values: Sequence[Any]) -> bool:
    return len(values) > 8 and values[0] < values[-1] and all(map(operator.le, values, values[1:]))


def _unit(each: FieldSeen) -> str | None:
    values = each.values
    if all(isinstance(value, datetime) or hasattr(value, "ToNanoseconds") for value in values):
        return "typed"
    if all(type(value) in (int, float) for value in values):
        middle = statistics.median(values)
        return next((unit for unit, least in _UNITS.items() if least <= middle < 4.2 * least), None)
    try:
        for value in values:
            if type(value) is not str or len(value) < 10:
                return None
            datetime.fromisoformat(value)
    except ValueError:
        return None
    return "iso8601"


def _seconds(time: FieldSeen, unit: str | None) -> Iterable[float]:
    for value in time.values:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            yield (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        elif hasattr(value, "ToNanoseconds"):
            yield value.ToNanoseconds() / 1e9
        else:
            yield value / (_UNITS[unit or "seconds"] / 1e9)


def _where(seen: EventsSeen, leaves: Iterable[FieldSeen], rows: FieldSeen) -> str | None:
    """Return a comparison that holds for the events with ids, if some have none and a field tells them apart."""
    first = rows.path.removeprefix("$.").split(".")[0].removesuffix("[*]")
    having = [bool(event.get(first)) for event in seen.events]
    if all(having):
        return None
    for each in leaves:
        name = each.path.removeprefix("$.")
        if each.kind != "str" or name not in seen.events[0] or each.distinct > 20 or not _TYPE.search(each.name):
            continue
        wanted = {event.get(name) for event, has in zip(seen.events, having, strict=True) if has}
        others = {event.get(name) for event, has in zip(seen.events, having, strict=True) if not has}
        if not wanted & others and None not in wanted:
            texts = [f'"{value}"' for value in sorted(map(str, wanted))]
            return f"{each.path} == {texts[0]}" if len(texts) == 1 else f"{each.path} in [{', '.join(texts)}]"
    return None


def _table_name(each: FieldSeen) -> str:
    parts = [part for part in re.split(r"[.\[\]*\"$]+", each.path) if part]
    name = re.sub(r"_?ids?$", "", parts[-1], flags=re.IGNORECASE)
    if len(name) < 2:
        name = parts[-2] if not name and len(parts) > 1 else parts[-1]
    return name[:64].lower()


def _ids(each: FieldSeen) -> tuple[dict[str, Any], int]:
    values = each.values
    if all(type(value) is str and re.fullmatch(r"-?[0-9]{1,18}", value) for value in values):
        return {"decimal": True}, _power(max(map(int, values)) + 1)
    if all(type(value) is int and 0 <= value < 2**40 for value in values):
        return {}, _power(max(values) + 1)
    rows = _power(16 * each.distinct)
    return {"hash": "xxh64", "modulo": rows}, rows


def _power(least: int) -> int:
    return max(1024, 1 << (max(least, 1) - 1).bit_length())
