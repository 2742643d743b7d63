"""Blocks as text."""

from __future__ import annotations

import io

from flexd.api.status import Status
from flexd.api.stream import StreamStatus
from flexd.cli.status_command import status_blocks
from flexd.cli.view import show


def test_text_from_the_daemon_cannot_style_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    show(status_blocks(Status(job="[red]ads[/]", version="1", stream=StreamStatus(source="x"))), stream)
    assert "[red]ads[/]" in stream.getvalue()
