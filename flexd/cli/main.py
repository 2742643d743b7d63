"""The ``flexd`` command: its subcommands, those of a configuration file (``run``, ``check-config``, ``state``), and the
exit status of errors."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import flexd
from flexd.cli import check_commands, client_commands, replay_commands, shard_command, stream_command
from flexd.cli.blocks import Facts, Sentences
from flexd.cli.client import MEANINGS, ExitCode, exit_code_of
from flexd.cli.options import ConfigOption, DryRunOption, OutputOption, YesOption, confirm, with_options
from flexd.cli.render import OutputFormat, emit, flat, present, show
from flexd.core import units
from flexd.core.errors import FlexdError
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
    from flexd.config.model import check_config as check_loaded
    from flexd.config.model import load_config

    checked = load_config(config)
    # The daemon enables it again once it has started.
    pause_garbage_collector()
    import_numba()
    check_loaded(checked, str(config))
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
    from flexd.config.model import check_config as check_loaded
    from flexd.config.model import load_config

    checked = load_config(config)
    check_loaded(checked, str(config))
    if output is None:
        show([_summary(config, checked)], typer.get_text_stream("stdout"))
    else:
        emit(checked.document(), [Facts("", tuple(flat(checked.document()).items()))], output)


def _summary(file: Path, config: Config) -> Facts:
    rows, server = sum(table.rows for table in config.tables), config.server
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
            ("api", f"unix socket {server.unix_socket}" if server.unix_socket else f"{server.host}:{server.port}"),
            ("metrics", server.metrics_listen or "with the api"),
        ),
    )


state = typer.Typer(
    help="Show or reset the saved state of a daemon.\n\n"
    "These commands read the files in state.dir of FILE, not a running daemon.\n\n"
    "Example: flexd state show -c configs/laptop.yaml",
    no_args_is_help=True,
)


def _load(config: Path) -> Config:
    from flexd.core import supervision
    from flexd.daemon.config_file import load_with_known_tables

    supervision.arm()
    return load_with_known_tables(config)


@state.command("show")
def show_state(config: ConfigOption, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the snapshots, and what a start with FILE would keep of them.

    Changes nothing, and may run beside the daemon. Exit status 9 if a start would be refused.

    Example: flexd state show -c configs/laptop.yaml
    """
    loaded = _load(config)
    from flexd.daemon import state_directory

    report = state_directory.report(loaded)
    present(report, output, tables=True)
    raise typer.Exit(ExitCode.OK if report.starts else ExitCode.STATE_UNUSABLE)


@state.command("reset")
def reset_state(
    config: ConfigOption,
    keep_positions: Annotated[
        bool, typer.Option("--keep-positions", help="Count from the saved stream positions on, not from the earliest.")
    ] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Remove the snapshots, so that the next start counts from empty.

    The newest is kept under a name that ends in .unusable; renamed back, it is used again. By default the next start
    reads all that the stream still holds. Exit status 6 if a daemon uses the directory.

    Example: flexd state reset -c configs/laptop.yaml --yes
    """
    loaded = _load(config)
    from flexd.daemon import state_directory

    report = state_directory.report(loaded)
    accesses = report.snapshots[0].accesses if report.snapshots else 0
    message = (
        f"This removes {units.plural(len(report.snapshots), 'snapshot')} with {units.count(accesses)} accesses in "
        f"{report.directory}."
    )
    if dry_run:
        emit({"dry_run": True, **report.model_dump(mode="json")}, [Sentences("", (message,))], output)
        return
    confirm(f"{message} Reset?", yes)
    present(state_directory.reset(loaded, keep_positions=keep_positions), output)


app = typer.Typer(
    name="flexd",
    help="Keeps the embedding rows of a running recommender training in the right places.\n\n"
    # click keeps the lines of a paragraph that begins with \b.
    "\b\nExit status:\n" + "\n".join(f"  {code:<3}  {meaning}" for code, meaning in MEANINGS.items()),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(given: bool) -> None:
    if given:
        print(f"flexd {flexd.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version of flexd.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of ``flexd`` itself."""


app.command("run")(run)
app.command("check-config")(check_config)
for command in (
    client_commands.status, client_commands.get, client_commands.describe, client_commands.plan,
    client_commands.explain, client_commands.replan, client_commands.apply, client_commands.abort,
    client_commands.rollback, client_commands.throttle, client_commands.pause, client_commands.resume,
    client_commands.reload,
):  # fmt: skip
    app.command()(command)
app.add_typer(client_commands.affinity, name="affinity")
app.add_typer(state, name="state")
app.add_typer(stream_command.stream, name="stream")
app.command("demo")(with_options(replay_commands.demo))
app.command("simulate")(with_options(replay_commands.simulate))
app.command("advise")(with_options(replay_commands.advise))
app.command("shard")(with_options(shard_command.shard))
app.command("probe")(check_commands.probe)
app.command("doctor")(check_commands.doctor)


def main() -> None:
    """Run one command and end the process with an ``ExitCode``."""
    try:
        _run()
    except SystemExit as ended:
        sys.exit(ExitCode.UNREAD if _unread() else ended.code)


def _unread() -> bool:
    """Return True if the reader of the output has closed the pipe."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    else:
        # Typer turns a closed pipe into exit status 1 and replaces stdout by a wrapper that hides it.
        if type(sys.stdout).__name__ != "PacifyFlushWrapper":
            return False
    # Python flushes stdout once more when it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def _run() -> None:
    try:
        app()
    except FlexdError as error:
        _fail(error.message, error.remedy, exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            _fail(
                "this command trains or measures with torch, which is not installed here",
                "run it where flexd is installed with torch; the daemon's image has none", ExitCode.FAILED,
            )  # fmt: skip
        traceback.print_exc()
        _fail(
            f"{type(error).__name__}: {error}",
            "this is a bug in flexd; please report it with the lines above", ExitCode.FAILED,
        )  # fmt: skip


def _fail(message: str, remedy: str, code: ExitCode) -> NoReturn:
    # A configuration may have several faults, one a line; the remedy is a line of its own.
    print(f"error: {message}" + (f"\nremedy: {remedy}" if remedy else ""), file=sys.stderr)
    sys.exit(code)
