"""``flexd simulate`` in full."""

from __future__ import annotations

import json

import pytest

from flexd.cli.exit_codes import ExitCode

SMALL = (
    "simulate", "--zipf", 1.05, "--rows", 600, "--drift", 4, "--batch", 40, "--history", 4, "--steps", 16,
    "--interval-steps", 3, "--half-life-steps", 4, "--scale", 1e7,
)  # fmt: skip


def test_simulate_prints_its_result(flexd_command):
    first = flexd_command(*SMALL, "-o", "json")
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    assert set(found["strategies"]) == {
        "row_wise", "row_wise_dedup", "two_hop", "static", "replanned", "oracle"
    }  # fmt: skip
    assert found["compared_steps"] == [12, 16]
    assert found["accesses_per_step"] == 4 * 40 * 5
    table = flexd_command(*SMALL)
    assert "flexd, re-planned" in table.stdout
    assert "answer:" in table.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--zipf", "1.0", "--trace", __file__],
        ["--zipf", "-1"],
        ["--zipf", "1", "--rows", "0"],
        ["--zipf", "1", "--batch", "100000000"],
        ["--trace", "/nonexistent.npz"],
        ["--replica-fraction", "1.5"],
        ["--preset", "x", "--topology", "y"],
        ["--half-life-steps", "0"],
        ["--steps", "3"],
        ["--dtype", "int8"],
    ],
)
def test_wrong_usage_of_simulate(flexd_command, arguments):
    done = flexd_command("simulate", *arguments)
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr
