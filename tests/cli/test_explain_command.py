"""``flexd explain`` against a fake daemon."""

from __future__ import annotations

import json

import pytest
import yaml

from flexd.cli.exit_codes import ExitCode
from flexd.cli.explain_command import split_target
from flexd.core.errors import ApiError


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("items", ("items", None)),
        ("items:12", ("items", 12)),
        ("shop:items:0", ("shop:items", 0)),
        ("items:", ("items:", None)),
        (":5", (":5", None)),
        ("items:x1", ("items:x1", None)),
        ("items:-1", ("items:-1", None)),
        ("items:²", ("items:²", None)),
    ],
)
def test_only_digits_behind_the_last_colon_are_a_row(target, expected):
    assert split_target(target) == expected


def test_explain_reaches_the_daemon(flexd_command, url, daemon):
    row = flexd_command("explain", "a b&c:12", "--url", url)
    assert row.returncode == 0, row.stderr
    assert daemon.calls[-1] == ("explain", "a b&c", 12, 10)
    assert "a b&c:12" in row.stdout
    assert "At NODE it saves 1 ns a step against HOME" in row.stdout
    assert "It is at HOME now and moves with the next plan." in row.stdout
    table = flexd_command("explain", "items", "--hottest", 3, "--url", url)
    assert daemon.calls[-1] == ("explain", "items", None, 3)
    assert "hottest rows" in table.stdout
    assert "promoted from" in table.stdout


@pytest.mark.parametrize(("output", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_explain_speaks_json_and_yaml(flexd_command, url, output, load):
    answer = load(flexd_command("explain", "items:7", "-o", output, "--url", url).stdout)
    assert answer["explained"][0]["row"] == 7
    assert answer["thresholds"][0]["tier"] == "NODE"


def test_explain_of_an_unknown_table_names_the_known_ones(flexd_command, url, daemon):
    daemon.error = ApiError("no table 'x'", status=404, remedy="one of items")
    done = flexd_command("explain", "x", "--url", url)
    assert done.returncode == ExitCode.REFUSED
    assert done.stderr == "error: no table 'x'\nremedy: one of items\n"
