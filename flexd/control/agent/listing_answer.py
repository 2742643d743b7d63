"""A rank's answer to the daemon's request for the rows that it holds above HOME."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flexd.control.agent.agent_context import AgentContext
from flexd.control.protocol.messages import Listing, ListingPiece, ListRequest, Message
from flexd.control.protocol.network import named_error
from flexd.control.protocol.rows import Bytes, pieces_of, rows_body

logger = logging.getLogger(__name__)


class ListingAnswer:
    """Answers one request once every agreed chunk is applied; no chunk is pushed meanwhile.

    Args:
        fence: fields of every message of the epoch.
        send, next_sequence: of the connection.
    """

    def __init__(
        self,
        context: AgentContext,
        request: ListRequest,
        fence: Mapping[str, Any],
        send: Callable[[Message, Bytes], None],
        next_sequence: Callable[[], int],
    ) -> None:
        self._context = context
        self._request = request
        self._sender = {**fence, "rank": context.identity.rank}
        self._send = send
        self._next_sequence = next_sequence
        self.deadline = time.monotonic() + context.timeout_seconds

    def advance(self) -> bool:
        """Send the rows if it is time; True when nothing is left to do."""
        context, request = self._context, self._request
        is_applied = context.inbox.applied_version == request.version
        if not is_applied and time.monotonic() < self.deadline:
            return False
        keys, tiers = np.empty(0, np.int64), np.empty(0, np.uint8)
        error = ""
        if not is_applied:
            error = f"version {context.inbox.applied_version} is applied, not {request.version}: training does not step"
        else:
            try:
                keys, tiers = context.lists()
            except Exception as failure:
                logger.warning("rank %d: its placement cannot be listed", context.identity.rank, exc_info=failure)
                error = named_error(failure)
        body = rows_body(np.ascontiguousarray(keys, np.int64), np.ascontiguousarray(tiers, np.uint8))
        first, *others = pieces_of(body)
        self._send(
            Listing(
                **self._sender, sequence=self._next_sequence(), version=request.version, rows=len(keys),
                sha256=hashlib.sha256(body).hexdigest(), error=error,
            ),
            first,
        )  # fmt: skip
        for number, piece in enumerate(others, start=1):
            self._send(ListingPiece(**self._sender, sequence=self._next_sequence(), piece=number), piece)
        return True
