"""``stream.mapping``: which fields of a team's own events are tables, rows, ids and times."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from flexd.config.base import Int, Section
from flexd.stream.paths import Comparison, FieldPath


def _checked_path(value: Any) -> Any:
    if value is None:
        return value
    if not isinstance(value, str):
        raise ValueError("must be text: a path such as $.user_id")
    FieldPath.parse(value)
    return value


FieldPathText = Annotated[str | None, BeforeValidator(_checked_path)]


class IdsConfig(Section):
    """The way from the ids of a table to its rows. An integer is a row id as it is if nothing is given."""

    hash: Literal["xxh64"] | None = None
    """64-bit hash (seed 0) of the UTF-8 text, of bytes, or of an integer's 8 bytes (little-endian)."""
    decimal: bool = False
    """Ids are integers written as text."""
    vocabulary: Path | None = None
    """A file with a token in each line: the row of a token is the number of its line, from 0."""
    modulo: Annotated[Int, Field(ge=1, le=2**40)] | None = None
    """The row is the remainder of the integer or of the (unsigned) hash; without it a hash is the id itself, as
    int64."""

    @field_validator("decimal", "vocabulary")
    @classmethod
    def _one_way(cls, value: Any, info: ValidationInfo) -> Any:
        others = [name for name in ("hash", "decimal") if info.data.get(name)]
        if value and others:
            raise ValueError(f"{others[0]} is given too: give one of hash, decimal and vocabulary")
        return value


class MappingConfig(Section):
    """The team's own events: formats, and paths to the fields of an event (``$.impressions[*].item_id``). A message is
    one event or a list of them. Other fields are ignored."""

    format: Literal["json", "avro", "protobuf", "arrow"]
    """Format of a message. ``json``: an object, an array of objects, or lines of them. ``arrow``: an IPC stream of one
    record batch with an event in each row; files of Parquet are read as that. A schema registry's header is passed
    over in ``json`` and ``protobuf``."""
    definition: Annotated[str | None, Field(validate_default=True)] = None
    """Of ``avro``: a schema file, for messages without a schema registry's header; or, for messages with one, a
    directory of ``ID.avsc`` or the URL of the registry, whose references are followed. Of ``protobuf``: a descriptor
    set (``protoc --include_imports --descriptor_set_out``)."""
    message: Annotated[str | None, Field(validate_default=True)] = None
    """Of ``protobuf``: full name of the message type."""
    table: str | dict[str, str]
    """A table's name, the path of a field with it, or by table the path of its ids:
    ``{items: "$.impressions[*].item_id", users: $.user_id}``."""
    rows: Annotated[FieldPathText, Field(validate_default=True)] = None
    """Path of the ids, unless ``table`` gives it by table. The ids of the innermost list on the path are one sequence;
    an id outside of lists is a sequence of one."""
    time: str = "broker"
    """Path of the event time, or ``broker`` for the message's own timestamp. It counts to the second."""
    time_unit: Literal["seconds", "milliseconds", "microseconds", "nanoseconds", "iso8601"] = "seconds"
    """Unit of ``time``; without an offset ISO 8601 is UTC. Times that the format types as such need none."""
    sample: FieldPathText = None
    """Path of the id of the training sample (``sample_ids``). Text is hashed by xxh64."""
    user: Annotated[FieldPathText, Field(validate_default=True)] = None
    """Path of the id of the user (``user_ids``). Text is hashed by xxh64."""
    where: str | None = None
    """Events to count: ``$.type == "impression"``, ``!=`` or ``in ["a", "b"]``."""
    ids: dict[str, IdsConfig] = {}
    """By table how its ids become rows."""

    @field_validator("definition")
    @classmethod
    def _needed_definition(cls, value: str | None, info: ValidationInfo) -> str | None:
        needed = info.data.get("format") in ("avro", "protobuf")
        if needed != bool(value):
            raise ValueError("is required by avro and protobuf" if needed else "only avro and protobuf have one")
        return value

    @field_validator("message")
    @classmethod
    def _needed_message(cls, value: str | None, info: ValidationInfo) -> str | None:
        needed = info.data.get("format") == "protobuf"
        if needed != bool(value):
            raise ValueError("is required by protobuf" if needed else "only protobuf has one")
        return value

    @field_validator("table", mode="before")
    @classmethod
    def _checked_table(cls, value: Any) -> Any:
        if isinstance(value, dict) and value:
            for table, path in value.items():
                try:
                    _checked_path(path)
                except ValueError as error:
                    raise ValueError(f"table {str(table)[:80]!r}: {error}") from error
        elif isinstance(value, str) and value:
            if value.startswith("$"):
                FieldPath.parse(value)
        else:
            raise ValueError("must be a name, a path, or paths by table")
        return value

    @field_validator("rows")
    @classmethod
    def _needed_rows(cls, value: str | None, info: ValidationInfo) -> str | None:
        by_table = isinstance(info.data.get("table"), dict)
        if "table" in info.data and by_table == (value is not None):
            raise ValueError("table has the paths already" if by_table else "is required beside the name of a table")
        return value

    @field_validator("time")
    @classmethod
    def _checked_time(cls, value: str) -> str:
        return value if value == "broker" else _checked_path(value)

    @field_validator("where")
    @classmethod
    def _checked_where(cls, value: str | None) -> str | None:
        if value is not None:
            Comparison.parse(value)
        return value

    @field_validator("user")
    @classmethod
    def _beside_the_rows(cls, value: str | None, info: ValidationInfo) -> str | None:
        # Of the last of these fields: pydantic checks them in their order.
        table, rows = info.data.get("table"), info.data.get("rows")
        ids = list(table.values()) if isinstance(table, dict) else [rows] if rows else []
        given = {"user": value, "sample": info.data.get("sample"), "time": info.data.get("time")}
        if isinstance(table, str):
            given["table"] = table
        for name, path in given.items():
            if path is None or not path.startswith("$"):
                continue
            for each in ids:
                if not FieldPath.parse(path).is_beside(FieldPath.parse(each)):
                    raise ValueError(f"the lists on the way of {name}, {path}, must be those on the way to {each}")
        return value
