"""A token bucket for each client, in bounded memory."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_CLIENTS = 4096


@dataclass(slots=True)
class _Bucket:
    requests: float
    at: float


class RateLimiter:
    """One thread at a time (the server's event loop).

    Args:
        per_second: requests that one client may send in the long run.
        burst: that it may send at once.
        clock: monotonic seconds, for tests.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        """The client longest quiet first: forgotten first, and its bucket is most likely full anyway."""

    def wait_seconds(self, client: str) -> float:
        """0 if the request may go on (it is taken off the client's bucket), else when the next one may."""
        now = self._clock()
        bucket = self._buckets.pop(client, None) or _Bucket(float(self._burst), now)
        self._buckets[client] = bucket
        if len(self._buckets) > MAX_CLIENTS:
            del self._buckets[next(iter(self._buckets))]
        bucket.requests = min(self._burst, bucket.requests + (now - bucket.at) * self._per_second)
        bucket.at = now
        if bucket.requests < 1:
            return (1 - bucket.requests) / self._per_second
        bucket.requests -= 1
        return 0.0


def client_address(peer: tuple[str, int] | None) -> str:
    """What a client without a name is known by: its address, of IPv6 the /64 that one host has to itself."""
    if peer is None:
        return "local"
    try:
        address = ipaddress.ip_address(peer[0].partition("%")[0])
    except ValueError:
        return "local"
    if address.version == 6:
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)
