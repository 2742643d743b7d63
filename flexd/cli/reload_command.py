"""``reload``: the configuration file, read again by the running daemon."""

from __future__ import annotations

from flexd.cli.options import BY_HAND, OutputOption, ReasonOption, SocketOption, UrlOption, connect, who
from flexd.cli.view import Facts, OutputFormat, emit


def reload(
    reason: ReasonOption = BY_HAND,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Has the daemon read its configuration file again, as SIGHUP does.

    Keys that need no restart are in effect at once, the others are listed as pending. A file that is wrong changes
    nothing: exit status 4, with the key path.

    Example: flexd reload
    """
    report = connect(url, socket).reload(reason, who())
    facts = Facts(
        "",
        (
            ("file", report.file),
            ("applied", ", ".join(report.applied) or "nothing"),
            ("needs a restart", ", ".join(report.pending) or "nothing"),
        ),
    )
    emit(report, [facts], output)
