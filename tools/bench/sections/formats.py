"""Ids a second of events in a team's own format, beside the library that parses them, on one core.

Messages of 50 ids as topics have them: nested JSON (an impression of 50 candidates with position and score), Avro with
a registry's header (flat, and that impression), Protobuf. flexd reads Avro itself, beside fastavro. Both read the same
bytes in turns in one process, by its CPU time; medians.
"""

from __future__ import annotations

import io
import json
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from flexd.config.mapping import MappingConfig
from flexd.daemon.daemon import keep_freed_memory
from flexd.stream.mapping import EventMapping
from flexd.stream.types import StreamMessage
from tools.bench.harness import Outcome, at_least, in_turns, timed

MESSAGE_IDS = 50
HEADER = b"\0" + (7).to_bytes(4, "big")
SCHEMA: dict[str, Any] = {
    "type": "record", "name": "View",
    "fields": [
        {"name": "at", "type": "long"}, {"name": "user", "type": "long"},
        {"name": "ids", "type": {"type": "array", "items": "long"}},
    ],
}  # fmt: skip


NESTED: dict[str, Any] = {
    "type": "record", "name": "Impression",
    "fields": [
        {"name": "type", "type": "string"}, {"name": "at", "type": "long"},
        {"name": "user", "type": {"type": "record", "name": "User", "fields": [
            {"name": "id", "type": "long"}, {"name": "country", "type": "string"}]}},
        {"name": "candidates", "type": {"type": "array", "items": {"type": "record", "name": "Candidate", "fields": [
            {"name": "item_id", "type": "long"}, {"name": "position", "type": "int"},
            {"name": "score", "type": "double"}]}}},
    ],
}  # fmt: skip


def _events(count: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    ids = random.integers(0, 10_000_000, (count, MESSAGE_IDS)).tolist()
    users = random.integers(0, 1_000_000, count).tolist()
    return [{"at": 1_780_000_000 + n // 500, "user": users[n], "ids": ids[n]} for n in range(count)]


def _impression(event: dict[str, Any]) -> dict[str, Any]:
    candidates = [{"item_id": item, "position": n, "score": item / 10_000_000} for n, item in enumerate(event["ids"])]
    user = {"id": event["user"], "country": "de"}
    return {"type": "impression", "at": event["at"], "user": user, "candidates": candidates}


def _avro(events: list[dict[str, Any]], schema: Any, directory: Path) -> tuple[list[bytes], Callable[[bytes], Any]]:
    """Write a directory of schemas. Return the messages, and the library's own parsing of one."""
    directory.mkdir()
    (directory / "7.avsc").write_text(json.dumps(schema))
    parsed = fastavro.parse_schema(schema)
    messages = []
    for event in events:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, event)
        messages.append(HEADER + stream.getvalue())

    def read(payload: bytes) -> Any:
        stream = io.BytesIO(payload)
        stream.seek(len(HEADER))
        return fastavro.schemaless_reader(stream, parsed)

    return messages, read


def _protobuf() -> tuple[bytes, Any]:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="view.proto", syntax="proto3")
    view = file.message_type.add(name="View")
    for number, name in enumerate(("at", "user", "ids"), 1):
        label = kinds.LABEL_REPEATED if name == "ids" else kinds.LABEL_OPTIONAL
        view.field.add(name=name, number=number, type=kinds.TYPE_INT64, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    make = message_factory.GetMessageClass(pool.FindMessageTypeByName("View"))
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString(), make


def _cases(directory: Path, count: int) -> dict[str, tuple[dict[str, Any], list[bytes], Callable[[bytes], Any]]]:
    """Return for each format the mapping, the messages, and the library's own parsing of one."""
    events = _events(count)
    impressions = list(map(_impression, events))
    descriptors, make = _protobuf()
    (directory / "view.binpb").write_bytes(descriptors)

    flat = {"table": "items", "rows": "$.ids[*]", "time": "$.at", "user": "$.user"}
    nested = {**flat, "rows": "$.candidates[*].item_id", "user": "$.user.id", "where": '$.type == "impression"'}
    protobuf = {**flat, "format": "protobuf", "definition": str(directory / "view.binpb"), "message": "View"}
    return {
        "nested JSON": (
            {**nested, "format": "json"},
            [json.dumps(each).encode() for each in impressions],
            orjson.loads,
        ),
        "Avro": (
            {**flat, "format": "avro", "definition": str(directory / "flat")},
            *_avro(events, SCHEMA, directory / "flat"),
        ),
        "nested Avro": (
            {**nested, "format": "avro", "definition": str(directory / "nested")},
            *_avro(impressions, NESTED, directory / "nested"),
        ),
        "Protobuf": (protobuf, [make(**event).SerializeToString() for event in events], make.FromString),
    }


def _count(mapping: EventMapping, messages: list[StreamMessage]) -> None:
    for message in messages:
        mapping.add(message, 0.0)
    assert sum(len(batch.rows) for batch in mapping.drain()) == MESSAGE_IDS * len(messages), mapping.unread


def _parse(parse: Callable[[bytes], Any], payloads: list[bytes]) -> None:
    for payload in payloads:
        parse(payload)


def section(options: Namespace) -> Outcome:
    keep_freed_memory()  # as the daemon does
    count, rounds = (2_000, 5) if options.quick else (10_000, 9)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, (given, payloads, parse) in _cases(Path(directory), count).items():
            mapping = EventMapping(MappingConfig(**given), 2**24)
            messages = [StreamMessage("t/0", n, payload) for n, payload in enumerate(payloads)]
            runs = {"mapped": partial(_count, mapping, messages), "bare": partial(_parse, parse, payloads)}
            clocked = {each: partial(timed, run, time.process_time) for each, run in runs.items()}
            seconds = {each: statistics.median(found) for each, found in in_turns(clocked, rounds).items()}
            figures[name] = {
                "mapped, million ids per second": MESSAGE_IDS * count / seconds["mapped"] / 1e6,
                "bare parsing, million ids per second": MESSAGE_IDS * count / seconds["bare"] / 1e6,
                "share of bare parsing": seconds["bare"] / seconds["mapped"],
            }
    checks = [
        at_least("nested JSON, million ids per second", figures["nested JSON"]["mapped, million ids per second"], 1.0),
        at_least("nested JSON, share of bare parsing", figures["nested JSON"]["share of bare parsing"], 0.5),
        at_least("Avro, million ids per second", figures["Avro"]["mapped, million ids per second"], 5.0),
        at_least("Avro, share of bare parsing", figures["Avro"]["share of bare parsing"], 0.5),
    ]
    return Outcome(figures, checks)
