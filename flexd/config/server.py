"""Configuration of what the daemon listens on: the admin API with the metrics page, and the channel of the ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from flexd.config.base import Int, Name, Port, Seconds, Section, is_loopback, split_address

ApiScope = Literal["read", "admin"]


class TokenConfig(Section):
    """One bearer token of the admin API."""

    name: Name
    """Name of the user: shown in the log and in the history with every request."""
    scope: ApiScope = "read"
    """``read`` allows queries, ``admin`` also changes."""
    file: Path
    """File with the token (16 bytes or more), or ``sha256:`` and the 64 hex digits of its digest; of two lines both are
    accepted. It is read again when it changes."""


class TlsConfig(Section):
    """TLS of the admin API. The files are read again when they change."""

    cert_file: Path | None = None
    """Certificate chain, PEM. Without it the API is served without TLS, which only loopback allows."""
    key_file: Annotated[Path | None, Field(validate_default=True)] = None
    """Private key of the certificate, PEM, without a passphrase."""
    client_ca_file: Path | None = None
    """CAs of client certificates. Clients must present one; with ``server.tokens`` a token is accepted instead."""
    clients: Annotated[dict[str, ApiScope], Field(max_length=1024)] = {}
    """Scope of a client by the common name of its certificate. A name that is not listed has no access."""

    @field_validator("key_file")
    @classmethod
    def _both(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if (value is None) != (info.data.get("cert_file") is None):
            raise ValueError("server.tls.cert_file and server.tls.key_file go together: set both or none")
        return value

    @field_validator("client_ca_file")
    @classmethod
    def _secured(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("cert_file") is None:
            raise ValueError("certificates of clients need TLS: set server.tls.cert_file and key_file")
        return value

    @field_validator("clients")
    @classmethod
    def _clients_have_a_ca(cls, value: dict[str, ApiScope], info: ValidationInfo) -> dict[str, ApiScope]:
        if value and info.data.get("client_ca_file") is None:
            raise ValueError("certificates of clients are not verified: set server.tls.client_ca_file")
        return value


class ServerConfig(Section):
    """The admin API and the metrics page."""

    unix_socket: Path | None = None
    """Serve the API on this socket (mode 0600) instead of TCP."""
    tokens: Annotated[list[TokenConfig], Field(max_length=256)] = []
    """Bearer tokens. If there are any, ``/v1`` and ``/metrics`` of the API need one, also on loopback and the
    socket."""
    tls: TlsConfig = TlsConfig()
    """TLS, and certificates of clients."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of the API. Beyond loopback only with ``server.tls``, and ``server.tokens`` or ``server.tls.clients``."""
    port: Port = 9464
    """Port of the API; 0 takes any free one."""
    metrics_listen: str | None = None
    """``host:port`` of a second, read-only listener with nothing but ``/metrics``, ``/healthz`` and ``/readyz``, for
    Prometheus and the kubelet. It may bind any address."""

    @field_validator("tokens")
    @classmethod
    def _unique_names(cls, value: list[TokenConfig]) -> list[TokenConfig]:
        twice = sorted(name for name, times in Counter(token.name for token in value).items() if times > 1)
        if twice:
            raise ValueError(f"each token needs its own name; named twice: {', '.join(twice)}")
        return value

    @field_validator("tls")
    @classmethod
    def _tls_is_for_tcp(cls, value: TlsConfig, info: ValidationInfo) -> TlsConfig:
        if value.cert_file is not None and info.data.get("unix_socket") is not None:
            raise ValueError("is not used on server.unix_socket: remove one of them")
        return value

    @field_validator("host")
    @classmethod
    def _nothing_plain_beyond_loopback(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("unix_socket") is not None or is_loopback(value):
            return value
        tls = info.data.get("tls")
        if tls is None or tls.cert_file is None:
            raise ValueError("is reachable from other machines: set server.tls, or listen on 127.0.0.1")
        if not info.data.get("tokens") and not tls.clients:
            raise ValueError("is reachable from other machines: set server.tokens or server.tls.clients")
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value


class ThrottleConfig(Section):
    """Limits on the speed of migrations. Limits set with ``flexd throttle`` replace them until this section changes. A
    change takes effect at the next chunk of a running migration."""

    bytes_per_step: Annotated[Int, Field(ge=1)] | None = None
    """Row values and optimizer state that may be copied at one step boundary, on every rank; null leaves it to the
    ranks (``max_migration_bytes_per_step``). A single larger row is copied by itself."""
    bytes_per_second: Annotated[Int, Field(ge=1)] | None = None
    """Row values and optimizer state that may be copied per second in the long run, on every rank; a burst may use up
    one second's bytes."""


class ControlTlsConfig(Section):
    """TLS 1.3 of the control channel: daemon and ranks show each other a certificate. The files are read again when
    they change, for new connections."""

    cert_file: Path | None = None
    """The daemon's certificate chain, PEM, for the name or address by which the ranks reach it. Without it the channel
    has no TLS."""
    key_file: Annotated[Path | None, Field(validate_default=True)] = None
    """Private key of the certificate, PEM, without a passphrase."""
    ca_file: Annotated[Path | None, Field(validate_default=True)] = None
    """CA of the ranks' certificates, PEM. Give each job its own: any holder of a certificate of it may be a rank."""

    @field_validator("key_file", "ca_file")
    @classmethod
    def _all_or_none(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if (value is None) != (info.data.get("cert_file") is None):
            raise ValueError(
                "control.tls.cert_file, control.tls.key_file and control.tls.ca_file go together: set all or none"
            )
        return value


class ControlConfig(Section):
    """The channel between the daemon and the training ranks."""

    secret_file: Path | None = None
    """Shared secret of daemon and ranks (HMAC-SHA256), which both ends of a connection prove before anything else is
    read. Only loopback, or ``control.tls``, allows to go without."""
    tls: ControlTlsConfig = ControlTlsConfig()
    """Certificates of both ends, beside the secret or in its place. Without TLS the messages are authenticated but not
    encrypted."""
    listen_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address that the ranks connect to."""
    listen_port: Port = 29_400
    """Port that the ranks connect to; 0 takes any free one."""
    chunk_rows: Annotated[Int, Field(ge=1, le=2**20)] = 4096
    """Largest number of rows in a chunk."""
    chunk_bytes: Annotated[Int, Field(ge=1)] = 2**20
    """Row values, with optimizer state, that one chunk may move; ranks apply at most this many bytes per step."""
    throttle: ThrottleConfig = ThrottleConfig()
    """Limits on the speed of migrations."""
    timeout_seconds: Seconds = 15.0
    """Deadline of every operation on the channel."""

    @field_validator("listen_host")
    @classmethod
    def _secret_beyond_loopback(cls, value: str, info: ValidationInfo) -> str:
        tls = info.data.get("tls")
        has_tls = tls is not None and tls.cert_file is not None
        if info.data.get("secret_file") is None and not has_tls and not is_loopback(value):
            raise ValueError(
                "is reachable from other machines: set control.secret_file or control.tls, or listen on 127.0.0.1"
            )
        return value
