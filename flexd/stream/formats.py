"""Formats of a team's own events: each has a ``Reader``, which parses a message into its events with a well-kept
library and says how a field of an event is reached.

For any bytes, memory is bounded by a multiple of the message's size, which ``MAX_PARSED_BYTES`` bounds: libraries bound
the depth (1,000 levels in JSON, 100 in Protobuf), and a schema of Avro whose values could be deep, or many without
bytes, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from flexd.core.errors import ConfigError
from flexd.stream import codec
from flexd.stream.avro.decoder import ITEMS, Decoder
from flexd.stream.avro.schema import Type
from flexd.stream.paths import FieldPath
from flexd.stream.schemas import HEADER_BYTES, MAX_DEFINITION_BYTES, MAX_SCHEMAS, AvroSchemas, import_extra

if TYPE_CHECKING:
    from flexd.config.mapping import MappingConfig

# A parsed event can take two hundred times its bytes (an Avro record of one Boolean value), so that a mapped message
# has a limit of its own.
MAX_PARSED_BYTES = 2 * 2**20
MAX_EVENTS = codec.MAX_ENTRIES

# Returns a field of a node. Raises KeyError if it is missing, TypeError or AttributeError if the node is no record.
Getter = Callable[[Any], Any]
# One after another: kept apart, so that ``map`` runs each over a list without a statement of Python.
Steps = tuple[Getter, ...]


class Reader(Protocol):
    """A format. Belongs to one thread."""

    def events(self, payload: bytes) -> Sequence[Any]:
        """Parse the events of one message.

        Raises:
            CodecError: ``reason`` is one of ``codec.REASONS``.
        """

    def steps(self, path: FieldPath) -> tuple[Steps, ...]:
        """Return for each segment of a path the way from a node to its field.

        Raises:
            ConfigError: the format's definition has no such field.
        """


def make_reader(config: MappingConfig) -> Reader:
    """Return the reader of a format.

    Raises:
        ConfigError: the definition cannot be used, or a package is not installed.
    """
    if config.format == "json":
        return JsonReader()
    if config.format == "arrow":
        return ArrowReader()
    assert config.definition is not None  # noqa: S101 - checked by the configuration
    if config.format == "avro":
        return AvroReader(AvroSchemas(config.definition))
    return ProtobufReader(Path(config.definition), config.message or "")


def key_steps(path: FieldPath) -> tuple[Steps, ...]:
    """Return the steps of events that are dictionaries."""
    return tuple(tuple(map(itemgetter, segment)) for segment in path.segments)


def composed(steps: Steps) -> Getter:
    """Return one function for steps."""
    if len(steps) == 1:
        return steps[0]

    def get(node: Any) -> Any:
        for step in steps:
            node = step(node)
        return node

    return get


class JsonReader:
    """An object, an array of objects, or lines of objects; also behind a schema registry's header."""

    def __init__(self) -> None:
        self._loads = import_extra("orjson").loads

    def events(self, payload: bytes) -> Sequence[Any]:
        if payload.startswith(b"\0"):
            payload = payload[HEADER_BYTES:]
        try:
            found = self._loads(payload)
        except ValueError as error:
            codec.refuse_head(payload, usual=b"[")
            lines = [line for line in payload.split(b"\n") if line.strip()]
            if len(lines) < 2:
                codec.fail("bad_json", str(error)[:200])
            try:
                found = list(map(self._loads, lines))
            except ValueError as of_line:
                codec.fail("bad_json", str(of_line)[:200])
        return [found] if type(found) is dict else _checked_events(found)

    def steps(self, path: FieldPath) -> tuple[Steps, ...]:
        return key_steps(path)


def _checked_events(found: Any) -> list[Any]:
    if type(found) is not list:
        codec.fail("wrong_type", f"$ is {type(found).__name__}, an object or an array is read")
    if len(found) > MAX_EVENTS:
        codec.fail("too_many_entries", f"{len(found)} events, {MAX_EVENTS} are read")
    return found


class AvroReader:
    """One datum per message, by a schema file, or by the schema that a registry's header names. Only fields that a path
    names are read, or all if none does."""

    def __init__(self, schemas: AvroSchemas) -> None:
        self._schemas = schemas
        self._wanted: dict[str, Any] | None = None
        self._head_bytes = 0 if schemas.by_id is None else HEADER_BYTES
        # By the header.
        self._decoders: dict[bytes, Decoder] = {}
        # Compiled before the first message: it takes seconds, or little with numba's cache.
        Decoder(Type("boolean"), None).read(b"\0", 0)

    def events(self, payload: bytes) -> Sequence[Any]:
        head = payload[: self._head_bytes]
        decoder = self._decoders.get(head)
        try:
            if decoder is None or not payload:
                decoder = self._decoder(payload, head)
            found, end = decoder.read(payload, len(head))
        except ValueError as error:
            self._refuse(payload, str(error)[:200])
        if end != len(payload):
            self._refuse(payload, f"{len(payload) - end} bytes behind the record")
        return _checked_events(found) if type(found) is list else [found]

    def _decoder(self, payload: bytes, head: bytes) -> Decoder:
        schema = self._schemas.of(payload)
        if len(self._decoders) >= MAX_SCHEMAS:
            self._decoders.clear()
        decoder = self._decoders[head] = Decoder(schema, self._wanted)
        return decoder

    def _refuse(self, payload: bytes, problem: str) -> NoReturn:
        what, remedy = "", "compare the schema with the producer's"
        if self._schemas.by_id is None and payload[:1] == b"\0":
            number = int.from_bytes(payload[1:HEADER_BYTES], "big")
            what = f"; it begins with a schema registry's header (schema {number})"
            remedy = "give stream.mapping.definition as the registry's URL or a directory of ID.avsc"
        codec.fail("corrupt", f"no record of the schema: {problem}{what}", remedy)

    def steps(self, path: FieldPath) -> tuple[Steps, ...]:
        at = self._wanted = {} if self._wanted is None else self._wanted
        for number, segment in enumerate(path.segments):
            for name in (ITEMS, *segment) if number else segment:
                at = at.setdefault(name, {})
        return key_steps(path)


class ArrowReader:
    """Arrow's stream format with one record batch, an event in each row. Only columns that a path names are read."""

    def __init__(self) -> None:
        self._columns: set[str] = set()

    def events(self, payload: bytes) -> Sequence[Any]:
        batch = codec.read_record_batch(payload, MAX_EVENTS)
        try:
            # Arrow checks neither the text of names nor that of values.
            wanted = [name for name in batch.schema.names if name in self._columns or not self._columns]
            chosen = batch.select(list(dict.fromkeys(wanted)))
            codec.check_nesting(chosen, len(payload))
            events: list[Any] = chosen.to_pylist()
        except (ValueError, OverflowError, KeyError) as error:
            codec.fail("corrupt", str(error)[:200])
        return events if wanted else [{}] * len(chosen)

    def steps(self, path: FieldPath) -> tuple[Steps, ...]:
        self._columns.update(path.segments[0][:1])
        return key_steps(path)


class ProtobufReader:
    """One message of a type of a descriptor set; also behind a schema registry's header.

    A field without presence (a plain scalar of proto3) that is not set has its default value, which is what the
    producer means by not setting it.
    """

    def __init__(self, file: Path, message: str) -> None:
        import_extra("google.protobuf")
        # Registered in the default pool, from which a descriptor set may leave them out.
        from google.protobuf import (
            descriptor_pb2,
            descriptor_pool,
            duration_pb2,
            message_factory,
            struct_pb2,
            timestamp_pb2,
            wrappers_pb2,
        )
        from google.protobuf.message import DecodeError

        self._error = DecodeError
        pool = descriptor_pool.DescriptorPool()
        known = [each.DESCRIPTOR for each in (duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)]
        try:
            with file.open("rb") as opened:
                raw = opened.read(MAX_DEFINITION_BYTES + 1)
            if len(raw) > MAX_DEFINITION_BYTES:
                raise ValueError(f"more than {MAX_DEFINITION_BYTES} bytes")
            files = list(descriptor_pb2.FileDescriptorSet.FromString(raw).file)
            given = {each.name for each in files}
            for each in known:
                if each.name not in given:
                    pool.AddSerializedFile(each.serialized_pb)
            for proto in files:
                pool.Add(proto)
            self._descriptor = pool.FindMessageTypeByName(message)
        except KeyError as error:
            raise ConfigError(
                f"stream.mapping.message: {file} has no message type {message!r}",
                remedy="give the full name: package, dot, type",
            ) from error
        except (OSError, DecodeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"stream.mapping.definition: {file} is no descriptor set: {str(error)[:200]}",
                remedy="write it with protoc --include_imports --descriptor_set_out=FILE",
            ) from error
        self._parse = message_factory.GetMessageClass(self._descriptor).FromString

    def events(self, payload: bytes) -> Sequence[Any]:
        # No message begins with a zero byte: there is no field 0.
        if payload[:1] == b"\0":
            payload = _behind_header(payload)
        try:
            return [self._parse(payload)]
        except self._error as error:
            codec.refuse_head(payload)
            codec.fail("corrupt", f"no {self._descriptor.full_name}: {str(error)[:200]}")

    def steps(self, path: FieldPath) -> tuple[Steps, ...]:
        node, found = self._descriptor, []
        for segment in path.segments:
            fields = []
            for name in segment:
                field = None if node is None else node.fields_by_name.get(name)
                if field is None:
                    known = "nothing" if node is None else ", ".join(sorted(node.fields_by_name)[:20])
                    raise ConfigError(
                        f"stream.mapping: {path.text}: {self._descriptor.full_name} has no field {name!r} there",
                        remedy=f"there is: {known}",
                    )
                fields.append(field)
                node = field.message_type
            found.append(_by_fields(fields))
        return tuple(found)


def _by_fields(fields: Sequence[Any]) -> Steps:
    if fields and not any(field.has_presence for field in fields):
        return (attrgetter(".".join(field.name for field in fields)),)
    return tuple(_present(field.name) if field.has_presence else attrgetter(field.name) for field in fields)


def _present(name: str) -> Getter:
    def get(node: Any) -> Any:
        if not node.HasField(name):
            raise KeyError(name)
        return getattr(node, name)

    return get


def _behind_header(payload: bytes) -> bytes:
    """Return what is behind a registry's header and its message indexes: a zig-zag count and as many numbers, where a
    count of 0 stands for the first message type."""
    at, left = HEADER_BYTES, 1
    count_known = False
    while left and at < len(payload):
        number = shift = 0
        while at < len(payload) and shift < 35:
            byte = payload[at]
            at, number, shift = at + 1, number | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
        left -= 1
        if not count_known:
            left, count_known = min(number >> 1, 64), True
    return payload[at:]
