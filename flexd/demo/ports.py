"""Ports for processes that are about to start on this machine."""

from __future__ import annotations

import secrets
import socket

_LOWEST, _HIGHEST = 10_000, 32_000
_TRIES = 2_000


def free_ports(count: int) -> list[int]:
    """Different TCP ports of loopback that nobody listens at.

    Whoever will listen starts later, so that another may be faster. Outgoing connections never are: these ports lie
    below those that Linux gives to them (32768 and up), as a port that the kernel chooses for us would not. The same
    question asked at once by another process draws another number, most likely.

    Raises:
        OSError: none was found.
    """
    found: list[int] = []
    for _ in range(_TRIES):
        if len(found) == count:
            return found
        port = _LOWEST + secrets.randbelow(_HIGHEST - _LOWEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    raise OSError(f"no {count} free ports between {_LOWEST} and {_HIGHEST}")
