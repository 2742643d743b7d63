"""The daemon's log lines on stderr: text or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from flexd.config.model import Config


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


def set_up_logging(config: Config) -> None:
    """Set level and format from ``log``. May be called again when that section changes."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s [{config.job}] %(name)s: %(message)s")
    handler.setFormatter(_JsonLines(config.job) if config.log.format == "json" else text)
    logging.basicConfig(level=config.log.level.upper(), handlers=[handler], force=True)
    # kafka-python logs every attempt to reconnect to a broker that is down; the source reports that once.
    logging.getLogger("kafka").setLevel(logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
