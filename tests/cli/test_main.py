"""Commands as processes: pipes, formats, exit codes, imports."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml

from flexd.cli.client import ExitCode
from flexd.cli.main import app
from flexd.config.model import load_config
from flexd.daemon.config_file import sketch_settings
from flexd.sketch.sketch_set import SketchSet
from tests.support.flexd_processes import flexd
from tests.support.repository import ROOT
from tests.support.saved_sketches import save_sketches


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


def test_a_command_that_trains_says_that_torch_is_missing(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('there is none', name='torch')\n")
    done = flexd("demo", PYTHONPATH=os.pathsep.join(map(str, (tmp_path, ROOT))))
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


SMALLER = {
    "simulate": ["--steps", "8", "--batch", "4", "--history", "2"],
    "advise": ["--steps", "8", "--batch", "4", "--history", "2", "--nodes", "1", "--local-ranks", "2"],
}
"""Options that make a long example short."""
PARSED_ONLY = {
    "run": "runs until it is stopped: tests/e2e",
    "demo": "trains: tests/e2e/test_demo_runs.py",
    "probe": "needs ranks: tests/topology/test_probe.py",
    "stream": "needs a topic: tests/cli/test_stream_command.py",
}


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    # Typer may carry its own copy of click: a group is what has commands.
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, below in command.commands.items():
        if not below.hidden:
            yield from leaves(below, (*path, name))


GROUP = typer.main.get_command(app)
COMMANDS = dict(leaves(GROUP))


def examples(command: Any) -> list[str]:
    return re.findall(r"Example: +(.+)", command.help or "")


CASES = [(path, line) for path, command in COMMANDS.items() for line in examples(command)]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_of_itself(path):
    found = examples(COMMANDS[path])
    assert found, f"flexd {' '.join(path)} has no 'Example: flexd ...' in its help"
    for line in found:
        assert f"flexd {' '.join(path)}" in line


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the files that the examples name: a trace, the configurations, and a snapshot of the laptop's daemon."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    rows = np.tile(np.arange(20), 20)
    np.savez(
        tmp_path / "events.npz", row=rows, ts=np.arange(len(rows)) + 1.7e9, table_rows=np.array([100_000]),
        table_names=np.array(["items"]),
    )  # fmt: skip
    (tmp_path / "tables.csv").write_text(
        "fqn,sharding,sum_pooling_factor,sum_num_poolings,output,emb_dim,hash_size,n_shards,ranks,batch\n"
        "bags.items,TW,30,1,pooled,64,100000,1,3,512\n"
    )
    config = load_config(Path("configs/laptop.yaml"))
    sketches = SketchSet(config.keyspace().tables, sketch_settings(config))
    sketches.ingest("items", rows, 0, 1.7e9, np.array([len(rows)]))
    save_sketches(tmp_path / config.state.dir / "snapshots", sketches)
    return tmp_path


@pytest.mark.parametrize(("path", "line"), CASES, ids=[line for _, line in CASES])
def test_the_example_runs(path, line, workplace, flexd_command, url):
    words = shlex.split(line)
    arguments = words[words.index("flexd") + 1 :]
    if path[0] in PARSED_ONLY:
        command, rest = COMMANDS[path], arguments[len(path) :]
        with command.make_context(path[-1], rest) as context:
            assert context.params
        return
    done = flexd_command(*arguments, *SMALLER.get(" ".join(path), []), FLEXD_URL=url)
    assert "Traceback" not in done.stderr
    assert done.returncode in ((0, 7) if path == ("doctor",) else (0,)), (done.stdout, done.stderr)
    assert done.stdout.strip()
