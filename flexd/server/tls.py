"""TLS of the admin API: a context whose certificate follows its files, and the name in a client's certificate."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from typing import Any

from flexd.config.server import TlsConfig
from flexd.core.errors import ApiError
from flexd.core.secrets import WatchedFiles

CHECK_SECONDS = 5.0
"""Interval of checks of the certificate's files."""

logger = logging.getLogger(__name__)


class ServerTls:
    """A server's TLS context. A new certificate is used for connections after it; a bad one is logged and left out.

    Args:
        or_tokens: clients may also connect without a certificate.
        clock: monotonic seconds, for tests.

    Raises:
        ApiError: a file cannot be read, or certificate and key do not belong together.
    """

    def __init__(self, config: TlsConfig, *, or_tokens: bool, clock: Callable[[], float] = time.monotonic) -> None:
        if config.cert_file is None or config.key_file is None:
            raise ApiError("server.tls has no certificate", remedy="set server.tls.cert_file and key_file")
        self._files = (config.cert_file, config.key_file)
        self._watched = WatchedFiles(self._files, clock)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(*self._files, _no_passphrase)
        except (OSError, ValueError) as error:
            raise ApiError(
                f"server.tls: {config.cert_file} with {config.key_file}: {_reason(error)}",
                remedy="give a readable PEM certificate and its own key, without a passphrase",
            ) from error
        if config.client_ca_file is not None:
            try:
                context.load_verify_locations(config.client_ca_file)
            except (OSError, ValueError) as error:
                raise ApiError(
                    f"server.tls.client_ca_file: {config.client_ca_file}: {_reason(error)}", remedy="give readable PEM"
                ) from error
            context.verify_mode = ssl.CERT_OPTIONAL if or_tokens else ssl.CERT_REQUIRED
        # Called at every handshake, with or without a name: checks without a thread.
        context.sni_callback = self._refresh
        self.context = context

    def _refresh(self, _connection: ssl.SSLObject, _name: str, context: ssl.SSLContext) -> None:
        if not self._watched.changed(CHECK_SECONDS):
            return
        try:
            # Tried on another context first: a key that does not fit would leave this one without any.
            trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            trial.load_cert_chain(*self._files, _no_passphrase)
            context.load_cert_chain(*self._files, _no_passphrase)
        except (OSError, ValueError) as error:
            logger.error("server.tls: the new certificate is not used: %s", _reason(error))
        else:
            logger.info("server.tls: %s has changed and is used for new connections", self._files[0])


def common_name(certificate: dict[str, Any] | None) -> str | None:
    """Return the subject's common name of a verified certificate (``getpeercert``); None without exactly one."""
    if not certificate:
        return None
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[0]) if len(names) == 1 else None


def _no_passphrase() -> str:
    # Without this OpenSSL asks on the terminal.
    raise ValueError("the key has a passphrase")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error.reason or "no PEM")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
