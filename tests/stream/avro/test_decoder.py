"""Data of any schema are read as fastavro reads them, and damaged ones are refused."""

import contextlib
import io
import json
import re
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.stream.avro import kernel
from flexd.stream.avro.decoder import ITEMS, Decoder
from flexd.stream.avro.schema import parse
from tests.support.event_shapes import avro

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text("a\u00df\U0001d11e", max_size=5)
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(), "int": st.integers(-(2**31), 2**31 - 1), "long": INT64,
    "float": st.floats(width=32, allow_nan=False), "double": st.floats(allow_nan=False), "bytes": st.binary(max_size=9),
    "string": TEXT,
}  # fmt: skip
LOGICAL = {
    "timestamp-millis": st.integers(-(10**12), 10**13), "timestamp-micros": st.integers(-(10**15), 10**16),
    "local-timestamp-micros": st.integers(-(10**15), 10**16),
    "uuid": st.uuids(),
}  # fmt: skip


@st.composite
def schemas(draw: st.DrawFn, level: int = 0, names: list[str] | None = None) -> tuple[Any, st.SearchStrategy[Any]]:
    """A schema and a strategy for its data."""
    names = [] if names is None else names
    kinds = ["scalar", "logical", "enum", "fixed"] + ["record", "array", "map", "union"] * (level < 3)
    kind = draw(st.sampled_from(kinds if level else ["record", "record", "array"]))
    names.append(f"n{len(names)}")
    name = names[-1]
    if kind == "scalar":
        scalar = draw(st.sampled_from(sorted(SCALARS)))
        return scalar, SCALARS[scalar]
    if kind == "logical":
        logical = draw(st.sampled_from(sorted(LOGICAL)))
        return {"type": "string" if logical == "uuid" else "long", "logicalType": logical}, LOGICAL[logical]
    if kind == "enum":
        return {"type": "enum", "name": name, "symbols": ["A", "B"]}, st.sampled_from("AB")
    if kind == "fixed":
        return {"type": "fixed", "name": name, "size": 3}, st.binary(min_size=3, max_size=3)
    if kind == "record":
        parts = [draw(schemas(level + 1, names)) for _ in range(draw(st.integers(1, 4)))]
        fields = [{"name": f"f{i}", "type": part} for i, (part, _) in enumerate(parts)]
        data = st.fixed_dictionaries({f"f{i}": each for i, (_, each) in enumerate(parts)})
        return {"type": "record", "name": name, "fields": fields}, data
    part, data = draw(schemas(level + 1, names))
    if kind == "array":
        return {"type": "array", "items": part}, st.lists(data, max_size=5)
    if kind == "map":
        return {"type": "map", "values": part}, st.dictionaries(TEXT, data, max_size=3)
    if isinstance(part, list):
        return part, data
    return ["null", part], st.none() | data


def read(schema: Any, data: bytes, wanted: Any = None) -> Any:
    found, end = Decoder(parse(schema), wanted).read(b"\0" + data, 1)
    assert end == 1 + len(data)
    return found


def as_flexd(value: Any) -> Any:
    """As flexd has them: the text of a UUID is not parsed, and a local time is taken as UTC."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    if isinstance(value, dict):
        return {key: as_flexd(each) for key, each in value.items()}
    return [as_flexd(each) for each in value] if isinstance(value, list) else value


@settings(deadline=None)  # the kernel is compiled
@given(st.data())
def test_any_datum_is_read_as_fastavro_reads_it_and_damaged_ones_are_refused(data: st.DataObject) -> None:
    schema, values = data.draw(schemas())
    raw = avro(schema, data.draw(values))
    wanted = fastavro.schemaless_reader(io.BytesIO(raw), fastavro.parse_schema(json.loads(json.dumps(schema))))
    assert read(schema, raw) == as_flexd(wanted)
    decoder = Decoder(parse(schema), None)
    for cut in range(len(raw)):
        with pytest.raises(ValueError, match="the message ends in"):
            decoder.read(raw[:cut], 0)
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4)) if raw else 0):
        damaged[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    # The interpreter checks bounds, where compiled code would write outside.
    decoder._make_room(len(damaged))
    with contextlib.suppress(OverflowError):  # its numbers are longer
        kernel.read.py_func(bytes(damaged), 0, *decoder._arguments)
    try:
        _, end = decoder.read(bytes(damaged), 0)
    except ValueError:
        return
    assert 0 <= end <= len(raw)


EVENT = {
    "type": "record", "name": "E", "namespace": "shop.v1", "fields": [
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "key", "type": {"type": "fixed", "name": "Key", "size": 16, "logicalType": "uuid"}},
        {"name": "who", "type": ["null", {"type": "record", "name": "Who", "fields": [
            {"name": "id", "type": "long"}, {"name": "note", "type": "string"}, {"name": "gone", "type": "null"}]}]},
        {"name": "by", "type": ["string", "Who"]},
        {"name": "tags", "type": {"type": "map", "values": "long"}},
        {"name": "rows", "type": {"type": "array", "items": {"type": "record", "name": "shop.Row", "fields": [
            {"name": "ids", "type": {"type": "array", "items": "long"}}, {"name": "score", "type": "float"}]}}},
    ],
}  # fmt: skip
DATUM = {
    "at": datetime(2026, 1, 2, tzinfo=UTC), "key": UUID(int=5).bytes, "who": {"id": 7, "note": "x", "gone": None},
    "by": {"id": 8, "note": "", "gone": None}, "tags": {"a": 1, "b": 2},
    "rows": [{"ids": [1, 2], "score": 0.5}, {"ids": [], "score": 1.0}, {"ids": [3], "score": 2.0}],
}  # fmt: skip


def test_only_what_is_asked_for_is_read() -> None:
    raw = avro(EVENT, DATUM)

    def of(*names: str, **deeper: Any) -> Any:
        return read(EVENT, raw, {**{key: {} for key in names}, **deeper})

    assert of("at", "key") == {"at": DATUM["at"], "key": UUID(int=5)}
    assert of(who={"id": {}}, by={"id": {}}) == {"who": {"id": 7}, "by": {"id": 8}}
    assert of(rows={ITEMS: {"ids": {ITEMS: {}}}}) == {"rows": [{"ids": [1, 2]}, {"ids": []}, {"ids": [3]}]}
    assert of(tags={"a": {}}) == {"tags": {"a": 1, "b": 2}}
    # What is no list, or lacks the field, is there for the mapping to complain of.
    assert of("tags", "rows", "who", "nowhere") == {"tags": {}, "rows": [], "who": {}}
    assert of(who={"gone": {}}, rows={ITEMS: {"nowhere": {}}}) == {"who": {}, "rows": [{}, {}, {}]}
    assert read(EVENT, avro(EVENT, DATUM | {"by": "me", "who": None}), {"by": {"id": {}}, "who": {"id": {}}}) == {
        "by": "me", "who": None,
    }  # fmt: skip
    # The events of an array are its items.
    assert read({"type": "array", "items": EVENT}, avro({"type": "array", "items": EVENT}, [DATUM] * 2), {
        "who": {"note": {}}
    }) == [{"who": {"note": "x"}}] * 2  # fmt: skip


def test_the_most_values_that_a_message_can_have_fit() -> None:
    names = [f"f{n}" for n in range(40)]
    fixed: list[Any] = [{"name": name, "type": {"type": "fixed", "name": name, "size": 1}} for name in names]
    last = {"name": "r", "type": {"type": "record", "name": "R", "fields": [{"name": "a", "type": "long"}]}}
    decoder = Decoder(
        parse({"type": "record", "name": "T", "fields": [*fixed, last]}), {**dict.fromkeys(names), "r": {}}
    )
    data = bytes(40)
    decoder._make_room(len(data))
    assert kernel.read.py_func(data, 0, *decoder._arguments) == kernel.SHORT


def test_blocks_with_their_size_in_bytes_and_values_of_more_than_a_message_had_before() -> None:
    longs = {"type": "array", "items": "long"}
    # Two items with the size, one without: -2, 2 bytes, 1, 2; 1, 3; the end.
    assert read(longs, bytes([3, 4, 2, 4, 2, 6, 0])) == [1, 2, 3]
    decoder = Decoder(parse(longs), None)
    for count in (3, 100_000, 5):
        values = list(range(-count, count))
        assert decoder.read(avro(longs, values), 0)[0] == values


@pytest.mark.parametrize(
    ("schema", "data", "says"),
    [
        ("long", b"\xff" * 10 + b"\x01", "a number has more than 10 bytes in the datum, from byte 0"),
        ("string", b"\x01", "a length is negative in the datum"),
        ("string", b"\xfe" + b"\xff" * 8 + b"\x01", "the message ends in the datum"),
        ("string", b"\x04\xff\xff", "utf-8"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x02", "no such symbol of the enumeration"),
        (["null", "long"], b"\x04", "no such branch of the union"),
        ({"type": "array", "items": "long"}, b"\xfe" + b"\xff" * 8 + b"\x01", "the message ends"),
        # The least int64, which has no opposite.
        ({"type": "array", "items": "long"}, b"\xff" * 9 + b"\x01\x00", "a length is negative"),
        ({"type": "map", "values": "long"}, b"\x02\x03", "a length is negative"),
        ({"type": "record", "name": "R", "fields": [{"name": "s", "type": {"type": "record", "name": "S", "fields": [
            {"name": "a", "type": "long"}, {"name": "b", "type": "double"}]}}]},
         b"\x02\x00\x00", "the message ends in b, from byte 1"),
    ],
)  # fmt: skip
def test_why_a_datum_is_refused(schema: Any, data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Decoder(parse(schema), None).read(data, 0)
    if isinstance(schema, dict) and schema["type"] == "record":
        with pytest.raises(ValueError, match=re.escape(says)):
            Decoder(parse(schema), {}).read(data, 0)


def test_a_number_that_is_no_time_is_left_to_the_mapping() -> None:
    schema = {"type": "long", "logicalType": "timestamp-millis"}
    assert read(schema, avro("long", 2**62)) == 2**62
    assert read(schema, avro("long", -1)) == datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC)
    days = {"type": "int", "logicalType": "date"}
    assert read(days, avro("int", 1)) == datetime(1970, 1, 2, tzinfo=UTC)


def nested(levels: int) -> Any:
    schema: Any = "long"
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("Nothing", "'Nothing' is no type"), (5, "'5' is no type"), ({"type": "record", "name": "R"}, "no fields"),
        ({"type": "fixed", "name": "F", "size": -1}, "no size"), ({"type": "enum", "name": "E"}, "no symbols"),
        ({"type": "enum", "symbols": []}, "no name"), (nested(32), "more than 32 levels"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "long"}] * 2}, "a field twice"),
        ([{"type": "fixed", "name": "F", "size": 1}] * 2, "defined twice"),
    ],
)  # fmt: skip
def test_why_a_schema_is_refused(schema: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(schema)
    assert parse(nested(31)).levels == 32


def test_names_are_those_of_their_namespace_and_references_come_first() -> None:
    line = {"type": "record", "name": "Line", "namespace": "shop", "fields": [{"name": "id", "type": "long"}]}
    other = {"type": "record", "name": "Line", "fields": [{"name": "text", "type": "string"}]}
    order = {"type": "record", "name": "shop.Order", "fields": [
        {"name": "a", "type": "Line"}, {"name": "b", "type": "shop.Line"},
        {"name": "c", "type": {"type": "record", "name": "Bare", "namespace": "", "fields": [
            {"name": "d", "type": "Line"}]}}]}  # fmt: skip
    found = parse(order, [line, other])
    a, b, c = found.inner
    assert (a.names, b.names, c.inner[0].names) == (["id"], ["id"], ["text"])


def test_a_wide_schema_is_read_where_little_is_asked_of_it() -> None:
    part: Any = "long"
    for level in range(13):
        part = {"type": "record", "name": f"R{level}", "fields": [
            {"name": "a", "type": part}, {"name": "b", "type": f"R{level - 1}" if level else "long"}]}  # fmt: skip
    type_ = parse(part)
    with pytest.raises(ValueError, match="more than 4096 fields"):
        Decoder(type_, None)
    assert Decoder(type_, {"a": {"b": {}}}).read(b"\x02" * 2**13, 0) == ({"a": {"b": {}}}, 2**13)
