"""TLS contexts of PEM files."""

from __future__ import annotations

import ssl
from pathlib import Path

from flexd.core.errors import ConfigError


def tls_context(
    protocol: int, cert_file: Path, key_file: Path, ca_file: Path | None, named_by: str, ca_key: str = "ca_file"
) -> ssl.SSLContext:
    """Return a context with a certificate and, with ``ca_file``, the authority that the other end is verified against.

    Args:
        protocol: ``ssl.PROTOCOL_TLS_SERVER`` or ``PROTOCOL_TLS_CLIENT``.
        named_by: key path of the files for error texts.
        ca_key: name of the key of ``ca_file``.

    Raises:
        ConfigError: a file cannot be read, or certificate and key do not belong together.
    """
    context = ssl.SSLContext(protocol)
    try:
        context.load_cert_chain(cert_file, key_file, _no_passphrase)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{named_by}.cert_file: {cert_file} with {key_file}: {_reason(error)}",
            remedy="give a readable PEM certificate and its own key, without a passphrase",
        ) from error
    try:
        if ca_file is not None:
            context.load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{named_by}.{ca_key}: {ca_file}: {_reason(error)}", remedy="give readable PEM") from error
    return context


def _no_passphrase() -> str:
    # Without this OpenSSL asks on the terminal.
    raise ValueError("the key has a passphrase")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error.reason or "no PEM")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
