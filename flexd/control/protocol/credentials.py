"""What the two ends of the control channel prove themselves with: a shared secret, certificates, or both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexd.core.secrets import Secret


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one end. Both ends verify the other one's certificate against ``ca_file``.

    Attributes:
        named_by: origin of the paths for error texts (``control.tls``).
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
