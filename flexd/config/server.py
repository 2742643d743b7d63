"""Who may reach the admin API and the metrics page, and how they prove who they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from flexd.config.base import Int, Name, Port, Section, is_loopback, split_address

ApiScope = Literal["read", "admin"]


class TokenConfig(Section):
    """One bearer token of the admin API."""

    name: Name
    """Who uses it: shown in the log and in the history with everything that is asked for."""
    scope: ApiScope = "read"
    """``read`` asks, ``admin`` also changes."""
    file: Path
    """The token (16 bytes or more), or ``sha256:`` and the 64 hex digits of its digest; with two lines both are
    accepted. Read again when it changes."""


class TlsConfig(Section):
    """TLS of the admin API. The files are read again when they change."""

    cert_file: Path | None = None
    """Certificate chain, PEM. Without it the API is served in the clear, which only loopback allows."""
    key_file: Annotated[Path | None, Field(validate_default=True)] = None
    """Its private key, PEM, without a passphrase."""
    client_ca_file: Path | None = None
    """Clients show a certificate that one of these CAs signed; with ``server.tokens`` they may show a token instead."""
    clients: Annotated[dict[str, ApiScope], Field(max_length=1024)] = {}
    """What a client may do, by the common name of its certificate. A name that is not listed may do nothing."""

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
            raise ValueError("names clients whose certificates nobody checks: set server.tls.client_ca_file")
        return value


class ServerConfig(Section):
    """The admin API and the metrics page."""

    unix_socket: Path | None = None
    """Serve the API on this socket (mode 0600) instead of TCP."""
    tokens: Annotated[list[TokenConfig], Field(max_length=256)] = []
    """Bearer tokens. With any, ``/v1`` and ``/metrics`` of the API need one, on loopback and the socket too."""
    tls: TlsConfig = TlsConfig()
    """TLS, and certificates of clients."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of the API. Beyond loopback only with ``server.tls``, and ``server.tokens`` or ``server.tls.clients``."""
    port: Port = 9464
    """Port of the API; 0 takes any free one."""
    metrics_listen: str | None = None
    """``host:port`` of a second, read-only listener with nothing but ``/metrics``, ``/healthz`` and ``/readyz``, for
    Prometheus and the kubelet. It may bind any address."""
    max_connections: Annotated[Int, Field(ge=4, le=10_000)] = 64
    """Of each listener at one time; more are told to come again (503)."""

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
            raise ValueError("is not used on server.unix_socket: leave one of them out")
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
