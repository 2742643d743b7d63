"""``flexd explain`` against a fake daemon."""

from __future__ import annotations

import pytest

from flexd.cli.explain_command import split_target


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
