"""Credentials of the command line, and certificates that identify the daemon: files named by the environment."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flexd.config.base import is_loopback
from flexd.core.errors import ConfigError

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
