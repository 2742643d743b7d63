"""The daemon's log lines on stderr."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from flexd.config.model import Config


class _JsonLines(logging.Formatter):
    """One JSON object a line, for log collectors."""

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
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def set_up_logging(config: Config) -> None:
    """As ``log`` says; may be called again when that changes."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s [{config.job}] %(name)s: %(message)s")
    handler.setFormatter(_JsonLines(config.job) if config.log.format == "json" else text)
    logging.basicConfig(level=config.log.level.upper(), handlers=[handler], force=True)
    # These log every reconnect attempt of a broker that is down; the source reports that itself, once.
    logging.getLogger("kafka").setLevel(logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # One line for every renewal of a Kubernetes lease.
    logging.getLogger("httpx").setLevel(logging.WARNING)
