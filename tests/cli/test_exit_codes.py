"""Exit statuses: errors, outcomes, and what help and docs say of them."""

from __future__ import annotations

import re

import pytest

from flexd.cli.exit_codes import (
    MEANINGS,
    DaemonRefusedError,
    DaemonTimeoutError,
    DaemonUnreachableError,
    ExitCode,
    exit_code_of,
)
from flexd.core.errors import (
    ApiError,
    ConfigError,
    FlexdError,
    StateLockedError,
    StateVersionError,
    TopologyError,
    UnusableStateError,
)  # fmt: skip
from tests.support.repository import ROOT


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (TopologyError("x"), 2),
        (DaemonUnreachableError("x"), 3),
        (DaemonRefusedError("x"), 4),
        (DaemonTimeoutError("x"), 5),
        (StateLockedError("x"), 6),
        (UnusableStateError("x"), 9),
        (StateVersionError("x"), 9),
        (ApiError("port taken"), 1),
        (FlexdError("x"), 1),
    ],
)
def test_exit_codes_of_errors(error: FlexdError, code: int) -> None:
    assert exit_code_of(error) == code


def test_help_and_docs_list_every_exit_code_with_its_meaning(flexd_command) -> None:
    expected = {int(code): meaning for code, meaning in MEANINGS.items()}
    assert set(MEANINGS) == set(ExitCode)
    shown = flexd_command("--help").stdout.split("Exit status:")[1].split("Options:")[0]
    assert {int(code): meaning for code, meaning in re.findall(r"^ +(\d+) +(\S.*)$", shown, re.MULTILINE)} == expected
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    table = page.split("| exit status | meaning |\n")[1].split("\n\n")[0]
    assert {
        int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE)
    } == expected
