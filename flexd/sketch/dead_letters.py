"""Samples of rejected messages, in a file."""

import base64
import json
import logging
import os
import threading
from pathlib import Path

from flexd.stream.types import RefusedMessages, StreamMessage

_log = logging.getLogger(__name__)

# Later ones are kept at the 128th, 256th ... rejection of a reason, so that rare reasons stay visible.
SAMPLES_OF_EACH_REASON = 64


class DeadLetterFile:
    """JSON lines: reason, detail, partition, offset (and last offset of a range), size, and the first bytes as base64.

    When the file holds half of ``max_bytes`` it is renamed to ``<name>.1`` (replacing the previous one) and a new one
    is started, so both together stay within the limit and the newest samples survive. A failed write never raises. Any
    thread may record.

    Args:
        path: of the file, which only its owner can read.
        max_bytes: of both files together; 0 keeps nothing.
        max_message_bytes: kept of each message.
    """

    def __init__(self, path: Path = Path(os.devnull), max_bytes: int = 0, max_message_bytes: int = 512) -> None:
        self._path = path
        self._half = max_bytes // 2
        self._max_message_bytes = max_message_bytes
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}
        self.written = 0
        self.failures = 0

    def record(self, reason: str, detail: str, message: StreamMessage | RefusedMessages) -> None:
        """Keep a sample of the message if one is due for this reason. Never raises: failures are counted."""
        with self._lock:
            try:
                self._record(reason, detail, message)
            except Exception as error:
                # The message is counted or rejected in any case; only its sample is lost.
                self.failures += 1
                if self.failures == 1:
                    _log.warning("dead letters cannot be written to %s: %s", self._path, error)

    def _record(self, reason: str, detail: str, message: StreamMessage | RefusedMessages) -> None:
        seen = self._seen[reason] = self._seen.get(reason, 0) + 1
        if seen > SAMPLES_OF_EACH_REASON and seen & (seen - 1):
            return
        entry = {
            "reason": reason,
            "detail": detail[:300],
            "partition": message.partition,
            "offset": message.offset,
            **(
                {"size": len(message.payload)}
                if isinstance(message, StreamMessage)
                else {"last_offset": message.last_offset, "size": message.size_bytes}
            ),
            "first_bytes": base64.b64encode(bytes(message.payload[: self._max_message_bytes])).decode(),
        }
        line = (json.dumps(entry) + "\n").encode()
        if len(line) > self._half:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size + len(line) > self._half:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(line)
        self.written += 1
