"""The stream functions of ``torch.cuda`` without a GPU, recording which thread queues what on which stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch


class RecordedStreams:
    """Stands in for ``torch.cuda``'s streams and events.

    Attributes:
        calls: (thread, operation, stream or event it is called on, argument), in order.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, str]] = []
        self._streams = 0
        self._events = 0
        self._current = threading.local()

    def record(self, operation: str, on: object, argument: object = "") -> None:
        self.calls.append((threading.current_thread().name, operation, str(on), str(argument)))

    def of(self, operation: str) -> list[tuple[str, str, str]]:
        """Return (thread, stream or event, argument) of the calls of one operation."""
        return [(thread, on, argument) for thread, name, on, argument in self.calls if name == operation]

    def current(self, device: object = None) -> RecordedStream:
        del device
        return getattr(self._current, "stream", None) or self.default()

    def default(self, device: object = None) -> RecordedStream:
        del device
        return RecordedStream(self, "default")

    @contextmanager
    def use(self, stream: RecordedStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = self.current()
        self._current.stream = stream
        yield
        self._current.stream = before

    def new_stream(self, device: object = None) -> RecordedStream:
        del device
        self._streams += 1
        return RecordedStream(self, f"stream {self._streams}")

    def new_event(self, **_: Any) -> RecordedEvent:
        self._events += 1
        return RecordedEvent(self, f"event {self._events}")

    @contextmanager
    def running(self) -> Iterator[RecordedStreams]:
        with ExitStack() as stack:
            for name, function in (
                ("Stream", self.new_stream), ("Event", self.new_event), ("stream", self.use),
                ("current_stream", self.current), ("default_stream", self.default),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(torch.cuda, name, function))
            streams = self

            def record_stream(tensor: torch.Tensor, stream: object) -> None:
                streams.record("record_stream", tuple(tensor.shape), stream)

            stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", record_stream))
            yield self


class RecordedStream:
    def __init__(self, streams: RecordedStreams, name: str) -> None:
        self._streams, self._name = streams, name

    def __str__(self) -> str:
        return self._name

    def wait_event(self, event: object) -> None:
        self._streams.record("wait_event", self, event)

    def wait_stream(self, stream: object) -> None:
        self._streams.record("wait_stream", self, stream)

    def synchronize(self) -> None:
        self._streams.record("synchronize", self)


class RecordedEvent:
    def __init__(self, streams: RecordedStreams, name: str) -> None:
        self._streams, self._name = streams, name

    def __str__(self) -> str:
        return self._name

    def record(self, stream: object = None) -> None:
        self._streams.record("record", self, stream or self._streams.current())

    def synchronize(self) -> None:
        self._streams.record("synchronize", self)

    def query(self) -> bool:
        self._streams.record("query", self)
        return True
