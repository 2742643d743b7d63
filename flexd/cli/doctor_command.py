"""``doctor``: checks the configuration, the machine, the stream and the daemon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexd.api import routes
from flexd.api.status import DaemonStatus
from flexd.cli.client import DaemonAddress, DaemonClient, connect
from flexd.cli.exit_codes import DaemonRefusedError, ExitCode
from flexd.cli.options import ConfigOption, OutputOption, SocketOption, UrlOption
from flexd.cli.render import OutputFormat, flat, present
from flexd.core import units
from flexd.core.errors import ApiError, ConfigError

if TYPE_CHECKING:
    from flexd.config.model import Config
    from flexd.doctor import Finding


def doctor(
    config: ConfigOption,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1, max=300, help="Deadline of the broker, in seconds.")
    ] = 10.0,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Check configuration, machine, stream and daemon.

    Checks versions, disk, clock, secrets, ports, broker and messages too. Changes nothing and does not disturb a
    running daemon. Exit status 7 if there is a fault, 0 if there are only warnings.

    Example: flexd doctor -c configs/laptop.yaml
    """
    from flexd.doctor import DoctorReport, Level

    findings = examine(config, timeout, url, socket)
    found = Counter(each.level for each in findings)
    counts = {level: found[level] for level in Level}
    remedies = tuple(f"{each.check}: {each.remedy}" for each in findings if each.remedy)
    present(DoctorReport(findings=tuple(findings), counts=counts, messages=remedies), output)
    raise typer.Exit(ExitCode.FOUND if counts[Level.FAULT] else ExitCode.OK)


def examine(file: Path, timeout_seconds: float, url: str | None, socket: Path | None) -> list[Finding]:
    """Return all findings, in the order in which faults should be repaired.

    The address of the daemon is ``url`` or ``socket``, else that of the environment, else that of the file.
    """
    from flexd import doctor as checks
    from flexd.daemon.config_file import load_with_known_tables

    try:
        config = load_with_known_tables(file)
    except ConfigError as error:
        return [
            checks.fault("configuration", line, error.remedy or "docs/configuration.md lists every key")
            for line in error.message.splitlines()
        ]
    client = connect(url, socket, configured=configured_address(config))
    status, answers = _status(client)
    looks = {
        "versions": lambda: checks.versions(config),
        "secrets": lambda: checks.secrets(config),
        "certificates": lambda: checks.certificates(config),
        "disk": lambda: checks.disk(config),
        "clock": lambda: checks.clock(config),
        "ports": lambda: checks.ports(config, running=status is not None),
        "stream": lambda: checks.stream(config, timeout_seconds),
    }
    findings = [checks.ok("configuration", f"{file}: job {config.job}, {units.plural(len(config.tables), 'table')}")]
    for name, look in looks.items():
        findings += checks.run(name, look)
    return findings + answers + (checks.run("daemon", lambda: _running(client, status, config)) if status else [])


def configured_address(config: Config) -> DaemonAddress | None:
    """Return the address of a daemon with this configuration, as this machine reaches it; None if its port is free to
    vary."""
    from flexd.doctor import reachable

    server = config.server
    if server.unix_socket is not None:
        return DaemonAddress("http://flexd", server.unix_socket)
    if server.port == 0:
        return None
    scheme = "http" if server.tls.cert_file is None else "https"
    host = reachable(server.host)
    return DaemonAddress(f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}")


def _status(client: DaemonClient) -> tuple[DaemonStatus | None, list[Finding]]:
    from flexd import doctor as checks

    try:
        return client.send(routes.STATUS), []
    except DaemonRefusedError as error:
        return None, [checks.fault("daemon", error.message, error.remedy or "see its log")]
    except ApiError as error:
        return None, [checks.warning("daemon", error.message, error.remedy)]


def _running(client: DaemonClient, status: DaemonStatus, config: Config) -> Iterator[Finding]:
    from flexd.doctor import daemon as daemon_findings

    running, file = flat(client.send(routes.CONFIG).config), flat(config.document())
    differing = [key for key in {**file, **running} if file.get(key) != running.get(key)]
    yield from daemon_findings(status, differing)
