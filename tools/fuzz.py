"""Fuzz the readers of untrusted bytes with atheris (coverage-guided) for a bounded time.

    python tools/fuzz.py decode|events|snapshot [--seconds 60] [--corpus DIR]

``decode`` and ``events`` (a mapping of every format, chosen by the first byte) may raise CodecError and ``snapshot``
SnapshotError; any other exception is a finding, which atheris prints and whose input it writes beside the corpus. The
corpus starts with valid messages of every encoding.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

# numba compiles no instrumented function.
_COMPILED = ["flexd.stream.avro.kernel"]
with atheris.instrument_imports(include=["flexd.stream", "flexd.sketch.snapshot"], exclude=_COMPILED):
    import fastavro
    import numpy as np
    import pyarrow as pa
    from google.protobuf import descriptor_pb2, timestamp_pb2

    from flexd.config.mapping import MappingConfig
    from flexd.core.errors import CodecError, SnapshotError
    from flexd.sketch import snapshot
    from flexd.stream import codec
    from flexd.stream.mapping import EventMapping
    from flexd.stream.types import AccessBatch, StreamMessage

MAX_BYTES = 2**16


def _decode(data: bytes) -> None:
    try:
        batches = codec.decode(data, MAX_BYTES)
    except CodecError as error:
        if error.reason not in codec.REASONS:
            raise RuntimeError(f"unknown reason {error.reason}") from error
        return
    for batch in batches:
        assert batch.rows.ndim == 1
        assert batch.source_rank >= 0
    if batches:
        # Encoding what was read, and reading that, gives the same.
        again = codec.decode(codec.encode_arrow(batches), 4 * MAX_BYTES)
        assert list(map(_fields, again)) == list(map(_fields, batches))


def _fields(batch: AccessBatch) -> tuple[object, ...]:
    lengths = None if batch.sequence_lengths is None else batch.sequence_lengths.tolist()
    return batch.table, batch.rows.tolist(), batch.source_rank, batch.event_time_seconds, lengths


_DIRECTORY = tempfile.TemporaryDirectory()
_SCHEMA: dict[str, Any] = {
    "type": "record", "name": "E", "fields": [
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}, "string"]},
        {"name": "user", "type": ["null", "string", "bytes", {"type": "fixed", "name": "F", "size": 2}, "double"]},
        {"name": "shown", "type": {"type": "array", "items": {"type": "record", "name": "S", "fields": [
            {"name": "table", "type": {"type": "enum", "name": "T", "symbols": ["items", "users"]}},
            {"name": "ids", "type": {"type": "array", "items": ["null", "long", "string"]}}]}}},
        {"name": "more", "type": {"type": "map", "values": ["null", "boolean"]}},
    ],
}  # fmt: skip
_EVENT = {
    "at": 1_780_000_000_000, "user": "u", "more": {"k": None},
    "shown": [{"table": "items", "ids": [1, 2, 3]}, {"table": "users", "ids": ["4", None]}],
}  # fmt: skip


def _mappings() -> list[EventMapping]:
    """Return one mapping of each format, with a filter and all kinds of fields."""
    directory = Path(_DIRECTORY.name)
    (directory / "7.avsc").write_text(json.dumps(_SCHEMA))
    (directory / "t.binpb").write_bytes(_timestamps().SerializeToString())
    paths = {
        "table": "$.shown[*].table", "rows": "$.shown[*].ids[*]", "time": "$.at", "user": "$.user",
        "time_unit": "milliseconds", "ids": {"users": {"hash": "xxh64", "modulo": 100}}, "where": '$.user != "x"',
    }  # fmt: skip
    of_protobuf = {
        "definition": str(directory / "t.binpb"), "message": "E", "table": "items", "rows": "$.shown[*].seconds",
        "time": "$.at", "user": "$.at.nanos",
    }  # fmt: skip
    given: list[dict[str, Any]] = [
        {"format": "json", **paths},
        {"format": "json", "table": "items", "rows": "$.shown[*].ids[*]", "ids": {"items": {"decimal": True}}},
        {"format": "arrow", **paths},
        {"format": "avro", "definition": str(directory / "7.avsc"), **paths},
        {"format": "avro", "definition": str(directory), **paths},
        {"format": "protobuf", **of_protobuf},
    ]
    return [EventMapping(MappingConfig(**each), MAX_BYTES) for each in given]


def _timestamps() -> descriptor_pb2.FileDescriptorSet:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="e.proto", syntax="proto3", dependency=[_TIMESTAMP])
    made = file.message_type.add(name="E")
    for number, (name, label) in enumerate({"at": kinds.LABEL_OPTIONAL, "shown": kinds.LABEL_REPEATED}.items(), 1):
        made.field.add(
            name=name, number=number, type=kinds.TYPE_MESSAGE, label=label, type_name=".google.protobuf.Timestamp"
        )
    return descriptor_pb2.FileDescriptorSet(file=[file])


_TIMESTAMP = timestamp_pb2.DESCRIPTOR.name
_MAPPINGS = _mappings()


def _read_events(data: bytes) -> None:
    mapping = _MAPPINGS[data[0] % len(_MAPPINGS)] if data else _MAPPINGS[0]
    try:
        mapping.add(StreamMessage("t/0", 5, data[1:]), 1.5)
    except CodecError as error:
        if error.reason not in codec.REASONS:
            raise RuntimeError(f"unknown reason {error.reason}") from error
    for batch in mapping.drain():
        assert batch.sequence_lengths is not None
        assert batch.sample_ids is not None
        assert batch.rows.dtype == np.int64
        assert int(batch.sequence_lengths.sum()) == len(batch.rows)
        assert len(batch.sample_ids) == len(batch.sequence_lengths)
        assert 0 <= batch.event_time_seconds <= codec.MAX_EVENT_TIME_SECONDS


def _seeds_of_events() -> list[bytes]:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(_SCHEMA), _EVENT)
    datum, line = stream.getvalue(), json.dumps(_EVENT).encode()
    sink = io.BytesIO()
    shown = [{"table": each["table"], "ids": [7]} for each in _EVENT["shown"]]  # type: ignore[attr-defined]
    batch = pa.RecordBatch.from_pylist([{"at": _EVENT["at"], "user": "u", "shown": shown}])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    protobuf = b"\x0a\x04\x08\x05\x10\x07\x12\x02\x08\x09\x12\x00"
    payloads = [(0, line), (0, b"[" + line + b"]"), (1, line + b"\n" + line), (2, sink.getvalue()), (3, datum),
                (4, b"\0\0\0\0\x07" + datum), (5, protobuf), (5, b"\0\0\0\0\x01\x00" + protobuf)]  # fmt: skip
    return [bytes([number]) + payload for number, payload in payloads]


def _read_snapshot(data: bytes) -> None:
    _SCRATCH.write_bytes(data)
    try:
        snapshot.read(_SCRATCH)
    except SnapshotError:
        return


_SCRATCH = Path(tempfile.gettempdir()) / f"flexd-fuzz-{os.getpid()}.flexd"


def _seeds(target: str) -> list[bytes]:
    rows = np.arange(40, dtype=np.int64)
    lengths = np.array([15, 25], dtype=np.int32)
    batches = [
        AccessBatch("items", rows, 3, 1.7e9, lengths),
        AccessBatch("users", rows[:7].astype(np.int32), 0, 1.7e9),
    ]
    if target == "events":
        return _seeds_of_events()
    if target == "decode":
        line = b'{"table":"items","rows":[7,8],"source_rank":0,"event_time":1.5,"sequence_lengths":[1,1],"step":3}\n'
        return [codec.encode_arrow(batches), codec.encode_arrow(batches[:1]), line, 2 * line]
    with tempfile.TemporaryDirectory() as directory:
        store = snapshot.SnapshotStore(Path(directory), 1)
        arrays = {"a": rows, "b": lengths.astype(np.uint32), "c": np.empty(0)}
        return [store.save({"positions": {"p": 5}}, arrays).read_bytes(), store.save({}, {}).read_bytes()]


TARGETS = {"decode": _decode, "events": _read_events, "snapshot": _read_snapshot}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=tuple(TARGETS))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, default=None, help="kept between runs; default: a temporary one")
    options = parser.parse_args()
    corpus = options.corpus or Path(tempfile.mkdtemp(prefix="flexd-fuzz-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(_seeds(options.target)):
        (corpus / f"seed-{options.target}-{i}").write_bytes(seed)
    arguments = [
        sys.argv[0], str(corpus), f"-max_total_time={options.seconds}", f"-max_len={MAX_BYTES}", "-timeout=10",
        "-rss_limit_mb=4096", f"-artifact_prefix={corpus}/finding-", "-print_final_stats=1",
    ]  # fmt: skip
    atheris.Setup(arguments, TARGETS[options.target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
