"""``--watch`` with and without an interval."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from flexd.api.rank import RankPage
from flexd.cli.view import OutputFormat
from flexd.cli.watch import emit_watched, with_watch_interval
from tests.support.repository import ROOT
from tests.support.terminals import ended


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        ("status", "status"),
        ("status -w", "status -w 2"),
        ("status --watch", "status --watch 2"),
        ("status --watch -o json", "status --watch 2 -o json"),
        ("rows items -w", "rows items -w 2"),
        ("rows -w items", "rows -w 2 items"),
        ("tables -w 0.5 -o json", "tables -w 0.5 -o json"),
        ("topology --watch=5", "topology --watch=5"),
        ("pause --reason -w", "pause --reason -w"),
        ("", ""),
    ],
)
def test_a_bare_watch_gets_the_default_interval(given, completed):
    assert with_watch_interval(given.split()) == completed.split()


def watched(url: str, *arguments: str, answers: int) -> list[str]:
    """The first lines of a command that does not end by itself; it must end at once and quietly by SIGINT."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flexd", *arguments, "--watch", "0.2", "--url", url],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        lines = [process.stdout.readline() for _ in range(answers)]
        process.send_signal(2)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
    return lines


@pytest.mark.parametrize("watched", [True, False])
def test_a_reader_that_goes_away_ends_it_as_sigpipe_would(url, watched):
    arguments = ["status", "--watch", "0.2"] if watched else ["explain", "--help"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flexd", *arguments, *(["--url", url] if watched else [])],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    if watched:
        assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    told = process.stderr.read()
    assert (process.wait(30), told) == (141, "")


def test_an_interrupt_that_got_lost_ends_watching_too(capsys, request):
    """Python swallows exceptions that are raised while an object is freed."""
    # A shell without job control starts what it leaves in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    asked = []

    def ask():
        asked.append(1)
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return RankPage(problem="none"), []

    emit_watched(ask, OutputFormat.JSON, 0.2)
    assert len(asked) == 1
    assert json.loads(capsys.readouterr().out)["problem"] == "none"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_watching_goes_on_when_the_daemon_fails_for_a_while(terminal, daemon):
    process = terminal("tables", "--watch", "0.2")
    process.expect("every 0.2 s")
    process.expect("items")
    daemon.error = RuntimeError("away")
    process.expect("error: .*the daemon failed")
    daemon.error = None
    process.expect("items")
    process.sendintr()
    assert ended(process)[1] == 0
