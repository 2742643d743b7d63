"""The needs of both ends of a connection: addresses, credentials, listening sockets, waits, errors that end it."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flexd.core.errors import ControlError, FlexdError
from flexd.core.secrets import Reloaded, Secret, tls_context
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


CHECK_SECONDS = 5.0
"""Time between two checks for changed certificate files."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one end. Both ends verify the other one's certificate against ``ca_file``.

    Attributes:
        named_by: origin of the paths for error texts.
        server_name: name that the daemon's certificate must have; empty: the host that the client connects to.
    """

    cert_file: Path
    key_file: Path
    ca_file: Path
    named_by: str = "control.tls"
    server_name: str = ""


@dataclass(frozen=True)
class ChannelCredentials:
    """Proof of one end of the channel.

    Attributes:
        secret: the shared secret, or its file (read again when it changes). None: only loopback or ``tls``.
        tls: certificates (TLS 1.3), or None.
    """

    secret: Secret = None
    tls: TlsFiles | None = None


class TlsContext(Reloaded[ssl.SSLContext]):
    """TLS 1.3 of one end, made again when its files change. Thread-safe.

    Args:
        clock: monotonic seconds, for tests.

    Raises:
        ConfigError: a file cannot be read, or certificate and key do not belong together.
    """

    def __init__(self, files: TlsFiles, server_side: bool, clock: Callable[[], float] = time.monotonic) -> None:
        paths = (files.cert_file, files.key_file, files.ca_file)
        super().__init__(paths, lambda: _make_context(files, server_side), files.named_by, clock)

    def current(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        return self.value(CHECK_SECONDS)


def _make_context(files: TlsFiles, server_side: bool) -> ssl.SSLContext:
    protocol = ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
    context = tls_context(protocol, files.cert_file, files.key_file, files.ca_file, files.named_by)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # Nothing is resumed: each connection presents a certificate that is valid now.
    context.options |= ssl.OP_NO_TICKET
    if server_side:
        context.num_tickets = 0
    return context
