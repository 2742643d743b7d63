"""Ports for processes that are about to start on this machine."""

from __future__ import annotations

import secrets
import socket

_LOWEST, _HIGHEST = 10_000, 32_000
_TRIES = 2_000


def free_ports(count: int) -> list[int]:
    """Return different TCP ports of loopback at which no process listens.

    The listener starts later, so another process may take the port first. Outgoing connections cannot: these ports lie
    below those that Linux assigns to them (32768 and up). Ports are drawn at random, so two processes rarely collide.

    Raises:
        OSError: not enough free ports were found.
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
