"""The control channel's events: one log line each, passed on for metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from flexd.core.log_fields import log_event

logger = logging.getLogger(__name__)

OnEvent = Callable[[str, Mapping[str, object]], None]


class EventLog:
    """Logs events and passes them to ``on_event`` as (name, fields); what that raises is logged."""

    def __init__(self, on_event: OnEvent | None = None) -> None:
        self._on_event = on_event

    def emit(self, name: str, **fields: object) -> None:
        log_event(logger, logging.INFO, f"control channel: {name}", fields)
        if self._on_event is not None:
            try:
                self._on_event(name, fields)
            except Exception:
                logger.exception("control channel: the event callback failed")
