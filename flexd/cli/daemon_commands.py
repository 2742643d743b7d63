"""``run`` and ``check-config``."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from flexd.cli.blocks import Facts
from flexd.cli.options import ConfigOption
from flexd.cli.render import OutputFormat, emit, flat, show
from flexd.core import units
from flexd.core.fast_start import import_numba, pause_garbage_collector

if TYPE_CHECKING:
    from flexd.config.model import Config


def run(
    config: ConfigOption,
) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    SIGHUP makes it read the file again, as `flexd reload` does.

    Example: flexd run -c configs/laptop.yaml
    """
    # Process 1 of a container has no default action and would lose a signal before the daemon installs its handlers.
    signal.signal(signal.SIGTERM, _end_quietly)
    # The file has not been read yet, so that a reload has no effect; the default action would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from flexd.config import checks
    from flexd.config.load import load_config

    checked = load_config(config)
    # The daemon enables it again once it has started.
    pause_garbage_collector()
    import_numba()
    checks.check_config(checked, str(config))
    from flexd.daemon import run_daemon

    try:
        code = run_daemon(checked, config)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    _end_process(code)


def _end_process(code: int) -> NoReturn:
    """End without the interpreter's teardown, which would wait for, or break, threads that did not stop in time."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_quietly(*_: object) -> None:
    sys.exit(0)


def check_config(
    config: ConfigOption,
    output: Annotated[
        OutputFormat | None, typer.Option("-o", "--output", help="Print the effective configuration without secrets.")
    ] = None,
) -> None:
    """Check a configuration as `flexd run` does.

    Variables FLEXD__SECTION__KEY of the environment are applied to it. Exit status 2 if `run` would refuse it. Secrets
    and certificates are not checked.

    Example: flexd check-config -c configs/laptop.yaml -o yaml
    """
    from flexd.config import checks
    from flexd.config.load import load_config

    checked = load_config(config)
    checks.check_config(checked, str(config))
    if output is None:
        show([_summary(config, checked)], typer.get_text_stream("stdout"))
    else:
        emit(checked.document(), [Facts("", tuple(flat(checked.document()).items()))], output)


def _summary(file: Path, config: Config) -> Facts:
    rows = sum(table.rows for table in config.tables)
    return Facts(
        "",
        (
            (str(file), "ok"),
            ("job", config.job),
            (
                "tables",
                f"{len(config.tables)} with {units.count(rows)} rows" if config.tables else "those of the ranks",
            ),
            ("source", config.stream.source.kind),
            ("api", _api(config)),
            ("metrics", config.server.metrics_listen or "with the api"),
        ),
    )


def _api(config: Config) -> str:
    server = config.server
    return f"unix socket {server.unix_socket}" if server.unix_socket else f"{server.host}:{server.port}"
