"""Serve ASGI applications from background threads, on TCP with or without TLS, or on a unix socket.

uvicorn bounds the wait between two requests. It does not bound the wait for the first byte of a connection, for the
rest of a request's head, or for a client that reads no bytes; nor does it close connections beyond its limit (they get
status 503, once they send a request). With any of these a few idle sockets block all other clients. ``BoundedProtocol``
has the missing deadlines.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from flexd.api.routes import DaemonApi
from flexd.config.base import is_loopback, split_address
from flexd.config.sections import ServerConfig, TlsConfig
from flexd.core.errors import ApiError, ConfigError
from flexd.core.secrets import Reloaded, tls_context
from flexd.core.supervision import SupervisedThread, Supervisor, Watch, fault_point
from flexd.server.access import CLIENT_NAME, AccessControl, Tokens
from flexd.server.app import Metrics, create_app, create_metrics_app

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
REFUSED_CONNECTIONS = 4
"""Multiple of the limit of connections: those beyond the limit get status 503, those beyond this are closed."""


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            # A flood of connections without a request would refuse everyone else until their deadlines.
            connections = cast(set[BoundedProtocol], self.connections)
            heads = [(each._head_deadline.when(), id(each), each) for each in connections if each._head_deadline]
            if heads:
                *_, oldest = min(heads)
                oldest._cancel_head_deadline()
                oldest.transport.abort()
            elif len(self.connections) > REFUSED_CONNECTIONS * self.limit_concurrency:
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
        self._head_deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def handle_events(self) -> None:
        super().handle_events()
        # IDLE without bytes is the wait between two requests, which uvicorn bounds.
        waiting = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not waiting:
            self._cancel_head_deadline()
        elif self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

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
        # A client must read 1024 bytes per second, in the mean between two checks.
        if unread and unread > unread_before - 1024 * WRITE_SECONDS:
            self.transport.abort()
        else:
            self._watch_reader()

    def _cancel_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


BACKLOG = 64
MAX_CONNECTIONS = 64
# sockaddr_un on Linux, less the closing NUL.
_MAX_UNIX_PATH_BYTES = 107

_log = logging.getLogger(__name__)


class _WatchedServer(uvicorn.Server):
    """Records progress in every tick of its main loop."""

    def __init__(self, config: uvicorn.Config, watch: Watch) -> None:
        super().__init__(config)
        self._watch = watch

    async def on_tick(self, counter: int) -> bool:
        fault_point("thread.http")
        ends = await super().on_tick(counter)
        self._watch.progress()
        return ends


class HttpListener:
    """One listening socket and the thread that serves it.

    Args:
        app: the application.
        host, port: TCP address; port 0 lets the system choose (see ``address``).
        unix_socket: serve here instead of TCP; the file gets mode 0600 and is removed at ``stop``.
        tls: serve https.
        supervisor: of the process; records the faults of the thread.
        thread: name of the thread.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        unix_socket: Path | None = None,
        tls: ServerTls | None = None,
        supervisor: Supervisor | None = None,
        thread: str = "flexd-http",
    ) -> None:
        self._app = app
        self._host = host
        self.port = 0 if unix_socket else port
        """The bound TCP port; 0 on a unix socket."""
        self._unix_socket = unix_socket
        self._tls = tls
        self._socket: socket.socket | None = None
        self._inode: int | None = None
        self._server: uvicorn.Server | None = None
        self._supervisor = supervisor or Supervisor()
        self._watch = self._supervisor.watch(thread)
        self._thread: SupervisedThread | None = None
        self._stopping = threading.Event()
        self._served = False
        self._failure: BaseException | None = None

    @property
    def address(self) -> str:
        """Address with the bound port: ``http://host:port`` (``https`` with TLS) or ``unix:PATH``."""
        if self._unix_socket is not None:
            return f"unix:{self._unix_socket}"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http{'s' if self._tls else ''}://{host}:{self.port}"

    def bind(self) -> None:
        """Bind the address; clients that connect wait until ``start``.

        Raises:
            ApiError: the address is taken or not of this machine, or the socket path is unusable.
        """
        if self._socket is None:
            self._bind()

    def start(self) -> None:
        """Bind and serve; return once requests are answered.

        Raises:
            ApiError: as ``bind``, or the server did not start.
        """
        self.bind()
        self._server = self._make_server()
        self._thread = self._supervisor.thread(self._watch.thread, self._serve, self._stopping)
        self._thread.start()
        deadline = time.monotonic() + 10.0
        while not self._server.started:
            if self._failure is not None or time.monotonic() > deadline:
                self.stop(1.0)
                raise ApiError(
                    f"the HTTP server on {self.address} did not start: {self._failure or 'deadline passed'}",
                    remedy="see the log",
                ) from self._failure
            time.sleep(0.005)

    def stop(self, timeout_seconds: float) -> bool:
        """Refuse new requests, let running ones end, and abandon them after the deadline.

        Returns True if the thread has ended. May be called more than once.
        """
        self._stopping.set()
        thread, server = self._thread, self._server
        if thread is not None and server is not None:
            server.should_exit = True
            if not thread.join(timeout_seconds):
                server.force_exit = True
                thread.join(0.5)
        if self._socket is not None:
            self._socket.close()
        if self._unix_socket is not None and self._inode is not None:
            with contextlib.suppress(OSError):
                if self._unix_socket.stat().st_ino == self._inode:
                    self._unix_socket.unlink()
            self._inode = None
        return thread is None or not thread.running

    def _make_server(self) -> uvicorn.Server:
        config = uvicorn.Config(
            self._guarded_app,
            interface="asgi3",
            loop="asyncio",
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
        )
        if self._tls is not None:
            config.load()
            config.ssl = self._tls.context
        return _WatchedServer(config, self._watch)

    async def _guarded_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what a request raises; the application has responded with an error before."""
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            self._watch.count(error)

    def _serve(self) -> None:
        """Serve until the stop. After a fault, bind the same address again and serve with a new server."""
        if self._served and not self._stopping.is_set():
            self._bind()
            self._server = self._make_server()
        server, bound = self._server, self._socket
        assert server is not None and bound is not None  # noqa: PT018, S101
        try:
            server.run(sockets=[bound])
        except BaseException as error:
            self._failure = error
            if isinstance(error, SystemExit):  # uvicorn reports a failed start-up this way.
                raise ApiError(f"the server did not start: {error}", remedy="see the log") from error
            raise
        finally:
            self._served = True
            bound.close()

    def _bind(self) -> None:
        if self._unix_socket is not None:
            self._socket = self._bind_unix(self._unix_socket)
        else:
            self._socket = self._bind_tcp()
            # A later server binds again, also to a port that the system chose.
            self.port = int(self._socket.getsockname()[1])

    def _bind_tcp(self) -> socket.socket:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self._host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            bound = socket.socket(family, kind, protocol)
        except OSError as error:
            raise ApiError(
                f"cannot serve on host {self._host!r}: {error}",
                remedy="set server.host to an address of this machine",
            ) from error
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            # Without this a second daemon could bind too (SO_REUSEADDR) and fail only when uvicorn listens.
            bound.listen(BACKLOG)
        except OSError as error:
            bound.close()
            remedy = {
                errno.EADDRINUSE: "stop the other process, or choose another port (0 takes any free one)",
                errno.EADDRNOTAVAIL: "choose an address of this machine",
                errno.EACCES: "choose a port above 1023",
            }.get(error.errno or 0, "choose another address")
            raise ApiError(
                f"cannot serve on {self._host}:{self.port}: {error.strerror or error}", remedy=remedy
            ) from error
        return bound

    def _bind_unix(self, path: Path) -> socket.socket:
        if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
            raise ApiError(
                f"the socket path {path} is longer than {_MAX_UNIX_PATH_BYTES} bytes",
                remedy="choose a shorter server.unix_socket",
            )
        _remove_stale(path)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Linux takes the file's mode from the socket: no other user can connect between bind and chmod.
            os.fchmod(bound.fileno(), 0o600)
            bound.bind(os.fspath(path))
            path.chmod(0o600)
            bound.listen(BACKLOG)
            self._inode = path.stat().st_ino
        except OSError as error:
            bound.close()
            raise ApiError(
                f"cannot serve on the unix socket {path}: {error.strerror or error}",
                remedy="its directory must exist and be writable",
            ) from error
        return bound


def _remove_stale(path: Path) -> None:
    """Remove a stale socket. Raises ApiError if a process listens on it, or if it is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ApiError(f"cannot read {path}: {error.strerror}", remedy="check its directory") from error
    if not stat.S_ISSOCK(mode):
        raise ApiError(f"{path} exists and is not a socket", remedy="choose another server.unix_socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            raise ApiError(
                f"cannot tell whether {path} is in use: {error}", remedy="remove it if no daemon runs"
            ) from error
    raise ApiError(f"another process serves on {path}", remedy="stop it, or choose another server.unix_socket")


class DaemonServer:
    """The daemon's listeners: the admin API, and the metrics-only one if configured.

    Args:
        api: the daemon.
        metrics: its metrics page.
        config: addresses, tokens and certificates.
        supervisor: of the process; records the faults of the threads.

    Raises:
        ConfigError: a token file holds no token. ApiError: a certificate cannot be used.
    """

    def __init__(
        self, api: DaemonApi, metrics: Metrics, config: ServerConfig, supervisor: Supervisor | None = None
    ) -> None:
        tokens = Tokens(config.tokens)
        loopback_only = config.unix_socket is None and is_loopback(config.host)
        self._admin = HttpListener(
            AccessControl(
                create_app(api, metrics, loopback_only=loopback_only),
                tokens=tokens,
                clients=config.tls.clients,
                refused=metrics.refused,
            ),
            host=config.host,
            port=config.port,
            unix_socket=config.unix_socket,
            tls=ServerTls(config.tls, or_tokens=bool(tokens)) if config.tls.cert_file else None,
            supervisor=supervisor,
        )
        self._listeners = [self._admin]
        if config.metrics_listen is not None:
            host, port = split_address(config.metrics_listen)
            app = create_metrics_app(api, metrics)
            self._listeners.append(
                HttpListener(app, host=host, port=port, supervisor=supervisor, thread="flexd-metrics")
            )

    @property
    def address(self) -> str:
        """Address of the admin API: ``http://host:port`` or ``unix:PATH``."""
        return self._admin.address

    @property
    def port(self) -> int:
        """The bound TCP port of the admin API; 0 on a unix socket."""
        return self._admin.port

    def bind(self) -> None:
        """Bind all addresses; ``stop`` releases them. Raises ApiError: one is taken or unusable."""
        for listener in self._listeners:
            listener.bind()

    def start(self) -> None:
        """Start all listeners, or none.

        Raises:
            ApiError: an address is taken or unusable.
        """
        try:
            for listener in self._listeners:
                listener.start()
        except BaseException:
            self.stop(1.0)
            raise

    def stop(self, timeout_seconds: float) -> bool:
        """Stop all listeners within the deadline; return True if all have ended."""
        deadline = time.monotonic() + timeout_seconds
        ended = [each.stop(max(0.0, deadline - time.monotonic())) for each in reversed(self._listeners)]
        return all(ended)
