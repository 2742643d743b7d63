"""Checks of the machine: versions, disk, clock, secrets, ports."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import socket
import stat
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import flexd
from flexd.config.model import Config
from flexd.config.stream import KafkaSourceConfig
from flexd.control.protocol.network import TlsContext, TlsFiles
from flexd.core import units
from flexd.core.secrets import read_keys
from flexd.doctor.finding import Finding, fault, ok, skipped, warning

NEEDED = ("numpy", "pydantic", "pyyaml", "numba", "pyarrow", "fastapi", "uvicorn", "scipy")
_CONNECT_SECONDS = 2.0
_TIMEX_BYTES = 512
"""Larger than ``struct timex`` on any Linux; with modes = 0 the kernel only fills it in."""
_CLOCK_UNSYNCHRONISED = 5


def versions(config: Config) -> Iterator[Finding]:
    """Check that the libraries that this configuration needs are installed."""
    needed = [*NEEDED]
    source = config.stream.source
    if isinstance(source, KafkaSourceConfig):
        needed.append("kafka-python")
    missing, found = [], []
    for name in needed:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        yield fault("versions", f"not installed: {', '.join(missing)}", "pip install 'flexd[daemon]'")
    yield ok("versions", f"flexd {flexd.__version__}, Python {platform.python_version()}, {', '.join(found)}")


def disk(config: Config) -> Iterator[Finding]:
    """Check that the state directory is writable, private, and has room for the snapshots."""
    directory = config.state.dir
    there = _nearest(directory)
    if there == directory.absolute() and there.stat().st_mode & stat.S_IRWXO:
        yield warning("disk", f"state.dir: {there} is open to others on this machine", f"chmod 0700 {there}")
    if not os.access(there, os.W_OK | os.X_OK):
        yield fault("disk", f"state.dir: {there} cannot be written by this user", "give a writable directory")
        return
    # One more than is kept: the new one is written before the oldest is deleted.
    wanted = (config.state.keep_snapshots + 1) * config.sketch.memory_bytes
    kept = sum(file.stat().st_size for file in directory.glob("snapshots/*") if file.is_file())
    free = shutil.disk_usage(there).free
    text = (
        f"state.dir {directory}: {units.size(free)} free, snapshots take {units.size(kept)} of at most "
        f"{units.size(wanted)}"
    )
    if free + kept < wanted:
        yield warning("disk", text, "make room, lower state.keep_snapshots or sketch.memory_bytes")
    else:
        yield ok("disk", text)


def clock(_: Config) -> Iterator[Finding]:
    """Check that the kernel's clock is synchronised, with which event times of other machines are compared."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (AttributeError, OSError):
        state = -1
    if state < 0:
        yield skipped("clock", "the kernel does not report the state of the clock")
    elif state == _CLOCK_UNSYNCHRONISED:
        yield warning("clock", "the clock is not synchronised", "run chrony or another NTP client on this machine")
    else:
        yield ok("clock", "synchronised")


def secrets(config: Config) -> Iterator[Finding]:
    """Check that the secret file is readable, and private."""
    path, key = config.control.secret_file, "control.secret_file"
    if path is None:
        yield ok("secrets", "none configured: only ranks on this machine, or with certificates, can connect")
        return
    keys = read_keys(path, key)
    if path.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        yield warning("secrets", f"{key}: {path} can be read or changed by others", f"chmod 0640 {path}")
    else:
        yield ok("secrets", f"{key}: {units.plural(len(keys), 'key')}")


def certificates(config: Config) -> Iterator[Finding]:
    """Check that the files of ``control.tls`` can be used, and that its key is private."""
    tls = config.control.tls
    if tls.cert_file is None or tls.key_file is None or tls.ca_file is None:
        return
    TlsContext(TlsFiles(tls.cert_file, tls.key_file, tls.ca_file), server_side=True)
    if tls.key_file.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        yield warning(
            "certificates", f"control.tls.key_file: {tls.key_file} can be read or changed by others",
            f"chmod 0640 {tls.key_file}",
        )  # fmt: skip
    else:
        yield ok("certificates", f"control.tls: {tls.cert_file}")


def ports(config: Config, *, running: bool) -> Iterator[Finding]:
    """Check that the running daemon accepts connections on its ports, or else that the ports are free."""
    control, server = config.control, config.server
    yield from _port("control port", control.listen_host, control.listen_port, "control.listen_port", running)
    if server.unix_socket is None:
        yield from _port("api port", server.host, server.port, "server.port", running)


def _port(check: str, host: str, port: int, key: str, running: bool) -> Iterator[Finding]:
    where = f"{host}:{port}"
    if port == 0:
        yield skipped(check, f"{key} is 0: the daemon listens on any free port")
    elif running:
        try:
            socket.create_connection((reachable(host), port), _CONNECT_SECONDS).close()
        except OSError as error:
            yield fault(
                check, f"the daemon runs, but {where} refuses connections: {error}", f"compare {key} with the daemon's"
            )
        else:
            yield ok(check, f"{where} answers")
    else:
        problem = _unusable(host, port)
        if problem is None:
            yield ok(check, f"{where} is free")
        elif problem == errno.EADDRINUSE:
            yield fault(check, f"{where} is in use by another process", f"stop it, or change {key}")
        else:
            yield fault(check, f"{where} cannot be listened on: {os.strerror(problem)}", f"change {key} or its host")


def _unusable(host: str, port: int) -> int | None:
    """Return the errno of an attempt to listen there; None if it succeeds."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return None


def reachable(host: str) -> str:
    """Return the address at which this machine reaches a listener on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _nearest(directory: Path) -> Path:
    """Return the directory, or its nearest parent that exists."""
    absolute = directory.absolute()
    return next((path for path in (absolute, *absolute.parents) if path.exists()), Path("/"))
