"""``flexd run`` and ``check-config``: files that ship, files with faults, signals, the end of the process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.repository import ROOT

SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_every_shipped_configuration_is_valid(flexd_command, file):
    done = flexd_command("check-config", "-c", file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == [str(file), "ok"]


@pytest.mark.parametrize(("output", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_the_effective_configuration_can_be_fed_back(flexd_command, tmp_path, output, load):
    done = flexd_command(
        "check-config", "-c", ROOT / "configs" / "laptop.yaml", "-o", output, FLEXD__SERVER__PORT="1234"
    )
    document = load(done.stdout)
    assert document["server"]["port"] == 1234
    assert document["shutdown_seconds"] == 20
    again = tmp_path / "again.yaml"
    again.write_text(done.stdout)
    assert flexd_command("check-config", "-c", again).returncode == 0


def test_secrets_are_left_out(flexd_command):
    done = flexd_command(
        "check-config",
        "-c",
        ROOT / "configs" / "kafka.yaml",
        "-o",
        "yaml",
        FLEXD__STREAM__SOURCE__CLIENT_OPTIONS__SSL_PASSWORD="hunter2",
    )
    assert done.returncode == 0
    assert "hunter2" not in done.stdout + done.stderr
    assert "ssl_password: (not shown)" in done.stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("job: x\n", "stream: is required"),
        ("job: [\n", "no valid YAML at line"),
        ("", "top level must be a mapping"),
        (
            "job: x\ntables: [{name: t, rows: 9, dim: 4}]\nstream: {source: {kind: tap}}\n"
            "planner: {exclude_tables: [u]}\n",
            "planner.exclude_tables: no table in tables is named 'u'",
        ),
    ],
)
@pytest.mark.parametrize("command", ["check-config", "run"])
def test_a_bad_file_is_exit_code_two(flexd_command, tmp_path, text, expected, command):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    done = flexd_command(command, "-c", file)
    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stdout == ""


def test_sigterm_before_the_daemon_is_up_ends_it(tmp_path):
    """As process 1 of a container a process has no default action for SIGTERM: what is not handled is lost."""
    code = (
        "import sys, time, types, signal\n"
        "def run_daemon(config, path):\n"
        "    print('loading', flush=True)\n"
        "    time.sleep(30)\n"
        "sys.modules['flexd.daemon'] = types.SimpleNamespace(run_daemon=run_daemon)\n"
        "from flexd.cli import main\n"
        "sys.argv = ['flexd', 'run', '-c', sys.argv[1]]\n"
        "main.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT / "configs" / "laptop.yaml")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "loading\n"
    handled = Path(f"/proc/{process.pid}/status").read_text().split("SigCgt:")[1].split()[0]
    assert int(handled, 16) >> (signal.SIGTERM - 1) & 1
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors
