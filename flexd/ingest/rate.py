"""Message and access rates of a stream, whether its messages arrive continuously or in bursts."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 60.0
"""Ranks with a tap send one message each and then nothing until the daemon's next snapshot, half a minute later."""
_STEP_SECONDS = 1.0


class RateMeter:
    """Measures rates over the last ``WINDOW_SECONDS`` from totals that the caller passes in, with monotonic times."""

    def __init__(self, now: float) -> None:
        self.messages_per_second = self.accesses_per_second = 0.0
        self._seen: deque[tuple[float, int, int]] = deque([(now, 0, 0)])

    def update(self, now: float, messages: int, accesses: int) -> None:
        """Update both rates if a second has passed."""
        if now - self._seen[-1][0] < _STEP_SECONDS:
            return
        self._seen.append((now, messages, accesses))
        while self._seen[1][0] <= now - WINDOW_SECONDS:
            self._seen.popleft()
        since, messages_then, accesses_then = self._seen[0]
        self.messages_per_second = (messages - messages_then) / (now - since)
        self.accesses_per_second = (accesses - accesses_then) / (now - since)
