"""Connections: TLS whose files may change, and uvicorn's HTTP/1.1 protocol with deadlines that uvicorn lacks.

uvicorn bounds the wait between two requests. It does not bound the wait for the first byte of a connection, for the
rest of a request's head, or for a client that reads no bytes; nor does it close connections beyond its limit (they get
status 503, once they send a request). With any of these a few idle sockets block all other clients.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from flexd.config.server import TlsConfig
from flexd.core.errors import ConfigError
from flexd.core.secrets import Reloaded, tls_context

CHECK_SECONDS = 5.0
"""Interval of checks of the files of certificate, key and client CA."""


class ServerTls:
    """A server's TLS context. New files are used for connections after them; bad ones are logged and left out.

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

        files = (certificate, key) if authority is None else (certificate, key, authority)
        self._reloaded = Reloaded(files, load, "server.tls", clock)
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


HEAD_SECONDS = 10.0
"""Deadline from the connection, or from a request's first byte, to the end of its head."""
WRITE_SECONDS = 20.0
"""Interval of checks whether a client reads its answer."""
MIN_READ_BYTES_PER_SECOND = 1024
"""Least rate at which a client must read an answer, as the mean between two checks."""
REFUSED_CONNECTIONS = 4
"""Multiple of the limit of connections: those beyond the limit get status 503, those beyond this are closed."""
CLIENT_NAME = "flexd.client_name"
"""Key of the ASGI scope: common name of the client's certificate."""


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > REFUSED_CONNECTIONS * self.limit_concurrency:
            transport.abort()
            return
        secured = transport.get_extra_info("ssl_object")
        name = common_name(secured.getpeercert()) if secured is not None else None
        if name is not None:
            inner = self.app

            async def named(scope: Any, receive: Any, send: Any) -> None:
                scope[CLIENT_NAME] = name
                await inner(scope, receive, send)

            self.app = named
        self._head_deadline = self.loop.call_later(HEAD_SECONDS, self._abort)

    def handle_events(self) -> None:
        super().handle_events()
        # IDLE without bytes is the wait between two requests, which uvicorn bounds.
        waiting = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not waiting:
            self._cancel_head_deadline()
        elif self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_SECONDS, self._abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Also where the transport is closing already: it waits, without limit, until all is read.
        self._watch_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_deadline()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
        super().connection_lost(exc)

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread and self._write_deadline is None:
            self._write_deadline = self.loop.call_later(WRITE_SECONDS, self._check_reader, unread)

    def _check_reader(self, unread_before: int) -> None:
        self._write_deadline = None
        unread = self.transport.get_write_buffer_size()
        if unread and unread > unread_before - MIN_READ_BYTES_PER_SECOND * WRITE_SECONDS:
            self._abort()
        else:
            self._watch_reader()

    def _abort(self) -> None:
        self.transport.abort()

    def _cancel_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None
