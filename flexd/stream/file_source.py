"""Read the events of one file once: Parquet, Arrow, or lines of text. For ``advise``, ``simulate`` and replays."""

from __future__ import annotations

import base64
import binascii
import io
import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from flexd.core.errors import StreamError
from flexd.stream.types import Positions, RefusedMessages, Source, StreamMessage

ROWS_OF_MESSAGE = 4096
MAX_LINE_BYTES = 16 * 2**20
_POLL_MESSAGES, _POLL_BYTES = 2000, 8 * 2**20
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"Obj\x01": "an Avro container", b"PK\x03\x04": "zip"}


class FileSource(Source):
    """Deliver a file's events up to its end. See ``Source`` for the contract.

    Parquet and Arrow become messages of Arrow's stream format with up to ``ROWS_OF_MESSAGE`` events; their offset is
    the number of the first row. A line is a message; its offset is where it begins, in bytes. Nothing that is appended
    later is read.

    Args:
        is_base64: lines hold messages that are no text, in base64.

    Raises:
        StreamError: the file cannot be read, or is packed.
    """

    def __init__(self, path: Path, *, is_base64: bool = False) -> None:
        self._path = path
        self._is_base64 = is_base64
        self._next: int | None = None
        self._at_end = False
        try:
            with path.open("rb") as file:
                self._head = file.read(4)
        except OSError as error:
            raise StreamError(f"{path}: cannot be read: {error.strerror}", remedy="give a readable file") from error
        for first, what in _PACKED.items():
            if self._head.startswith(first):
                raise StreamError(
                    f"{path}: is {what}", remedy="unpack it: text, Parquet and Arrow files are read"
                )  # fmt: skip
        self._messages = self._read(0)

    def poll(self, timeout_seconds: float) -> list[StreamMessage | RefusedMessages]:
        if self._at_end:
            time.sleep(timeout_seconds)
            return []
        taken: list[StreamMessage | RefusedMessages] = []
        size = 0
        try:
            for message in itertools.islice(self._messages, _POLL_MESSAGES):
                taken.append(message)
                size += len(message.payload)
                if size >= _POLL_BYTES:
                    break
            else:
                self._at_end = len(taken) < _POLL_MESSAGES
        except (pa.ArrowException, OSError, ValueError) as error:
            raise StreamError(
                f"{self._path}: cannot be read on: {str(error)[:200]}", remedy="write the file anew"
            ) from error
        return taken

    def restore(self, positions: Mapping[str, int]) -> None:
        self._next = positions.get(self._path.name)
        self._at_end = False
        self._messages = self._read(self._next or 0)

    def positions(self) -> Positions:
        return {} if self._next is None else {self._path.name: self._next}

    def lag(self) -> int:
        return 0 if self._at_end else 1

    def close(self) -> None:
        self._messages.close()
        self._at_end = True

    def _read(self, start: int) -> Any:
        if self._head == b"PAR1" or self._head in (b"ARRO", b"\xff\xff\xff\xff"):
            return self._read_rows(start)
        return self._read_lines(start)

    def _read_rows(self, start: int) -> Iterator[StreamMessage]:
        first = 0
        for batch in self._batches():
            for part in range(0, batch.num_rows, ROWS_OF_MESSAGE):
                rows = batch.slice(part, ROWS_OF_MESSAGE)
                self._next, offset = max(first + rows.num_rows, start), first
                first += rows.num_rows
                if first > start:
                    yield StreamMessage(self._path.name, offset, _plain_bytes(rows))

    def _batches(self) -> Iterator[pa.RecordBatch]:
        if self._head == b"PAR1":
            with pyarrow.parquet.ParquetFile(self._path) as file:
                yield from file.iter_batches(batch_size=ROWS_OF_MESSAGE, use_threads=False)
        elif self._head == b"ARRO":
            with pa.ipc.open_file(self._path) as reader:
                yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            with pa.ipc.open_stream(self._path) as reader:
                yield from reader

    def _read_lines(self, start: int) -> Iterator[StreamMessage | RefusedMessages]:
        with self._path.open("rb") as file:
            file.seek(start)
            while line := file.readline(MAX_LINE_BYTES):
                size = len(line)
                while line[-1:] != b"\n" and (rest := file.readline(MAX_LINE_BYTES)):
                    size, line = size + len(rest), line[:4096] + rest[-1:]
                self._next = file.tell()
                yield from self._line(line, self._next - size, size)

    def _line(self, line: bytes, offset: int, size: int) -> Iterator[StreamMessage | RefusedMessages]:
        name = self._path.name
        if size > MAX_LINE_BYTES:
            detail = f"a line of {size} bytes, {MAX_LINE_BYTES} allowed"
            yield RefusedMessages(name, offset, offset, "batch_too_large", detail, line[:4096], size)
        elif line.strip():
            try:
                payload = base64.b64decode(line.strip(), validate=True) if self._is_base64 else line.rstrip(b"\r\n")
            except binascii.Error as error:
                yield RefusedMessages(name, offset, offset, "corrupt_batch", f"no base64: {error}", line[:4096], size)
            else:
                yield StreamMessage(name, offset, payload)


def _plain_bytes(rows: pa.RecordBatch) -> bytes:
    """Return a batch as a message, with dictionaries of values replaced by the values."""
    columns = [column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in rows.columns]
    plain = pa.RecordBatch.from_arrays(columns, names=rows.schema.names)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_batch(plain)
    return sink.getvalue()
