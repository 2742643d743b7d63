"""Options that several commands share, the client that they describe, and checks of output files."""

from __future__ import annotations

import getpass
import os
import socket as sockets
from pathlib import Path
from typing import Annotated

import typer

from flexd.cli.client import DEFAULT_URL, SOCKET_VARIABLE, URL_VARIABLE, Credentials, DaemonAddress, DaemonClient
from flexd.cli.view import OutputFormat
from flexd.core.errors import ConfigError

UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help=f"The daemon's address. [env: {URL_VARIABLE}; default: {DEFAULT_URL}]"),
]
SocketOption = Annotated[
    Path | None, typer.Option("--socket", metavar="PATH", help=f"The daemon's unix socket. [env: {SOCKET_VARIABLE}]")
]
ConfigOption = Annotated[Path, typer.Option("-c", "--config", metavar="FILE", help="The daemon's YAML file.")]
OutputOption = Annotated[OutputFormat, typer.Option("-o", "--output", help="Format of the output.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Recorded by the daemon.")]

BY_HAND = "requested by hand"


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


def check_file(option: str, path: Path | None) -> None:
    """Raise ConfigError, which names the option, if the file cannot be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written", remedy="give a file in an existing, writable folder")
