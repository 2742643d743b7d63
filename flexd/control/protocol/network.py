"""Addresses, listening sockets, retry waits and the errors that end a connection."""

from __future__ import annotations

import os
import socket

from flexd.core.errors import ControlError, FlexdError
from flexd.core.supervision import Backoff

CHANNEL_ERRORS = (FlexdError, OSError)
"""The errors that are expected to end an epoch or a connection; others end it too, and are logged with their stack."""


def new_token() -> str:
    """Return 64 random bits as hex."""
    return os.urandom(8).hex()


def first_line(error: BaseException) -> str:
    """Return the first line of an error: some libraries append stack traces to theirs."""
    return (str(error).splitlines() or [type(error).__name__])[0][:500]


def named_error(error: BaseException) -> str:
    """Return the type and the first line of an error; at most 600 characters."""
    line = first_line(error) if str(error) else ""
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def parse_address(address: str) -> tuple[str, int]:
    """Parse ``host:port`` or ``[v6]:port``. Raises ControlError."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ControlError(f"control address {address!r}", remedy="give it as host:port")
    return host, int(port)


def listen(host: str, port: int) -> tuple[int, int]:
    """Bind a listening socket and return (file descriptor, port). Raises ControlError.

    Bound before the server starts, so that an address that is in use is reported at once.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ControlError(
            f"control.listen_host {host!r}: {error}", remedy="give an address of this machine"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(1024)
        port = int(listener.getsockname()[1])
        return listener.detach(), port
    except OSError as error:
        listener.close()
        raise ControlError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            remedy="another daemon may be running; set control.listen_host and control.listen_port",
        ) from error


def reconnect_backoff() -> Backoff:
    """Return the waits between two attempts to join, which ranks do not make at the same time."""
    return Backoff(0.05, 2.0, spread=0.5)
