"""The credentials of both ends of the control channel: a shared secret, certificates, or both."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flexd.core.errors import ConfigError
from flexd.core.secrets import Secret, WatchedFiles

CHECK_SECONDS = 5.0
"""Time between two checks for changed certificate files."""

logger = logging.getLogger(__name__)


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


class TlsContext:
    """TLS 1.3 of one end, made again when its files change. Bad new files are logged and left out. Thread-safe.

    Args:
        clock: monotonic seconds, for tests.

    Raises:
        ConfigError: a file cannot be read, or certificate and key do not belong together.
    """

    def __init__(self, files: TlsFiles, server_side: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._server_side = server_side
        self._lock = threading.Lock()
        self._watched = WatchedFiles([files.cert_file, files.key_file, files.ca_file], clock)
        self._context = _make_context(files, server_side)

    def current(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        with self._lock:
            if self._watched.changed(CHECK_SECONDS):
                self._reload()
            return self._context

    def _reload(self) -> None:
        try:
            self._context = _make_context(self._files, self._server_side)
        except ConfigError as error:
            logger.error("%s; the files read before stay in use", error)
        else:
            logger.info("%s: the files have changed and are used for new connections", self._files.named_by)


def _make_context(files: TlsFiles, server_side: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # Nothing is resumed: each connection presents a certificate that is valid now.
    context.options |= ssl.OP_NO_TICKET
    if server_side:
        context.num_tickets = 0
    try:
        context.load_cert_chain(files.cert_file, files.key_file, _no_passphrase)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{files.named_by}.cert_file: {files.cert_file} with {files.key_file}: {_reason(error)}",
            remedy="give a readable PEM certificate and its own key, without a passphrase",
        ) from error
    try:
        context.load_verify_locations(files.ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{files.named_by}.ca_file: {files.ca_file}: {_reason(error)}", remedy="give readable PEM"
        ) from error
    return context


def _no_passphrase() -> str:
    # Without this OpenSSL asks on the terminal.
    raise ValueError("the key has a passphrase")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error.reason or "no PEM")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
