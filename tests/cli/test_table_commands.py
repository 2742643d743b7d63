"""Tables, rows and topology as people and scripts see them; what is shown again and again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from flexd.api.rank import RankPage
from flexd.api.table import HotRowPage, TablePage
from flexd.cli.blocks import Sentences
from flexd.cli.exit_codes import ExitCode
from flexd.cli.table_commands import rank_blocks, row_blocks, table_blocks
from flexd.cli.view import OutputFormat
from flexd.cli.watch import emit_watched
from flexd.core.errors import ApiError
from tests.support.repository import ROOT

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = {"tables": ["tables"], "rows": ["rows", "items", "-n", "3"], "topology": ["topology"]}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("output", ["table", "json"])
def test_golden(flexd_command, url, name, output):
    """The files under ``golden`` are what was once looked at and found right; write them anew with care."""
    done = flexd_command(*COMMANDS[name], "-o", output, "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    expected = GOLDEN / f"{name}.{'txt' if output == 'table' else 'json'}"
    assert done.stdout == expected.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_json_and_yaml_say_the_same(flexd_command, url, name):
    as_json = json.loads(flexd_command(*COMMANDS[name], "-o", "json", "--url", url).stdout)
    assert yaml.safe_load(flexd_command(*COMMANDS[name], "-o", "yaml", "--url", url).stdout) == as_json


def test_options_reach_the_daemon(flexd_command, url, daemon):
    assert flexd_command("tables", "--order", "memory", "-n", 5, "--offset", 1, "--url", url).returncode == 0
    assert flexd_command("rows", "a b&c", "-n", 7, "--offset", 2, "--url", url).returncode == 0
    assert flexd_command("topology", "--limit", 2, "--offset", 1, "--url", url).returncode == 0
    assert daemon.calls == [("tables", 1, 5, "memory"), ("rows", "a b&c", 2, 7), ("ranks", 1, 2)]
    for wrong in (["tables", "--order", "luck"], ["tables", "-n", 1001], ["rows"], ["topology", "--offset", -1]):
        assert flexd_command(*wrong, "--url", url).returncode == ExitCode.USAGE, wrong


def test_an_unknown_table_is_refused_with_a_remedy(flexd_command, url, daemon):
    daemon.error = ApiError("no table 'x'", status=404, remedy="flexd tables lists them")
    done = flexd_command("rows", "x", "--url", url)
    assert (done.returncode, done.stderr) == (
        ExitCode.REFUSED,
        "error: no table 'x'\nremedy: flexd tables lists them\n",
    )


def test_pages_beyond_the_end_say_so():
    # And nothing else: a heading without rows looks like an answer.
    assert table_blocks(TablePage(total=2, offset=5)) == [Sentences("", ("none of 2 tables there",))]
    assert table_blocks(TablePage(total=1, offset=5)) == [Sentences("", ("none of 1 table there",))]
    assert row_blocks(HotRowPage(table="t", rows=9, total=0, offset=0))[-1].lines == ("no row has been accessed",)
    assert row_blocks(HotRowPage(table="t", rows=9, total=3, offset=5))[-1].lines == ("no rows there",)
    assert rank_blocks(RankPage(problem="no rank is registered"))[0].pairs[0] == ("ranks", "no rank is registered")


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


def test_watched_in_a_pipe_is_a_document_a_line(url):
    lines = watched(url, "topology", "-o", "json", answers=3)
    assert [json.loads(line)["total"] for line in lines] == [4, 4, 4]


def test_watching_ends_in_a_pipe_when_the_daemon_does(flexd_command):
    done = flexd_command("status", "--watch", "0.2", "--url", "http://127.0.0.1:1")
    assert done.returncode == ExitCode.UNREACHABLE


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
