"""Structured log lines: an event's name and its fields, as ``key=value`` text and as data for the JSON format."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+:/,@%")


def log_event(logger: logging.Logger, level: int, event: str, fields: Mapping[str, object]) -> None:
    """Log ``event key=value ...``. The record carries ``event`` and ``fields`` for formatters that keep structure."""
    if logger.isEnabledFor(level):
        text = " ".join([event, *format_fields(fields)])
        logger.log(level, "%s", text, extra={"event": event, "fields": dict(fields)}, stacklevel=2)


def format_fields(fields: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield one ``key=value`` a field. Nested mappings are flattened to ``outer.inner=value``, lists are JSON, and text
    with spaces, quotes, equal signs or line breaks is quoted as JSON."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from format_fields(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_format_value(value)}"


def _format_value(value: object) -> str:
    if isinstance(value, str):
        return value if value and _PLAIN.issuperset(value) else json.dumps(value)
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else list(value)
        return json.dumps(items, separators=(",", ":"), default=str)
    return _format_value(str(value))


def is_power_of_two(count: int) -> bool:
    """Tell whether to log the ``count``-th time of the same event: at powers of two, the log stays bounded."""
    return count & (count - 1) == 0


class _JsonLines(logging.Formatter):
    """Format a record as one JSON object, for log collectors. Fields of an event are an object under ``fields``."""

    def __init__(self, job: str) -> None:
        super().__init__()
        self._job = job

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "job": self._job,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if fields is not None:
            entry["fields"] = fields
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logging(job: str, level: str, line_format: str) -> None:
    """Log to stderr, as text or as one JSON object per line. May be called again when the configuration changes."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s [{job}] %(name)s: %(message)s")
    handler.setFormatter(_JsonLines(job) if line_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kafka-python logs every attempt to reconnect to a broker that is down; the source reports that once.
    logging.getLogger("kafka").setLevel(logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
