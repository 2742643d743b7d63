"""TLS of the admin API: a context whose certificate follows its files, and the name in a client's certificate."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Any

from flexd.config.server import TlsConfig
from flexd.core.errors import ConfigError
from flexd.core.secrets import Reloaded
from flexd.core.tls import tls_context

CHECK_SECONDS = 5.0
"""Interval of checks of the certificate's files."""


class ServerTls:
    """A server's TLS context. A new certificate is used for connections after it; a bad one is logged and left out.

    Args:
        or_tokens: clients may also connect without a certificate.
        clock: monotonic seconds, for tests.

    Raises:
        ConfigError: a file cannot be read, or certificate and key do not belong together.
    """

    def __init__(self, config: TlsConfig, *, or_tokens: bool, clock: Callable[[], float] = time.monotonic) -> None:
        certificate, key, authority = config.cert_file, config.key_file, config.client_ca_file
        if certificate is None or key is None:
            raise ConfigError("server.tls has no certificate", remedy="set server.tls.cert_file and key_file")

        def load() -> ssl.SSLContext:
            context = tls_context(
                ssl.PROTOCOL_TLS_SERVER, certificate, key, authority, "server.tls", "client_ca_file"
            )  # fmt: skip
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if authority is not None:
                context.verify_mode = ssl.CERT_OPTIONAL if or_tokens else ssl.CERT_REQUIRED
            return context

        self._reloaded = Reloaded((certificate, key), load, "server.tls", clock)
        self.context = self._reloaded.value(CHECK_SECONDS)
        # Called at every handshake, with or without a name: checks without a thread.
        self.context.sni_callback = self._refresh

    def _refresh(self, connection: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
        connection.context = self._reloaded.value(CHECK_SECONDS)


def common_name(certificate: dict[str, Any] | None) -> str | None:
    """Return the subject's common name of a verified certificate (``getpeercert``); None without exactly one."""
    if not certificate:
        return None
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[0]) if len(names) == 1 else None
