"""``stream.mapping``: events of five shapes, every format alike, ids, and what cannot be read."""

import io
import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from flexd.config.mapping import MappingConfig
from flexd.core.errors import CodecError, ConfigError, MissingExtraError
from flexd.stream import codec, formats
from flexd.stream.file_source import FileSource
from flexd.stream.ids import TableIds, make_hash
from flexd.stream.mapping import EventMapping
from flexd.stream.types import AccessBatch, StreamMessage
from tests.support import event_shapes
from tests.support.event_shapes import avro, framed, signed, xxh64

LIMIT = 2**24


def mapping(**given: Any) -> EventMapping:
    return EventMapping(MappingConfig(**{"format": "json", "table": "items", "rows": "$.ids[*]", **given}), LIMIT)


def read(decoder: EventMapping, *payloads: bytes, at: float = 50.0) -> list[AccessBatch]:
    for offset, payload in enumerate(payloads):
        decoder.add(StreamMessage("t/0", offset, payload), at)
    return decoder.drain()


def sequences(batches: list[AccessBatch]) -> Counter[event_shapes.Sequence_]:
    found: Counter[event_shapes.Sequence_] = Counter()
    for batch in batches:
        assert batch.sequence_lengths is not None
        ends = np.cumsum(batch.sequence_lengths)
        for number, rows in enumerate(np.split(batch.rows, ends[:-1])):
            user = None if batch.user_ids is None else int(batch.user_ids[number])
            found[batch.table, tuple(rows.tolist()), int(batch.event_time_seconds), user] += 1
    return found


def refused(decoder: EventMapping, payload: bytes) -> CodecError:
    with pytest.raises(CodecError) as caught:
        read(decoder, payload)
    assert caught.value.reason in codec.REASONS
    assert decoder.drain() == []
    return caught.value


@pytest.mark.parametrize("name", event_shapes.MAKERS)
def test_five_shapes_are_read_as_an_independent_conversion_does(name, tmp_path):
    shape = event_shapes.shape(name, tmp_path)
    batches = read(EventMapping(MappingConfig(**shape.mapping), LIMIT), *shape.messages)
    assert sequences(batches) == Counter(shape.accesses)


EVENTS = [
    {"at": 1_780_000_000 + n // 3, "user": 7 + n, "key": f"k{n}", "ids": [n, 2 * n, 3 * n][: n % 4]} for n in range(12)
]
SCHEMA = {
    "type": "record", "name": "E", "fields": [
        {"name": "at", "type": "long"}, {"name": "user", "type": "long"}, {"name": "key", "type": "string"},
        {"name": "ids", "type": {"type": "array", "items": "long"}},
    ],
}  # fmt: skip


def protobuf(directory: Path) -> tuple[dict[str, str], list[bytes]]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="e.proto", syntax="proto3")
    made = file.message_type.add(name="E")
    for number, (name, kind) in enumerate({"at": 3, "user": 3, "key": 9, "ids": 3}.items(), 1):
        label = kinds.LABEL_REPEATED if name == "ids" else kinds.LABEL_OPTIONAL
        made.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    (directory / "e.binpb").write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    make = message_factory.GetMessageClass(pool.FindMessageTypeByName("E"))
    given = {"format": "protobuf", "definition": str(directory / "e.binpb"), "message": "E"}
    return given, [make(**event).SerializeToString() for event in EVENTS]


def in_every_format(directory: Path) -> dict[str, tuple[dict[str, str], list[bytes]]]:
    (directory / "e.avsc").write_text(json.dumps(SCHEMA))
    (directory / "ids").mkdir()
    (directory / "ids" / "3.avsc").write_text(json.dumps(SCHEMA))
    table = pa.Table.from_pylist(EVENTS)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_batch(table.to_batches()[0])
    lines = [json.dumps(event).encode() for event in EVENTS]
    data = [avro(SCHEMA, event) for event in EVENTS]
    given, messages = protobuf(directory)
    return {
        "json": ({"format": "json"}, lines),
        "json arrays": ({"format": "json"}, [b"[" + b",".join(lines[:5]) + b"]", b"[" + b",".join(lines[5:]) + b"]"]),
        "json of a registry": ({"format": "json"}, [framed(9, line) for line in lines]),
        "avro": ({"format": "avro", "definition": str(directory / "e.avsc")}, data),
        "avro of a registry": (
            {"format": "avro", "definition": str(directory / "ids")},
            [framed(3, each) for each in data],
        ),
        "protobuf": (given, messages),
        "protobuf of a registry": (given, [framed(1, b"\0" + each) for each in messages]),
        "protobuf, the second type of a registry": (given, [framed(1, b"\x02\x02" + each) for each in messages]),
        "arrow": ({"format": "arrow"}, [sink.getvalue()]),
    }


def test_the_same_events_in_every_format_give_the_same_batches(tmp_path):
    paths = {"time": "$.at", "user": "$.user", "sample": "$.key"}
    seen = {
        name: read(mapping(**given, **paths), *payloads)
        for name, (given, payloads) in in_every_format(tmp_path).items()
    }
    for name, batches in seen.items():
        assert len(batches) == 4, name
        for found, wanted in zip(batches, seen["json"], strict=True):
            assert (found.table, found.source_rank, found.event_time_seconds) == (
                "items",
                -1,
                wanted.event_time_seconds,
            )
            for each in ("rows", "sequence_lengths", "sample_ids", "user_ids"):
                np.testing.assert_array_equal(getattr(found, each), getattr(wanted, each), f"{name}: {each}")
    assert seen["json"][0].sample_ids.tolist() == [signed(xxh64(f"k{n}".encode())) for n in range(3)]
    assert sum(sequences(seen["json"]).values()) == len(EVENTS)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow stream", "lines"])
def test_files_give_the_same_batches_and_can_be_read_on(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("flexd.stream.file_source.ROWS_OF_MESSAGE", 5)
    table, file = pa.Table.from_pylist(EVENTS), tmp_path / "events"
    if kind == "parquet":
        pa.parquet.write_table(table, file, row_group_size=4)
    elif kind == "lines":
        file.write_text("".join(json.dumps(event) + "\n\n" for event in EVENTS))
    else:
        make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with make(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    paths = {"format": "json" if kind == "lines" else "arrow", "time": "$.at", "user": "$.user"}
    wanted = sequences(read(mapping(**{**paths, "format": "json"}), *(json.dumps(event).encode() for event in EVENTS)))
    source = FileSource(file)
    messages = source.poll(0.0)
    assert source.poll(0.0) == []
    assert source.lag() == 0
    assert sequences(read(mapping(**paths), *(each.payload for each in messages))) == wanted
    again = FileSource(file)
    again.restore({file.name: messages[1].offset})
    rest = again.poll(0.0)
    assert [(each.offset, each.payload) for each in rest] == [(each.offset, each.payload) for each in messages[1:]]
    assert again.positions() == source.positions()
    source.close()
    again.close()


def test_ids_as_they_are():
    texts = ["", "a", "item-1", "ü", "3f2504e0-4f89-11d3-9a0c-0305e82c3301", "x" * 100]
    hashed = make_hash()
    assert [hashed(text) for text in texts] == [signed(xxh64(text.encode())) for text in texts]
    assert hashed(-5) == signed(xxh64(struct.pack("<q", -5)))
    # Of xxHash's own test vectors.
    assert (hashed(b"") % 2**64, hashed("abc") % 2**64) == (0xEF46DB3751D8E999, 0x44BC2CF5AD770999)

    def rows(values: list[Any], **given: Any) -> list[int]:
        ids = TableIds(**given)
        collected = ids.collector()
        ids.extend(collected, values)
        assert [ids.convert(value) for value in values] == list(collected)
        return ids.rows(collected).tolist()

    assert rows(texts, hash="xxh64", modulo=1000) == [xxh64(text.encode()) % 1000 for text in texts]
    assert rows(texts, hash="xxh64") == [signed(xxh64(text.encode())) for text in texts]
    assert rows(["7", "-3", "0012"], decimal=True) == [7, -3, 12]
    # As TorchRec's data sets and its users bring integers into a table.
    numbers = [0, 5, 10**15, -1, -(2**62) - 1]
    assert rows(numbers, modulo=97) == torch.remainder(torch.tensor(numbers), 97).tolist()


def test_a_vocabulary_gives_the_rows_of_recboles_token_ids(tmp_path):
    """RecBole numbers tokens by first appearance, behind a token for padding: its ``field2id_token`` is the file."""
    tokens = ["B003", "A1", "ü"]
    (tmp_path / "items.txt").write_text("\n".join(["[PAD]", *tokens]) + "\n", encoding="utf-8")
    decoder = mapping(ids={"items": {"vocabulary": tmp_path / "items.txt"}})
    (batch,) = read(decoder, json.dumps({"ids": ["ü", "A1", "new", "B003"]}).encode())
    assert batch.rows.tolist() == [3, 2, 1]
    assert decoder.unread == {("unknown_id", "$.ids[*]"): 1}
    (tmp_path / "items.txt").write_text("a\na\n")
    with pytest.raises(ConfigError, match="a token twice"):
        mapping(ids={"items": {"vocabulary": tmp_path / "items.txt"}})


def test_what_is_missing_or_of_a_wrong_type_is_counted_by_path_and_the_rest_is_read():
    decoder = mapping(table={"items": "$.shown[*].id", "users": "$.user"}, rows=None, time="$.at", sample="$.key")
    events = [
        {"at": 9.5, "key": 1, "user": 4, "shown": [{"id": 1}, {}, {"id": None}, {"id": "x"}, {"id": 2}, 3, None]},
        {"at": 9, "key": None, "user": None, "shown": []},
        {"key": 3, "user": 5, "shown": [{"id": 9}]},
        {"at": 1_780_000_000_000, "user": 6, "shown": {}},
        {"at": "2026-01-01", "user": 7},
        {"at": 9, "user": 2**63, "shown": {"id": 1}},
    ]
    batches = read(decoder, json.dumps(events).encode())
    assert sequences(batches) == {("items", (1, 2), 9, None): 1, ("items", (), 9, None): 1, ("users", (4,), 9, None): 1}
    assert decoder.unread == {
        ("missing_field", "$.shown[*].id"): 3, ("wrong_type", "$.shown[*].id"): 3, ("missing_field", "$.user"): 1,
        ("missing_field", "$.at"): 1, ("bad_event_time", "$.at"): 1, ("wrong_type", "$.at"): 1,
        ("wrong_type", "$.user"): 1, ("missing_field", "$.key"): 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("payload", "reason", "says", "remedy"),
    [
        (b"", "empty", "no bytes", ""),
        (b'{"ids": [1], "at"', "bad_json", "", ""),
        (b"\xef\xbb\xbf{}", "corrupt", "byte-order mark", "UTF-8 without one"),
        (b"\x1f\x8b\x08", "corrupt", "gzip data", "compression.type"),
        (b"17", "wrong_type", "$ is int", ""),
        (b'{"ids": 5, "at": 5}', "wrong_type", "$.ids[*]: ", "stream.mapping.ids"),
        (b'{"ids": "12", "at": 5}', "wrong_type", "$.ids[*]: str where a list", ""),
        (b'{"ids": [1.5, "a"], "at": 5}', "wrong_type", "$.ids[*]: ", ""),
        (b'{"ids": [18446744073709551615], "at": 5}', "wrong_type", "beyond 64 bits", ""),
        (b'{"id": [1], "at": 5}', "missing_field", "$.ids[*]: ", "correct the path"),
        (b'{"ids": [1], "at": 1780000000000}', "bad_event_time", "$.at: ", "time_unit"),
        (b'{"ids": [1], "at": -1}', "bad_event_time", "$.at: ", "time_unit"),
        (b"[" * 100_000, "bad_json", "", ""),
        (b"[" + b"{}," * 65_536 + b"{}]", "too_many_entries", "65537 events", ""),
        (b" " * (formats.MAX_PARSED_BYTES + 1), "too_large", "at most 2097152", ""),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_read_is_refused_with_reason_path_and_remedy(payload, reason, says, remedy):
    found = refused(mapping(time="$.at"), payload)
    assert (found.reason, says in found.message, remedy in found.remedy) == (reason, True, True), found


def test_filters_and_the_messages_own_time():
    decoder = mapping(where='$.type in ["view", "click"]')
    lines = [{"type": "view", "ids": [1]}, {"type": "ping"}, {}, {"type": "click", "ids": [2]}]
    assert sequences(read(decoder, json.dumps(lines).encode(), at=77.9)) == {
        ("items", (1,), 77, None): 1, ("items", (2,), 77, None): 1,
    }  # fmt: skip
    assert (decoder.filtered, decoder.unread) == (2, {})
    decoder.add(StreamMessage("t/0", 9, b'{"type": "view", "ids": [3]}', None, 60.0), 99.0)
    assert [batch.event_time_seconds for batch in decoder.drain()] == [60.0]
    kept = mapping(where="$.test != true")
    assert len(read(kept, b'[{"ids": [1]}, {"ids": [2], "test": true}]')[0].rows) == 1


def test_tables_of_one_event_are_one_sample_and_other_events_are_others():
    decoder = mapping(table={"items": "$.ids[*]", "users": "$.user"}, rows=None)
    items, users = read(decoder, b'[{"ids": [1, 2], "user": 4}, {"ids": [3], "user": 4}]', b'{"ids": [1], "user": 4}')
    assert items.sample_ids.tolist() == users.sample_ids.tolist()
    assert len(set(items.sample_ids.tolist())) == 3


def test_a_visitor_without_an_account_is_no_user_and_nothing_is_counted_as_unread():
    decoder = mapping(user="$.user")
    batches = read(decoder, b'[{"ids": [1], "user": null}, {"ids": [2], "user": 4}]')
    assert sequences(batches) == {("items", (1,), 50, None): 1, ("items", (2,), 50, 4): 1}
    assert not decoder.unread


def test_a_hostile_schema_or_column_is_refused_before_a_message_can_use_it(tmp_path):
    loop = {"type": "record", "name": "N", "namespace": "a", "fields": [{"name": "next", "type": ["null", "a.N"]}]}
    nothing = {"type": "array", "items": {"type": "record", "name": "Z", "fields": [{"name": "z", "type": "null"}]}}
    for schema, says in ((loop, "holds itself"), (nothing, "without bytes"), ("no such type", "no schema")):
        (tmp_path / "s.avsc").write_text(json.dumps(schema))
        with pytest.raises(ConfigError, match=says):
            mapping(format="avro", definition=str(tmp_path / "s.avsc"))
    (tmp_path / "s.avsc").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        mapping(format="avro", definition=str(tmp_path / "s.avsc"))
    many = pa.array([[None] * 5000], type=pa.list_(pa.null()))
    text = pa.array(["long" * 50] * 40).dictionary_encode()
    for column, reason in ((many, "too_large"), (text, "wrong_schema")):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, pa.schema([("ids", column.type)])) as writer:
            writer.write_batch(pa.record_batch([column], names=["ids"]))
        assert refused(mapping(format="arrow"), sink.getvalue()).reason == reason
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, pa.schema([("ids", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch([pa.array([1])], names=["ids"]))
    assert refused(mapping(format="arrow"), sink.getvalue().replace(b"ids", b"\x96ds")).reason == "corrupt"


def test_registered_schemas_are_fetched_once_and_unknown_ones_not_again_for_a_while(tmp_path, monkeypatch):
    decoder = mapping(format="avro", definition=str(tmp_path), time="$.at")
    datum = avro(SCHEMA, EVENTS[3])
    found = refused(decoder, framed(3, datum))
    assert (found.reason, "schema 3: there is no" in found.message) == ("unknown_schema", True)
    (tmp_path / "3.avsc").write_text(json.dumps(SCHEMA))
    assert refused(decoder, framed(3, datum)).reason == "unknown_schema"
    schemas = decoder._reader._schemas
    monkeypatch.setattr(schemas, "_clock", lambda: 1e9)
    assert len(read(decoder, framed(3, datum))) == 1
    (tmp_path / "3.avsc").unlink()
    assert len(read(decoder, framed(3, datum))) == 1
    for payload, says in (
        (framed(3, datum + b"\0"), "bytes behind the record"),
        (framed(3, datum[:2]), "no record of the schema"),
        (b'{"ids": [1]}', "not with a schema registry's header"),
        (b"", "no bytes"),
    ):
        assert says in refused(decoder, payload).message
    (tmp_path / "one.avsc").write_text(json.dumps(SCHEMA))
    of_file = mapping(format="avro", definition=str(tmp_path / "one.avsc"), time="$.at")
    found = refused(of_file, framed(3, datum))
    assert ("header (schema 3)" in found.message, "registry's URL" in found.remedy) == (True, True)


def test_a_path_that_the_protobuf_type_lacks_and_a_package_that_is_missing_are_named(tmp_path, monkeypatch):
    given, _ = protobuf(tmp_path)
    with pytest.raises(ConfigError, match=r"\$\.item: E has no field 'item' there") as caught:
        mapping(**given, rows="$.item")
    assert "at, ids, key, user" in caught.value.remedy
    with pytest.raises(ConfigError, match="no message type 'F'"):
        mapping(**{**given, "message": "F"})
    monkeypatch.setitem(__import__("sys").modules, "orjson", None)
    with pytest.raises(MissingExtraError, match="needs orjson") as missing:
        mapping()
    assert missing.value.remedy == "pip install 'flexd[stream-formats]'"
