"""Configuration of the channel between the daemon and the training ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from flexd.config.base import Int, Port, Seconds, Section, is_loopback


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
