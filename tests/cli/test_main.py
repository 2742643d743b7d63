"""Commands as processes: pipes, formats, exit codes, imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from flexd.cli.exit_codes import ExitCode
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
