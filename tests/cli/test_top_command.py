"""``flexd top`` on a terminal and in a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.terminals import ended

pytestmark = pytest.mark.alone
GOLDEN = Path(__file__).parent / "golden"
ALTERNATE_SCREEN = "\x1b[?1049h"


def test_top_draws_on_a_screen_of_its_own_and_leaves_it(terminal):
    process = terminal("top", "--delay", "0.2")
    process.expect_exact(ALTERNATE_SCREEN)
    process.expect("traffic of a rank and step")
    process.expect("row-wise")
    process.expect("ranks")
    # Names of tables are shown as they are, not obeyed.
    process.expect_exact("<img src=x")
    process.sendintr()
    text, status = ended(process)
    assert status == 0
    assert "Traceback" not in text


def test_top_in_a_pipe_looks_once_and_is_plain(flexd_command, url):
    done = flexd_command("top", "--url", url)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout == (Path(__file__).parent / "golden" / "top.txt").read_text(encoding="utf-8")
