"""Client of the daemon's admin API: address, credentials, a deadline for each call, errors that name the address; and
the exit statuses of commands."""

from __future__ import annotations

import getpass
import json
import os
import socket as sockets
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from pydantic import ValidationError

from flexd.api.base import REQUEST_HEADER, ErrorBody
from flexd.api.routes import Answer, Operation
from flexd.config.base import is_loopback
from flexd.core.errors import (
    ApiError,
    ConfigError,
    FlexdError,
    StateLockedError,
    StateVersionError,
    TopologyError,
    UnusableStateError,
)  # fmt: skip
from flexd.core.supervision import EXIT_UNSAFE_STATE


class ExitCode(IntEnum):
    """Exit status of a command. ``MEANINGS`` explains each in ``flexd --help`` and docs/command-line.md."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    TIMED_OUT = 5
    STATE_LOCKED = 6
    FOUND = 7
    UNSAFE_STATE = EXIT_UNSAFE_STATE
    STATE_UNUSABLE = 9
    INTERRUPTED = 130
    UNREAD = 141
    """128 + SIGPIPE, as for any program that SIGPIPE ends."""


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "success",
    ExitCode.FAILED: "an error without a code of its own, or a question answered with no",
    ExitCode.USAGE: "wrong usage or configuration",
    ExitCode.UNREACHABLE: "no daemon at the address",
    ExitCode.REFUSED: "the daemon refused, or the migration failed",
    ExitCode.TIMED_OUT: "a deadline passed",
    ExitCode.STATE_LOCKED: "another daemon uses the state directory",
    ExitCode.FOUND: "doctor found a fault",
    ExitCode.UNSAFE_STATE: "the daemon ended in order because it could not trust its counters; start it again",
    ExitCode.STATE_UNUSABLE: "the saved state cannot be continued from",
    ExitCode.INTERRUPTED: "Control-C",
    ExitCode.UNREAD: "the reader of the output closed the pipe",
}


class DaemonUnreachableError(ApiError):
    """The address has no program with the admin API."""


class DaemonRefusedError(ApiError):
    """The daemon answered with an error; ``status`` is the HTTP status."""


class DaemonTimeoutError(ApiError):
    """The daemon did not respond to a request within the deadline."""


_CODES: tuple[tuple[type[FlexdError], ExitCode], ...] = (
    (ConfigError, ExitCode.USAGE),
    (TopologyError, ExitCode.USAGE),
    (DaemonUnreachableError, ExitCode.UNREACHABLE),
    (DaemonRefusedError, ExitCode.REFUSED),
    (DaemonTimeoutError, ExitCode.TIMED_OUT),
    (StateLockedError, ExitCode.STATE_LOCKED),
    (UnusableStateError, ExitCode.STATE_UNUSABLE),
    (StateVersionError, ExitCode.STATE_UNUSABLE),
)


def exit_code_of(error: FlexdError) -> ExitCode:
    """Return the exit status of an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)


_OUTCOMES: dict[str, ExitCode] = {
    "timed_out": ExitCode.TIMED_OUT,
    "failed": ExitCode.REFUSED,
    "aborted": ExitCode.REFUSED,
    "superseded": ExitCode.REFUSED,
    "ended": ExitCode.REFUSED,
    "rollback_failed": ExitCode.REFUSED,
}


def exit_code_of_outcome(outcome: str) -> ExitCode:
    """Return the exit status of a ``ReplanResult`` or an ``AbortResult``."""
    return _OUTCOMES.get(outcome, ExitCode.OK)


TOKEN_VARIABLE = "FLEXD_TOKEN_FILE"
CA_VARIABLE = "FLEXD_CA_FILE"
CERTIFICATE_VARIABLE = "FLEXD_CLIENT_CERT_FILE"
KEY_VARIABLE = "FLEXD_CLIENT_KEY_FILE"
MAX_TOKEN_BYTES = 1024


@dataclass(frozen=True)
class Credentials:
    """Token and certificate files. A daemon without ``server.tokens`` and ``server.tls`` needs none of them.

    Attributes:
        token: bearer token.
        ca_file: the CA of the daemon's certificate; default: the CAs of the system.
        certificate: certificate of the client, PEM.
        key: private key of the client's certificate, PEM.
    """

    token: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @staticmethod
    def choose(environ: Mapping[str, str]) -> Credentials:
        """Return the credentials that the environment names.

        Raises:
            ConfigError: the token file cannot be read or has no token, or a key is named without a certificate.
        """

        def path(variable: str) -> Path | None:
            return Path(environ[variable]) if environ.get(variable) else None

        token_file, certificate, key = path(TOKEN_VARIABLE), path(CERTIFICATE_VARIABLE), path(KEY_VARIABLE)
        if key is not None and certificate is None:
            raise ConfigError(f"{KEY_VARIABLE} is set without {CERTIFICATE_VARIABLE}", remedy="set both")
        return Credentials(
            None if token_file is None else _read_token(token_file), path(CA_VARIABLE), certificate, key
        )  # fmt: skip

    def headers(self, url: str, *, over_socket: bool) -> dict[str, str]:
        """Return the headers of a request. Raises ConfigError if the token would be sent to another machine without
        TLS."""
        if self.token is None:
            return {}
        import httpx

        target = httpx.URL(url)
        if not over_socket and target.scheme != "https" and not is_loopback(target.host):
            raise ConfigError(f"the token is not sent to {url} without TLS", remedy="use https, or loopback")
        return {"authorization": f"Bearer {self.token}"}

    def context(self) -> ssl.SSLContext:
        """Return the TLS context. Raises ConfigError if a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{CA_VARIABLE}, {CERTIFICATE_VARIABLE} or {KEY_VARIABLE}: {error}", remedy="give readable PEM files"
            ) from error
        return context


def _read_token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            lines = [line.strip() for line in file.read(MAX_TOKEN_BYTES + 1).splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(
            f"{TOKEN_VARIABLE}: {path}: {error.strerror}", remedy="make it readable by this user"
        ) from error
    if not lines or len(lines[0]) > MAX_TOKEN_BYTES or not lines[0].isascii() or lines[0].startswith(b"sha256:"):
        raise ConfigError(
            f"{TOKEN_VARIABLE}: {path} has no token", remedy="write the token itself, not its digest, on the first line"
        )
    return lines[0].decode("ascii")


DEFAULT_URL = "http://127.0.0.1:9464"
URL_VARIABLE = "FLEXD_URL"
SOCKET_VARIABLE = "FLEXD_SOCKET"
ANSWER_SECONDS = 10.0
PLAN_SECONDS = 120.0
"""A plan over 10^9 rows takes seconds on a quiet machine; a busy one needs more."""
MAX_ANSWER_BYTES = 64 * 2**20
NO_CREDENTIALS = Credentials()


@dataclass(frozen=True)
class DaemonAddress:
    """Address of the daemon: a base URL, or a unix socket."""

    url: str
    socket: Path | None = None

    def __str__(self) -> str:
        return f"unix socket {self.socket}" if self.socket is not None else self.url

    @staticmethod
    def choose(
        url: str | None, socket: Path | None, environ: Mapping[str, str], configured: DaemonAddress | None = None
    ) -> DaemonAddress:
        """Return the address of an option, else of a variable, else ``configured``, else ``DEFAULT_URL``.

        Raises:
            ConfigError: both options or both variables are given, or the URL is invalid.
        """
        if url is None and socket is None:
            url = environ.get(URL_VARIABLE) or None
            socket = Path(environ[SOCKET_VARIABLE]) if environ.get(SOCKET_VARIABLE) else None
        if url is not None and socket is not None:
            raise ConfigError("a URL and a socket of the daemon are given", remedy="give one of them")
        if socket is not None:
            return DaemonAddress("http://flexd", socket)
        if url is None and configured is not None:
            return configured
        # Imported here because it imports its own command line, which `flexd run` does not need.
        import httpx

        url = url or DEFAULT_URL
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"the daemon's URL {url!r}: {error}", remedy=f"such as {DEFAULT_URL}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"the daemon's URL {url!r} is not an http address", remedy=f"such as {DEFAULT_URL}")
        return DaemonAddress(url)


class DaemonClient:
    """Sends requests of ``flexd.api.routes``.

    Each raises DaemonUnreachableError, DaemonRefusedError (the daemon's own message and remedy) or
    DaemonTimeoutError.
    """

    def __init__(self, address: DaemonAddress, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._address = address
        self._credentials = credentials

    def send(self, route: Operation[Answer], **fields: Any) -> Answer:
        """Return the answer of the daemon.

        Args:
            fields: parameters of the path, and fields of the request; None leaves one out.

        Raises:
            ConfigError: the request does not take such a value.
        """
        path = route.path.format(**{name: quote(fields.pop(name), safe="") for name in route.parameters})
        seconds = (PLAN_SECONDS if route.slow else ANSWER_SECONDS) + fields.get("wait_seconds", 0.0)
        body = None
        if route.request is not None:
            given = {name: value for name, value in fields.items() if value is not None}
            try:
                request = route.request(**given).model_dump(mode="json", exclude_unset=True)
            except ValidationError as wrong:
                fault = wrong.errors()[0]
                raise ConfigError(
                    f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}", remedy="give another value"
                ) from wrong
            if route.method == "POST":
                body = request
            elif request:
                path += f"?{urlencode(request)}"
        status, content = self._exchange(route.method, path, seconds, body)
        try:
            if status < 400:
                return route.answer.model_validate_json(content)
            error = ErrorBody.model_validate_json(content).error
        except ValidationError as invalid:
            raise DaemonUnreachableError(
                f"{self._address} answered {route.method} {path} with status {status} and a body that is not flexd's",
                status=status,
                remedy="check that the address is a flexd daemon of this version",
            ) from invalid
        raise DaemonRefusedError(error.message, status=status, remedy=error.remedy)

    def _exchange(self, method: str, path: str, seconds: float, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """Return (HTTP status, body) within ``seconds``."""
        import httpx

        deadline = time.monotonic() + seconds
        # No proxies: the address is this machine, whatever proxies the environment configures.
        secured = self._address.url.startswith("https:")
        transport = None if self._address.socket is None else httpx.HTTPTransport(uds=str(self._address.socket))
        headers = self._credentials.headers(self._address.url, over_socket=self._address.socket is not None)
        headers[REQUEST_HEADER] = "flexd"
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            with (
                httpx.Client(
                    base_url=self._address.url,
                    transport=transport,
                    timeout=httpx.Timeout(seconds, connect=3.0),
                    trust_env=False,
                    # Loading the CAs takes a while, and without TLS there is nothing to verify.
                    verify=self._credentials.context() if secured else False,
                ) as client,
                client.stream(
                    method,
                    path,
                    content=None if body is None else json.dumps(body),
                    headers=headers,
                ) as answer,
            ):
                parts: list[bytes] = []
                size = 0
                for part in answer.iter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_ANSWER_BYTES:
                        raise DaemonUnreachableError(
                            f"{self._address} sends an endless response to {path}",
                            remedy="check that the address is a flexd daemon",
                        )
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("deadline passed")
                return answer.status_code, b"".join(parts)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise DaemonUnreachableError(
                f"no flexd daemon at {self._address}: {error}",
                remedy=f"name a file with the CA of its certificate in {CA_VARIABLE}"
                if "CERTIFICATE" in str(error).upper()
                else f"start it (flexd run -c FILE), or name its address with --url, --socket, {URL_VARIABLE} or "
                f"{SOCKET_VARIABLE}",
            ) from error
        except httpx.TimeoutException as error:
            raise DaemonTimeoutError(
                f"the daemon at {self._address} did not answer {method} {path} within {seconds:g} s",
                remedy="see its log; flexd doctor checks what it needs",
            ) from error
        except httpx.TransportError as error:
            raise DaemonUnreachableError(
                f"the connection to {self._address} broke: {error or type(error).__name__}",
                remedy="see whether the daemon has stopped",
            ) from error


def connect(url: str | None, socket: Path | None, *, configured: DaemonAddress | None = None) -> DaemonClient:
    """Return the client of the daemon that options and environment name.

    Args:
        configured: the address where they name none; default: ``DEFAULT_URL``.

    Raises:
        ConfigError: options or variables contradict each other, or a file that they name cannot be used.
    """
    address = DaemonAddress.choose(url, socket, os.environ, configured)
    return DaemonClient(address, Credentials.choose(os.environ))


def requested_by() -> str:
    """Return ``user@host`` of the user who runs the command, for the daemon's record."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())  # a container without an entry for its user
    return f"{user}@{sockets.gethostname()}"[:200]
