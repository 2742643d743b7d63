"""Text on a terminal against golden files: styles, widths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.plans import FULL_PLAN
from tests.support.statuses import STATUSES
from tests.support.terminals import ended

pytestmark = pytest.mark.alone


STYLE = re.compile(r"\x1b\[[0-9;]*m")
GOLDEN = Path(__file__).parent / "golden"
MARKS = {"\x1b[1m": "<b>", "\x1b[2m": "<dim>", "\x1b[1;31m": "<red>", "\x1b[0m": "</>"}
"""Styles as the golden files write them."""


def marked(text: str) -> str:
    """The text with its styles in words. Empty ones and the padding at the end of lines go."""
    for code, mark in MARKS.items():
        text = text.replace(code, mark)
    assert "\x1b" not in text
    lines = [re.sub(r"(<dim>\s*</>|\s)+$", "", line) for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize("name", STATUSES)
def test_golden_status_on_a_terminal_with_its_styles(terminal, daemon, name):
    daemon.status = lambda: STATUSES[name]
    text, status = ended(terminal("status"))
    assert status == 0
    assert marked(text) == (GOLDEN / f"{name}.terminal.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize("command", ["tables", "topology", "history", "status", "plan", "proposals", "explain items"])
def test_golden_on_a_terminal(terminal, daemon, command, columns):
    """Nothing is wider than the terminal, figures are not broken, and what has no room is named."""
    daemon.status = lambda: STATUSES["status-degraded-stream"]
    daemon.plan = lambda: FULL_PLAN
    text, status = ended(terminal(*command.split(), columns=columns))
    assert status == 0
    assert STYLE.search(text)
    plain = STYLE.sub("", text).splitlines()
    assert max(map(len, plain)) <= columns
    shown = "".join(f"{line.rstrip()}\n" for line in plain)
    assert shown == (GOLDEN / f"{command.split()[0]}.terminal-{columns}.txt").read_text(encoding="utf-8")
