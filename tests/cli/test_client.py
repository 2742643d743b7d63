"""The client of the admin API: addresses, deadlines, programs that are no daemon."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from flexd.api import routes
from flexd.cli import client as client_module
from flexd.cli.client import (
    MEANINGS,
    DaemonAddress,
    DaemonClient,
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
from tests.support.api_tokens import serve
from tests.support.flexd_processes import flexd
from tests.support.repository import ROOT


def test_an_unreachable_daemon_is_named_with_a_remedy(tmp_path):
    done = flexd("status", "--url", "http://127.0.0.1:1")
    assert done.returncode == ExitCode.UNREACHABLE
    assert "http://127.0.0.1:1" in done.stderr
    assert "remedy: start it" in done.stderr
    assert "Traceback" not in done.stderr
    missing = tmp_path / "no.sock"
    done = flexd("status", FLEXD_SOCKET=str(missing))
    assert done.returncode == ExitCode.UNREACHABLE
    assert str(missing) in done.stderr


def test_over_a_unix_socket(flexd_command, daemon, tmp_path):
    path = tmp_path / "flexd.sock"
    with serve(daemon, unix_socket=path):
        assert flexd_command("status", "--socket", path).returncode == 0
        done = flexd_command("pause", "-o", "json", FLEXD_SOCKET=str(path), FLEXD_URL="")
        assert json.loads(done.stdout)["paused"] is True
        # An option beats the other variable.
        assert flexd_command("status", "--socket", path, FLEXD_URL="http://127.0.0.1:1").returncode == 0


@contextmanager
def another_program(talk: Callable[[socket.socket], None]) -> Iterator[DaemonClient]:
    """Yield a client of a program that talks to its first connection."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def serve() -> None:
            with other.accept()[0] as connection:
                talk(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield DaemonClient(DaemonAddress(f"http://127.0.0.1:{other.getsockname()[1]}"))
        thread.join(5)


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
    def talk(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)

    with another_program(talk) as client, pytest.raises(DaemonUnreachableError):
        client.send(routes.STATUS)


def test_an_answer_that_drips_hits_the_deadline(monkeypatch):
    monkeypatch.setattr(client_module, "ANSWER_SECONDS", 0.5)

    def talk(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        with suppress(OSError):  # until the client has gone
            while True:
                connection.sendall(b" ")
                time.sleep(0.02)

    with another_program(talk) as client, pytest.raises(DaemonTimeoutError):
        client.send(routes.STATUS)


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
