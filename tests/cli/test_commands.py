"""The commands as users run them: processes, pipes, exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
import yaml

import flexd
from flexd.cli import client as client_module
from flexd.cli.client import DaemonAddress, DaemonClient
from flexd.cli.exit_codes import DaemonTimeoutError, DaemonUnreachableError, ExitCode
from flexd.config.server import ServerConfig
from flexd.core.errors import PlanError
from flexd.server.http import DaemonServer
from flexd.server.metrics import Metrics
from tests.support.repository import ROOT

ESCAPE = "\x1b["


def test_status_in_a_pipe_is_plain_text(flexd_process, url):
    done = flexd_process("status", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert ESCAPE not in done.stdout
    assert re.search(r"^  source +file_log, 0 messages behind", done.stdout, re.MULTILINE)
    assert all(len(line) == len(line.rstrip()) for line in done.stdout.splitlines())


def test_version_and_a_bare_watch_as_users_type_them(flexd_process, url):
    done = flexd_process("--version")
    assert (done.returncode, done.stdout) == (0, f"flexd {flexd.__version__}\n")
    done = flexd_process("status", "--watch", "--url", "http://127.0.0.1:1")
    assert done.returncode == ExitCode.UNREACHABLE, done.stderr


def test_an_unknown_preset_is_wrong_usage(flexd_command):
    done = flexd_command("simulate", "--preset", "azure-a100-20g")
    assert done.returncode == ExitCode.USAGE
    assert "azure-a100-200g" in done.stderr


@pytest.mark.parametrize(("output", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
@pytest.mark.parametrize("command", ["status", "plan", "replan", "pause", "resume"])
def test_every_command_speaks_json_and_yaml(flexd_command, url, output, load, command):
    done = flexd_command(command, "-o", output, FLEXD_URL=url)
    assert done.returncode == 0, done.stderr
    answer = load(done.stdout)
    key = {"status": "job", "plan": "plan_id", "replan": "outcome"}.get(command, "paused")
    assert key in answer


@pytest.mark.parametrize("command", ["plan", "replan", "pause", "resume"])
def test_every_command_has_a_table(flexd_command, url, command):
    done = flexd_command(command, "--url", url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_options_reach_the_daemon(flexd_command, url, daemon, monkeypatch):
    monkeypatch.setattr("flexd.cli.pause_command.who", lambda: "ann@host")
    monkeypatch.setattr("flexd.cli.plan_commands.who", lambda: "ann@host")
    assert flexd_command("replan", "--wait", "--timeout", 7, "--reason", "launch", "--url", url).returncode == 0
    assert flexd_command("replan", "--timeout", 7, "--url", url).returncode == 0
    assert flexd_command("pause", "--reason", "night", "--url", url).stdout == "paused: night\n"
    assert flexd_command("resume", "--url", url).stdout == "running\n"
    assert flexd_command("resume", "--url", url).stdout == "already running\n"
    assert flexd_command("resume", "--reason", "morning", "--url", url).returncode == 0
    assert daemon.calls == [
        ("replan", "launch", 7), ("replan", "requested by hand", 0), ("pause", "night", "ann@host"),
        ("resume", "requested by hand", "ann@host"), ("resume", "requested by hand", "ann@host"),
        ("resume", "morning", "ann@host"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ("committed", ExitCode.OK),
        ("unchanged", ExitCode.OK),
        ("accepted", ExitCode.OK),
        ("failed", ExitCode.REFUSED),
        ("superseded", ExitCode.REFUSED),
        ("timed_out", ExitCode.TIMED_OUT),
    ],
)
def test_the_exit_code_of_replan_follows_from_its_outcome(flexd_command, url, daemon, outcome, code):
    daemon.outcome = outcome
    done = flexd_command("replan", "--wait", "--url", url)
    assert done.returncode == code
    assert done.stdout.startswith(outcome)


def test_a_refusal_shows_the_daemons_own_message_and_remedy(flexd_command, url, daemon):
    daemon.error = PlanError("only 3 accesses", remedy="wait for more")
    done = flexd_command("plan", "--url", url)
    assert done.returncode == ExitCode.REFUSED
    assert done.stdout == ""
    assert done.stderr == "error: only 3 accesses\nremedy: wait for more\n"


def test_an_unreachable_daemon_is_named_with_a_remedy(flexd_process, tmp_path):
    done = flexd_process("status", "--url", "http://127.0.0.1:1")
    assert done.returncode == ExitCode.UNREACHABLE
    assert "http://127.0.0.1:1" in done.stderr
    assert "remedy: start it" in done.stderr
    assert "Traceback" not in done.stderr
    missing = tmp_path / "no.sock"
    done = flexd_process("status", FLEXD_SOCKET=str(missing))
    assert done.returncode == ExitCode.UNREACHABLE
    assert str(missing) in done.stderr


def test_proxies_of_the_environment_are_ignored(flexd_command, url):
    done = flexd_command("status", "--url", url, http_proxy="http://127.0.0.1:1", ALL_PROXY="http://127.0.0.1:1")
    assert done.returncode == 0, done.stderr


def test_over_a_unix_socket(flexd_command, daemon, tmp_path):
    path = tmp_path / "flexd.sock"
    server = DaemonServer(daemon, Metrics(daemon), ServerConfig(unix_socket=path))
    server.start()
    try:
        assert flexd_command("status", "--socket", path).returncode == 0
        done = flexd_command("pause", "-o", "json", FLEXD_SOCKET=str(path), FLEXD_URL="")
        assert json.loads(done.stdout)["paused"] is True
        # An option beats the other variable.
        assert flexd_command("status", "--socket", path, FLEXD_URL="http://127.0.0.1:1").returncode == 0
    finally:
        assert server.stop(10)


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


def test_on_a_terminal_titles_are_styled_and_no_color_is_obeyed(url):
    def on_terminal(**environment: str) -> str:
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "flexd", "status", "--url", url],
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **environment},
            stdin=subprocess.DEVNULL,
            stdout=follower,
        )
        os.close(follower)
        shown = b""
        try:
            while part := os.read(leader, 65536):
                shown += part
        except OSError:
            pass  # Linux reports the closed terminal so.
        finally:
            os.close(leader)
        assert process.wait(30) == 0
        return shown.decode()

    assert ESCAPE in on_terminal()
    assert "file_log" in on_terminal(TERM="dumb")
    assert "\x1b[3" not in on_terminal(NO_COLOR="1")


def test_a_closed_pipe_ends_quietly(url):
    command = f"{sys.executable} -m flexd status --url {url} | head -c 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr


def test_version(flexd_command):
    found = json.loads(flexd_command("version", "-o", "json").stdout)
    assert found["flexd"]
    assert found["pydantic"][0].isdigit()


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


def test_a_daemon_that_does_not_answer_is_a_timeout(monkeypatch):
    monkeypatch.setattr(client_module, "ANSWER_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = DaemonAddress(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(DaemonTimeoutError, match=r"did not answer GET /v1/status within 0\.3 s"):
            DaemonClient(address).status()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"",
    ],
)
def test_another_program_at_the_address(answer):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(DaemonUnreachableError):
            DaemonClient(DaemonAddress(f"http://127.0.0.1:{other.getsockname()[1]}")).status()
        thread.join(5)


def test_an_answer_that_drips_hits_the_deadline(monkeypatch):
    monkeypatch.setattr(client_module, "ANSWER_SECONDS", 0.5)
    stop = threading.Event()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not stop.is_set():
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return
                    time.sleep(0.02)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(DaemonTimeoutError):
                DaemonClient(DaemonAddress(f"http://127.0.0.1:{other.getsockname()[1]}")).status()
        finally:
            stop.set()
            thread.join(5)
