"""The credentials of both ends of the control channel: a shared secret, certificates, or both."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flexd.core.secrets import Reloaded, Secret, tls_context

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
