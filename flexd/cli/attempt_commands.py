"""``attempts list``, ``attempts prefer`` and ``attempts forget``."""

from __future__ import annotations

from typing import Annotated

import typer

from flexd.api import routes
from flexd.api.attempt import AttemptReport, AttemptResult
from flexd.cli.blocks import Block, Sentences, Table
from flexd.cli.client import DaemonClient
from flexd.cli.exit_codes import DaemonRefusedError
from flexd.cli.interactive import DryRunOption, YesOption, confirm
from flexd.cli.options import BY_HAND, OutputOption, ReasonOption, SocketOption, UrlOption, connect, who
from flexd.cli.view import OutputFormat, emit
from flexd.core import units

app = typer.Typer(
    help="List the launches of the training job, or choose the one that holds it.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip
NameArgument = Annotated[str, typer.Argument(metavar="ATTEMPT", help="Name in flexd attempts list.")]
_NAMED_HOSTS = 3


@app.command("list")
def list_command(url: UrlOption = None, socket: SocketOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the attempt that holds the job, those that wait for it, and those that ended within an hour.

    Example: flexd attempts list
    """
    answer = connect(url, socket).send(routes.ATTEMPTS)
    emit(answer, attempt_blocks(answer.attempts), output)


@app.command("prefer")
def prefer_command(
    attempt: NameArgument,
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Give the job to an attempt, although the ranks of the present one are alive.

    The ranks of the other attempt train on with the placement that they have and get no further migrations. The
    job is kept for the preferred attempt until it ends, or until none of its ranks was heard for 60 seconds.

    Example: flexd attempts prefer debug --yes
    """
    client = connect(url, socket)
    if dry_run:
        listed, known = _known(client, attempt)
        preview = AttemptResult(attempt=attempt, changed=known.state != "HOLDS", attempts=listed)
        _emit(preview, "would hold", output)
        return
    confirm(f"The attempt that holds the job gets no further migrations. Give the job to {attempt}?", yes)
    _emit(client.send(routes.PREFER, attempt=attempt, reason=reason, who=who()), "gets", output)


@app.command("forget")
def forget_command(
    attempt: NameArgument,
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Drop what the daemon knows of an attempt that has ended or waits.

    An attempt whose ranks are alive and hold the job is refused. One that waits registers again by itself. After a
    restart of the daemon it ends the wait for the attempt that held the job before.

    Example: flexd attempts forget prod-0-99fe --yes
    """
    client = connect(url, socket)
    if dry_run:
        listed, known = _known(client, attempt)
        preview = AttemptResult(attempt=attempt, changed=known.state != "HOLDS" or known.ranks == 0, attempts=listed)
        _emit(preview, "would be forgotten", output)
        return
    confirm(f"Forget attempt {attempt}?", yes)
    _emit(client.send(routes.FORGET, attempt=attempt, reason=reason, who=who()), "forgotten", output)


def attempt_blocks(attempts: tuple[AttemptReport, ...]) -> list[Block]:
    """Return the attempts as a table."""
    if not attempts:
        return [Sentences("", ("no attempt has registered",))]
    columns = ("attempt", "state", "ranks", "since", "hosts", "reason")
    rows = tuple(
        (
            each.attempt,
            each.state.lower() + (", preferred" if each.preferred else ""),
            f"{each.ranks} of {each.world_size}" if each.world_size else str(each.ranks),
            "" if each.since_unix_seconds is None else units.when(each.since_unix_seconds),
            _hosts(each.hosts),
            each.reason or "",
        )
        for each in attempts
    )
    return [Table("", columns, rows, frozenset(("ranks",)), spare=("hosts", "reason"), whole=frozenset(("attempt",)))]


def _known(client: DaemonClient, attempt: str) -> tuple[tuple[AttemptReport, ...], AttemptReport]:
    """Return all attempts and the one of this name; raises what the daemon would if there is none."""
    listed = client.send(routes.ATTEMPTS).attempts
    for each in listed:
        if each.attempt == attempt:
            return listed, each
    raise DaemonRefusedError(
        f"no attempt {attempt!r}", status=404, remedy="flexd attempts list shows those that are known"
    )


def _hosts(hosts: tuple[str, ...]) -> str:
    more = f" and {len(hosts) - _NAMED_HOSTS} more" if len(hosts) > _NAMED_HOSTS else ""
    return ", ".join(hosts[:_NAMED_HOSTS]) + more


def _emit(result: AttemptResult, done: str, output: OutputFormat) -> None:
    words = {
        ("gets", True): f"the job is kept for attempt {result.attempt}",
        ("gets", False): f"nothing changes: attempt {result.attempt} holds the job, or it is kept for it",
        ("would hold", True): f"the job would be kept for attempt {result.attempt}",
        ("would hold", False): f"nothing would change: attempt {result.attempt} holds the job",
        ("forgotten", True): f"forgotten: {result.attempt}",
        ("would be forgotten", True): f"would be forgotten: {result.attempt}",
        ("would be forgotten", False): f"would be refused: ranks of attempt {result.attempt} hold the job",
    }
    emit(result, [Sentences("", (words[done, result.changed],))], output)
