"""Commands as processes: pipes, formats, exit codes, imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flexd.cli.client import ExitCode
from tests.support.repository import ROOT


def test_json_and_yaml_are_one_document(flexd_command, url):
    shown = [flexd_command("get", "tables", "-o", output, FLEXD_URL=url) for output in ("json", "yaml")]
    assert [done.returncode for done in shown] == [0, 0]
    assert json.loads(shown[0].stdout) == yaml.safe_load(shown[1].stdout) != {}


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status", "-o", "xml"],
        ["status", "--url", "ftp://x"],
        ["status", "--url", "http://127.0.0.1:1", "--socket", "x"],
        ["replan", "--timeout", "-1"],
        ["pause", "--reason", "x" * 501],
        ["demo", "--trace", "/nonexistent.npz"],
        ["demo", "--dtype", "int8"],
        ["demo", "--steps", "1"],
        ["demo", "--restart-daemon-after", "5"],
        ["run"],
        ["run", "-c", "/nonexistent.yaml"],
        ["check-config"],
        ["check-config", "configs/laptop.yaml"],
    ],
)
def test_wrong_usage_is_exit_code_two_with_a_reason(flexd_command, arguments):
    done = flexd_command(*arguments)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


def test_the_clients_commands_load_neither_torch_nor_the_daemons_libraries(flexd_command, url):
    code = (
        "import sys\nfrom flexd.cli import main\nsys.argv = ['flexd', 'status', '--url', sys.argv[1]]\n"
        "try:\n    main.main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numba', 'pyarrow', 'kafka', 'fastapi', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, url], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_command_that_trains_says_that_torch_is_missing(flexd_process, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('there is none', name='torch')\n")
    done = flexd_process("demo", PYTHONPATH=os.pathsep.join(map(str, (tmp_path, ROOT))))
    assert done.returncode == ExitCode.FAILED
    assert "Traceback" not in done.stderr
    assert "torch, which is not installed here" in done.stderr


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
