"""``reload``: the configuration file, read again by the running daemon."""

from __future__ import annotations

from flexd.cli.config_view import reload_blocks, reload_sentence
from flexd.cli.confirm import DryRunOption, YesOption, confirm, must_ask
from flexd.cli.options import BY_HAND, OutputOption, ReasonOption, SocketOption, UrlOption, connect, who
from flexd.cli.view import OutputFormat, emit


def reload(
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Has the daemon read its configuration file again, as SIGHUP does.

    Keys that need no restart are in effect at once, the others are listed as pending. A file that is wrong changes
    nothing: exit status 4, with the key path.

    Example: flexd reload --yes
    Example: flexd reload --dry-run
    """
    client = connect(url, socket)
    if dry_run:
        report = client.preview_reload()
    else:
        if must_ask(yes):
            confirm(f"{reload_sentence(client.preview_reload())} Reload?", yes)
        report = client.reload(reason, who())
    emit(report, reload_blocks(report), output)
