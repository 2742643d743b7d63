"""The promises of docs/security.md: each names tests that are collected, and bounds that are those of the code."""

import ast
import re

from flexd.control.daemon.channel_events import ChannelOptions
from flexd.control.protocol.handshake import MAX_CLIENT_BYTES
from flexd.control.protocol.wire import MAX_FRAME_BYTES
from flexd.server import access, app, http
from flexd.stream.kafka.bounded_fetcher import BatchLimits
from tests.support.channel import memory_bound_bytes
from tests.support.repository import ROOT

SECTION = (ROOT / "docs" / "security.md").read_text(encoding="utf-8").split("\n## Promises\n")[1].partition("\n## ")[0]
_TEST = re.compile(r"`(tests/[\w/]+\.py::test_\w+)`")


def promises() -> dict[str, list[str]]:
    """Return the tests of each promise."""
    rows = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")]
    return {row[-2]: _TEST.findall(row[-1]) for row in rows[1:]}


def run_by_default(path: str) -> dict[str, bool]:
    """Return the tests of a file, and whether `make test` runs each."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and _is_pytestmark(node)]
    all_long = any("pytest.mark.long" in ast.unparse(mark) for mark in marks)
    return {
        # A parameter that is marked leaves the others.
        f"{path}::{node.name}": not all_long and "pytest.mark.long" not in map(ast.unparse, node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _is_pytestmark(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)


def test_every_promise_names_a_test_that_make_test_collects() -> None:
    table = promises()
    assert len(table) >= 20
    named = {test for tests in table.values() for test in tests}
    run = {
        name: runs
        for path in {test.partition("::")[0] for test in named}
        for name, runs in run_by_default(path).items()
    }
    assert named <= set(run), "these tests do not exist"
    assert [promise for promise, tests in table.items() if not any(run[test] for test in tests)] == []


def test_every_row_has_a_promise_and_tests() -> None:
    for line in SECTION.splitlines():
        if line.startswith("| ") and "---" not in line:
            assert line.count(" | ") == 2, line
    assert all(promises().values())


def test_bounds_are_those_of_the_code() -> None:
    options = ChannelOptions()
    mib = 2**20
    stated = (
        f"{MAX_CLIENT_BYTES:,} bytes of a connection are read at most, in {options.handshake_seconds:g} s",
        f"of {options.max_unproven:,} unproven connections",
        f"uses {-(-memory_bound_bytes(options) // mib):,} MiB of the daemon's memory at most "
        f"({-(-memory_bound_bytes(options, with_tls=True) // mib):,} MiB with `control.tls`)",
        f"a proven rank, of {options.max_peers:,}",
        f"frames of {MAX_FRAME_BYTES / mib:.2f} MiB at most; of {options.peer_unread_bytes // mib} MiB that wait",
        f"expands no batch beyond {BatchLimits().max_batch_bytes // mib} MiB",
        f"a head in {http.HEAD_SECONDS:g} s and a body of {access.MAX_REQUEST_BYTES // 1024} KiB in "
        f"{access.BODY_SECONDS:g} s, has {http.MAX_CONNECTIONS} connections and {app.MAX_SLOW_CALLS} slow calls",
    )
    assert [each for each in stated if each not in SECTION] == []
