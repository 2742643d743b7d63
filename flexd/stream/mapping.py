"""Access batches from a team's own events: which fields are tables, rows, ids and times (``stream.mapping``)."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flexd.core.arrays import Int32Array, Int64Array, places_of_runs
from flexd.stream import codec
from flexd.stream.formats import MAX_PARSED_BYTES, Getter, Reader, Steps, composed, make_reader
from flexd.stream.ids import TableIds, make_hash
from flexd.stream.paths import Comparison, FieldPath
from flexd.stream.types import AccessBatch, StreamMessage

if TYPE_CHECKING:
    from flexd.config.mapping import MappingConfig

_PER_SECOND = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9, "iso8601": 0.0}
_UNREADABLE = (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError)
# Tables that a message's field may name until the batches are drained.
_MAX_TABLES = 4096


@dataclass
class _Collected:
    """Sequences of one table: their ids, and for each its length, time, sample, and user (None: unknown)."""

    table: str
    ids: TableIds
    rows: array[int]
    lengths: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    users: list[int | None] = field(default_factory=list)


class _Fault(NamedTuple):
    """A value that cannot be read: one of ``codec.REASONS``, the path, and what is wrong."""

    reason: str
    path: str
    problem: str


def _fault(error: Exception, path: FieldPath) -> _Fault:
    if isinstance(error, _BadTimeError):
        return _Fault("bad_event_time", path.text, str(error))
    # A field of null is missing as well.
    if isinstance(error, LookupError) or "NoneType" in str(error):
        return _Fault("missing_field", path.text, f"there is no {error}"[:200])
    return _Fault("wrong_type", path.text, str(error)[:200])


class _BadTimeError(ValueError):
    pass


_REMEDIES = {
    "bad_event_time": "set stream.mapping.time_unit",
    "missing_field": "correct the path, or leave such events out with stream.mapping.where",
    "unknown_id": "write the vocabulary anew",
    "wrong_type": "say in stream.mapping.ids how text becomes rows, or correct the path",
}


# What is known of an event, or of an element of it: a list with these places. ``EVENT`` is the id of a sample without
# one of its own.
TIME, USER, SAMPLE, EVENT, TABLE = range(5)
_PLACES = {"time": TIME, "user": USER, "sample": SAMPLE, "table": TABLE}


class _Ids(NamedTuple):
    """The path to ids: the getter of each list on the way, and the steps from an element of the last one to its id."""

    path: FieldPath
    getters: tuple[Getter, ...]
    steps: Steps
    # None where a field names it.
    table: str | None
    # The level from which on each element is a sequence of its own, else that of the innermost list.
    sequence_level: int


class _Attribute(NamedTuple):
    """A field of an event beside its ids."""

    place: int
    getter: Getter
    convert: Callable[[Any], Any]
    path: FieldPath


class EventMapping:
    """The ``Decoder`` of a mapping. See ``flexd.stream.types.Decoder`` for the contract.

    Event times count to the second, so that the accesses of many small messages are counted together.

    An id that cannot be read is left out and counted by its path; so is a table's list that is missing, or an event
    without a time. A message of which nothing can be read is refused.

    Attributes:
        filtered: events that ``where`` leaves out.

    Raises:
        ConfigError: a definition or a vocabulary cannot be used.
        MissingExtraError: a package of the format is not installed.
    """

    def __init__(self, config: MappingConfig, max_message_bytes: int, reader: Reader | None = None) -> None:
        self.unread: Mapping[tuple[str, str], int] = Counter()
        self.filtered = 0
        # Arrow's columns take about what their message takes.
        self._max_bytes = max_message_bytes if config.format == "arrow" else min(max_message_bytes, MAX_PARSED_BYTES)
        self._reader = reader or make_reader(config)
        self._hash = make_hash()
        self._partitions: dict[str, int] = {}
        self._per_second = _PER_SECOND[config.time_unit]
        self._ids = {table: TableIds(**ids.model_dump()) for table, ids in config.ids.items()}
        self._integers = TableIds()
        self._is_wanted = None if config.where is None else _filter(Comparison.parse(config.where), self._reader)
        given = {
            "table": config.table if isinstance(config.table, str) and config.table.startswith("$") else None,
            "time": None if config.time == "broker" else config.time,
            "sample": config.sample,
            "user": config.user,
        }
        paths = {name: FieldPath.parse(text) for name, text in given.items() if text is not None}
        at = {name: path.stars for name, path in paths.items()}
        # Of samples without an id.
        self._names_samples = "sample" not in paths
        convert = {"time": self._seconds, "table": self._checked_table, "sample": self._id, "user": self._user}
        # By the level of a field's innermost list.
        self._attributes = [
            [
                _Attribute(_PLACES[name], composed(self._reader.steps(path)[level]), convert[name], path)
                for name, path in paths.items()
                if path.stars == level
            ]
            for level in range(1 + max(at.values(), default=0))
        ]
        by_table = config.table if isinstance(config.table, dict) else {config.table: config.rows or "$"}
        self._targets = []
        for table, text in by_table.items():
            path = FieldPath.parse(text)
            level = max(path.stars - 1, max(at.values(), default=0))
            steps = self._reader.steps(path)
            name = None if "table" in at else table
            self._targets.append(_Ids(path, tuple(map(composed, steps)), steps[-1], name, level))
        self._collected: dict[str, _Collected] = {}

    def add(self, message: StreamMessage, arrival_seconds: float) -> None:
        payload = message.payload
        if len(payload) > self._max_bytes:
            codec.fail("too_large", f"{len(payload)} bytes, at most {self._max_bytes} are read")
        stamp = message.timestamp_seconds
        first = self._name(message) if self._names_samples else 0
        known: list[Any] = [arrival_seconds if stamp is None else stamp, None, None, first, None]
        faults: list[_Fault] = []
        found, is_wanted = 0, self._is_wanted
        events = self._reader.events(payload if type(payload) is bytes else bytes(payload))
        for event in events:
            if is_wanted is not None and not is_wanted(event):
                self.filtered += 1
                found += 1
            elif (attributes := self._read_attributes(event, 0, known, faults)) is not None:
                for target in self._targets:
                    found += self._descend(target, event, 0, attributes, faults)
            if first and len(events) > 1:
                first = known[EVENT] = _mixed(first)
        if faults:
            # A new mapping each time: another thread may be reading the one before.
            self.unread = Counter(self.unread) + Counter((fault.reason, fault.path) for fault in faults)
            if not found:
                fault = faults[0]
                codec.fail(fault.reason, f"{fault.path}: {fault.problem}", _REMEDIES.get(fault.reason, ""))

    def _name(self, message: StreamMessage) -> int:
        """Return the id of the first sample of a message."""
        known = self._partitions.get(message.partition)
        if known is None:
            if len(self._partitions) >= _MAX_TABLES:
                self._partitions.clear()
            known = self._partitions[message.partition] = self._hash(message.partition)
        return _mixed(known + message.offset)

    def drain(self) -> list[AccessBatch]:
        collected, self._collected = self._collected, {}
        return [batch for each in collected.values() if each.lengths for batch in _batches(each)]

    def _read_attributes(self, node: Any, level: int, known: list[Any], faults: list[_Fault]) -> list[Any] | None:
        """Return ``known`` with the attributes that lie at this level. None: the time or the table cannot be read."""
        known = known.copy()
        for place, getter, convert, path in self._attributes[level]:
            try:
                known[place] = convert(getter(node))
            except _UNREADABLE as error:
                faults.append(_fault(error, path))
                if place in (TIME, TABLE):
                    return None
        return known

    def _id(self, value: Any) -> int:
        if value is None:
            raise KeyError("value: null")
        return value if type(value) is int and -(2**63) <= value < 2**63 else self._hash(value)

    def _user(self, value: Any) -> int | None:
        """Visitors without an account are events like others."""
        return None if value is None else self._id(value)

    def _seconds(self, value: Any) -> float:
        kind, per_second = type(value), self._per_second
        if (kind is int or kind is float) and per_second:
            seconds: float = value / per_second
        elif isinstance(value, datetime):
            seconds = _unix_seconds(value)
        elif kind is str and not per_second:
            try:
                seconds = _unix_seconds(datetime.fromisoformat(value))
            except (ValueError, OverflowError) as error:
                raise _BadTimeError(str(error)[:200]) from error
        elif hasattr(value, "ToNanoseconds"):
            seconds = value.ToNanoseconds() / 1e9
        else:
            raise TypeError(f"{kind.__name__} where a time was expected")
        # In this form the comparison fails for NaN too.
        if not 0 <= seconds <= codec.MAX_EVENT_TIME_SECONDS:
            raise _BadTimeError(f"{str(value)[:40]} is no time in the unit of stream.mapping.time_unit")
        return seconds

    def _checked_table(self, value: Any) -> str:
        if type(value) is not str or not 0 < len(value) <= codec.MAX_TABLE_NAME_CHARS:
            raise TypeError(f"{str(value)[:40]!r} where the name of a table was expected")
        if value not in self._collected and len(self._collected) >= _MAX_TABLES:
            raise ValueError(f"more than {_MAX_TABLES} tables at once")
        return value

    def _descend(self, target: _Ids, node: Any, level: int, known: list[Any], faults: list[_Fault]) -> int:
        """Collect the sequences below a node at that level. Return how many could be read."""
        is_innermost = level == target.sequence_level
        try:
            below = target.getters[level](node)
            if level == target.path.stars:
                return self._collect(target, [below], (), known, faults)
            if type(below) is not list:
                if isinstance(below, str | bytes | dict):
                    raise TypeError(f"{type(below).__name__} where a list was expected")
                below = list(below)
        except _UNREADABLE as error:
            faults.append(_fault(error, target.path))
            return 0
        if is_innermost:
            return self._collect(target, below, target.steps, known, faults)
        found = 0 if below else 1
        level += 1
        has_attributes = level < len(self._attributes)
        for number, element in enumerate(below):
            of_element = self._read_attributes(element, level, known, faults) if has_attributes else known
            if of_element is not None:
                if self._names_samples:
                    of_element = of_element.copy()
                    of_element[EVENT] = _mixed(of_element[EVENT] + number)
                found += self._descend(target, element, level, of_element, faults)
        return found

    def _collect(self, target: _Ids, values: list[Any], steps: Steps, known: list[Any], faults: list[_Fault]) -> int:
        """Collect one sequence: ``values``, or of each of them the field at the end of the steps."""
        table = target.table or known[TABLE]
        to = self._collected.get(table) or self._of_table(table)
        rows = to.rows
        before, each = len(rows), values
        for step in steps:
            each = map(step, each)  # type: ignore[assignment]
        try:
            to.ids.extend(rows, each)
        except _UNREADABLE:
            self._collect_each(target, to, values, composed(steps), faults)
            if len(rows) == before:
                return 0
        time, user, sample, event, _ = known
        to.lengths.append(len(rows) - before)
        to.seconds.append(time)
        to.samples.append(event if sample is None else sample)
        to.users.append(user)
        return 1

    def _collect_each(
        self, target: _Ids, to: _Collected, values: list[Any], getter: Getter, faults: list[_Fault]
    ) -> None:
        """Collect the ids of a sequence that can be read."""
        for value in values:
            try:
                found = getter(value)
                if found is None:
                    raise KeyError("value: null")
            except _UNREADABLE as error:
                faults.append(_fault(error, target.path))
                continue
            try:
                to.rows.append(to.ids.convert(found))
            except KeyError:
                faults.append(_Fault("unknown_id", target.path.text, f"{str(found)[:40]!r} is in no line"))
            except _UNREADABLE as error:
                faults.append(_Fault("wrong_type", target.path.text, str(error)[:200]))

    def _of_table(self, table: str) -> _Collected:
        ids = self._ids.get(table, self._integers)
        known = self._collected[table] = _Collected(table, ids, ids.collector())
        return known


def _filter(where: Comparison, reader: Reader) -> Callable[[Any], bool]:
    get, holds = composed(reader.steps(where.path)[0]), where.predicate()

    def is_wanted(event: Any) -> bool:
        try:
            found = get(event)
        except _UNREADABLE:
            found = None
        return holds(found)

    return is_wanted


def _unix_seconds(time: datetime) -> float:
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _mixed(number: int) -> int:
    """Return another int64: of the ids of samples that have none of their own."""
    return ((number * 0x9E3779B97F4A7C15 + 1) & (2**64 - 1)) - 2**63


def _batches(collected: _Collected) -> list[AccessBatch]:
    rows = collected.ids.rows(collected.rows)
    lengths, samples = np.array(collected.lengths, dtype=np.int32), np.array(collected.samples, dtype=np.int64)
    known = np.array([user is not None for user in collected.users])
    users = np.array([user or 0 for user in collected.users], dtype=np.int64)
    # One batch for each second, and in it for sequences with and without users.
    keys = 2 * np.floor(np.array(collected.seconds)).astype(np.int64) + known
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    order = np.argsort(keys, kind="stable")
    firsts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    return [
        _batch(collected.table, int(keys[chosen[0]]), chosen, rows, starts, lengths, samples, users)
        for chosen in np.split(order, firsts[1:])
    ]


def _batch(
    table: str, key: int, chosen: Int64Array, rows: Int64Array, starts: Int64Array, lengths: Int32Array,
    samples: Int64Array, users: Int64Array,
) -> AccessBatch:  # fmt: skip
    mine = lengths[chosen]
    return AccessBatch(
        table, rows if len(chosen) == len(lengths) else rows[places_of_runs(starts[chosen], mine)], -1, float(key >> 1),
        mine, None, samples[chosen], users[chosen] if key & 1 else None,
    )  # fmt: skip
