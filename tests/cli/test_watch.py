"""``--watch`` with and without an interval."""

from __future__ import annotations

import pytest

from flexd.cli.watch import with_watch_interval


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
