"""Reading messages of a stream source until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flexd.stream.types import Message


def poll_until(
    source: Any, condition: Callable[[list[Message]], object], seconds: float = 90.0, poll_seconds: float = 0.1
) -> list[Message]:
    """Poll ``source`` until ``condition`` holds for all messages read so far, and return these.

    Raises:
        AssertionError: ``condition`` is still false after ``seconds``; the text has the source's problem.
    """
    messages: list[Message] = []
    deadline = time.monotonic() + seconds
    while not condition(messages):
        assert time.monotonic() < deadline, f"{len(messages)} messages; problem: {source.problem}"
        messages += source.poll(poll_seconds)
    return messages
