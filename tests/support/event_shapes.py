"""Five shapes of events as teams have them, made up in content: their messages, the mapping that a team would write,
and the same accesses by a conversion that shares no code with flexd."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastavro
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Table, rows of the sequence, whole second of the event, user.
Sequence_ = tuple[str, tuple[int, ...], int, int | None]
BEGIN = 1_780_000_000


@dataclass(frozen=True)
class Shape:
    """One topic.

    Attributes:
        messages: payloads, in order.
        mapping: ``stream.mapping``.
        tables: rows by table.
        accesses: what is to be counted.
    """

    name: str
    messages: Sequence[bytes]
    mapping: dict[str, Any]
    tables: dict[str, int]
    accesses: Sequence[Sequence_]


def xxh64(data: bytes) -> int:
    """xxHash's specification, seed 0, for inputs of any length."""
    mask, p = 2**64 - 1, (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579,
                          2870177450012600261)  # fmt: skip

    def rotated(x: int, by: int) -> int:
        return ((x << by) | (x >> (64 - by))) & mask

    def mixed(accumulator: int, lane: int) -> int:
        return rotated((accumulator + lane * p[1]) & mask, 31) * p[0] & mask

    at = 0
    if len(data) >= 32:
        lanes = [(p[0] + p[1]) & mask, p[1], 0, -p[0] & mask]
        while at + 32 <= len(data):
            for i in range(4):
                lanes[i] = mixed(lanes[i], int.from_bytes(data[at : at + 8], "little"))
                at += 8
        value = sum(rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & mask
        for lane in lanes:
            value = ((value ^ mixed(0, lane)) * p[0] + p[3]) & mask
    else:
        value = p[4]
    value = (value + len(data)) & mask
    while at + 8 <= len(data):
        value = (rotated(value ^ mixed(0, int.from_bytes(data[at : at + 8], "little")), 27) * p[0] + p[3]) & mask
        at += 8
    if at + 4 <= len(data):
        value = (rotated(value ^ int.from_bytes(data[at : at + 4], "little") * p[0] & mask, 23) * p[1] + p[2]) & mask
        at += 4
    for byte in data[at:]:
        value = rotated(value ^ byte * p[4] & mask, 11) * p[0] & mask
    value = (value ^ value >> 33) * p[1] & mask
    value = (value ^ value >> 29) * p[2] & mask
    return value ^ value >> 32


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def impressions(count: int, random: random.Random) -> Shape:
    """Nested JSON: an impression has slots, a slot has the candidates that were ranked; other types lie between."""
    messages, accesses = [], []
    for n in range(count):
        user = random.randrange(500)
        slots = [[random.randrange(2000) for _ in range(random.randrange(6))] for _ in range(random.randrange(1, 4))]
        event = {
            "type": "impression" if n % 5 else "heartbeat",
            "ts": 1000 * (BEGIN + n) + 250,
            "request_id": f"r-{n:05}",
            "user": {"id": user, "country": "de"},
            "slots": [
                {"name": f"slot {i}", "candidates": [{"item": {"id": item}, "score": 0.5} for item in items]}
                for i, items in enumerate(slots if n % 5 else ())
            ],
        }
        messages.append(json.dumps(event).encode())
        if n % 5:
            accesses += [("items", tuple(items), BEGIN + n, user) for items in slots]
            accesses.append(("users", (user,), BEGIN + n, user))
    mapping = {
        "format": "json", "table": {"items": "$.slots[*].candidates[*].item.id", "users": "$.user.id"},
        "time": "$.ts", "time_unit": "milliseconds", "user": "$.user.id", "sample": "$.request_id",
        "where": '$.type == "impression"',
    }  # fmt: skip
    return Shape("impressions", messages, mapping, {"items": 2000, "users": 500}, accesses)


BASKET = {
    "type": "record", "name": "Order", "namespace": "shop",
    "fields": [
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "customer", "type": ["null", "long"], "default": None},
        {"name": "lines", "type": {"type": "array", "items": {"type": "record", "name": "Line", "fields": [
            {"name": "sku", "type": "string"}, {"name": "quantity", "type": "int"}]}}},
    ],
}  # fmt: skip


def framed(number: int, datum: bytes) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + datum


def avro(schema: Any, record: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), record)
    return stream.getvalue()


def baskets(count: int, random: random.Random, directory: Path) -> Shape:
    """Avro with a registry's header: article numbers are text, a customer may be unknown."""
    (directory / "7.avsc").write_text(json.dumps(BASKET))
    messages, accesses = [], []
    for n in range(count):
        customer = random.randrange(300) if n % 4 else None
        skus = [f"SKU-{random.randrange(900)}" for _ in range(random.randrange(1, 9))]
        lines = [{"sku": sku, "quantity": 1} for sku in skus]
        messages.append(framed(7, avro(BASKET, {"at": 1000 * (BEGIN + n) + 999, "customer": customer, "lines": lines})))
        accesses.append(("skus", tuple(xxh64(sku.encode()) % 4096 for sku in skus), BEGIN + n, customer))
    mapping = {
        "format": "avro", "definition": str(directory), "table": "skus", "rows": "$.lines[*].sku", "time": "$.at",
        "user": "$.customer", "ids": {"skus": {"hash": "xxh64", "modulo": 4096}},
    }  # fmt: skip
    return Shape("baskets", messages, mapping, {"skus": 4096}, accesses)


def view_type() -> tuple[bytes, Any]:
    """Return the descriptor set of ``media.View``, and its class."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="view.proto", package="media", syntax="proto3")
    feature = file.message_type.add(name="Feature")
    feature.field.add(name="name", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    feature.field.add(name="ids", number=2, type=kinds.TYPE_INT64, label=kinds.LABEL_REPEATED)
    view = file.message_type.add(name="View")
    view.field.add(name="at_us", number=1, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    view.field.add(name="member", number=2, type=kinds.TYPE_UINT64, label=kinds.LABEL_OPTIONAL)
    view.field.add(
        name="features", number=3, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_REPEATED, type_name=".media.Feature"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("media.View"))
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString(), made


def views(count: int, random: random.Random, directory: Path) -> Shape:
    """Protobuf: the names of features are data."""
    descriptors, make = view_type()
    (directory / "view.binpb").write_bytes(descriptors)
    messages, accesses = [], []
    for n in range(count):
        member = random.randrange(1, 2**40)
        features = {name: [random.randrange(1000) for _ in range(random.randrange(5))] for name in ("videos", "tags")}
        view = make(at_us=1_000_000 * (BEGIN + n) + 7, member=member)
        for name, ids in features.items():
            view.features.add(name=name, ids=ids)
            accesses.append((name, tuple(ids), BEGIN + n, member))
        messages.append(view.SerializeToString())
    mapping = {
        "format": "protobuf", "definition": str(directory / "view.binpb"), "message": "media.View",
        "table": "$.features[*].name", "rows": "$.features[*].ids[*]", "time": "$.at_us",
        "time_unit": "microseconds", "user": "$.member",
    }  # fmt: skip
    return Shape("views", messages, mapping, {"videos": 1000, "tags": 1000}, accesses)


def clicks(count: int, random: random.Random) -> Shape:
    """A click log: ids and sessions are text, times ISO 8601 with an offset, several lines in a message."""
    lines, accesses = [], []
    for n in range(count):
        ad, session = f"ad/{random.randrange(700)}", f"{random.randrange(2**64):016x}"
        hour, minute = divmod(n // 60, 60)
        stamp = f"2026-06-01T{hour + 2:02}:{minute:02}:{n % 60:02}.125+02:00"
        lines.append(json.dumps({"@timestamp": stamp, "session": session, "ad": ad, "ip": "::1"}).encode())
        second = 1_780_272_000 + n  # 2026-06-01T00:00:00Z
        accesses.append(("ads", (xxh64(ad.encode()) % 1024,), second, signed(xxh64(session.encode()))))
    mapping = {
        "format": "json", "table": {"ads": "$.ad"}, "time": '$["@timestamp"]', "time_unit": "iso8601",
        "user": "$.session", "ids": {"ads": {"hash": "xxh64", "modulo": 1024}},
    }  # fmt: skip
    messages = [b"\n".join(lines[i : i + 3]) for i in range(0, count, 3)]
    return Shape("clicks", messages, mapping, {"ads": 1024}, accesses)


def single_ids(count: int, random: random.Random) -> Shape:
    """A message for each id, with the id as text."""
    ids = [random.randrange(3000) for _ in range(count)]
    messages = [json.dumps({"item": str(item), "at": BEGIN + n}).encode() for n, item in enumerate(ids)]
    accesses = [("items", (item,), BEGIN + n, None) for n, item in enumerate(ids)]
    mapping = {
        "format": "json", "table": "items", "rows": "$.item", "time": "$.at", "ids": {"items": {"decimal": True}},
    }  # fmt: skip
    return Shape("single ids", messages, mapping, {"items": 3000}, accesses)


MAKERS: dict[str, Callable[[int, random.Random, Path], Shape]] = {
    "impressions": lambda count, random, _: impressions(count, random),
    "baskets": baskets,
    "views": views,
    "clicks": lambda count, random, _: clicks(count, random),
    "single_ids": lambda count, random, _: single_ids(count, random),
}


def shape(name: str, directory: Path, count: int = 200) -> Shape:
    return MAKERS[name](count, random.Random(name), directory)
