"""A daemon with a marked secret in every setting that takes one: no output of any kind contains a mark, and other
users cannot read its files."""

import contextlib
import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import yaml

from flexd.cli.main import main
from flexd.demo.processes import free_ports
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.flexd_processes import RunningDaemon
from tests.support.until import until

pytestmark = pytest.mark.slow

MARK = "MARKED"
SASL = {
    "client_options": {
        "security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_plain_username": "flexd",
        "ssl_password": f"{MARK}-ssl-password",
    },
    "client_option_files": {"sasl_plain_password": "password"},
}  # fmt: skip


class Listened:
    """A daemon with marked secrets and a umask of 0, and all that it says."""

    def __init__(self, directory: Path) -> None:
        for name in ("control", "password", "read", "admin"):
            (directory / name).write_text(f"{MARK}-{name}-0123456789\n")
        (broker,) = free_ports(1)
        files = {name: str(directory / file) for name, file in SASL["client_option_files"].items()}
        kafka = {
            "kind": "kafka", "bootstrap_servers": f"127.0.0.1:{broker}", "connect_timeout_seconds": 1.0, **SASL,
            "client_option_files": files,
        }  # fmt: skip
        tokens = [
            {"name": "dashboard", "file": str(directory / "read")},
            {"name": "operator", "scope": "admin", "file": str(directory / "admin")},
        ]
        self.daemon = RunningDaemon(
            directory,
            {
                "tables": [{"name": "items", "rows": 1000, "dim": 4}],
                "control": {"secret_file": str(directory / "control")},
                "server": {"tokens": tokens},
                "stream": {"source": kafka},
                "log": {"level": "debug", "format": "json"},
            },
        )
        self.said: list[str] = []

    def ask(self, method: str, path: str, token: str | None, **more: Any) -> httpx.Response:
        headers = COMMAND_HEADERS | ({} if token is None else {"authorization": f"Bearer {MARK}-{token}-0123456789"})
        answer = httpx.request(method, self.daemon.url + path, headers=headers, timeout=20, **more)
        self.said.append(f"{path}: {answer.headers} {answer.text}")
        return answer


@pytest.fixture
def umask_of_nothing() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def checked(file: Path, *arguments: str) -> tuple[object, str]:
    """(exit status, output) of ``flexd check-config``, in this process."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        mock.patch.object(sys, "argv", ["flexd", "check-config", "-c", str(file), *arguments]),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return ended.value.code, printed.getvalue()


@pytest.mark.usefixtures("umask_of_nothing")
def test_no_secret_is_said_anywhere_and_nobody_else_may_read_the_state(tmp_path: Path) -> None:
    daemon = Listened(tmp_path)
    with daemon.daemon as running:
        for path, methods in daemon.ask("GET", "/openapi.json", "read").json()["paths"].items():
            for method in methods:
                for token in (None, "guessed", "read", "admin"):
                    if method == "get" or token == "admin":
                        daemon.ask(method.upper(), path, token, json=None if method == "get" else {"unknown": 1})
        assert daemon.ask("POST", "/v1/pause", "admin", json={"reason": "x"}).status_code == 200
        until(lambda: daemon.ask("GET", "/v1/status", "read").json()["snapshot"]["written"] >= 1, 30)
        until(lambda: daemon.ask("GET", "/v1/status", "read").json()["stream"]["problem"], 30)
        running.process.stop()
        assert running.process.exit_code == 0
        daemon.said.append((tmp_path / "daemon.log").read_text())
        for output in ("json", "yaml", "table"):
            code, printed = checked(running.config_file, "-o", output)
            assert code == 0, printed
            daemon.said.append(printed)
        state = [tmp_path / "state", *(tmp_path / "state").rglob("*")]
        for kept in state:
            mode = stat.S_IMODE(kept.stat().st_mode)
            assert mode == (0o700 if kept.is_dir() else 0o600), (kept, oct(mode))
            if kept.is_file():
                daemon.said.append(kept.read_bytes().decode("latin-1"))
        assert len([kept for kept in state if kept.is_file()]) >= 2
        everything = "\n".join(daemon.said)
        assert "listen_port" in everything
        assert '"operator"' in everything
        at = everything.find(MARK)
        assert at < 0, everything[max(0, at - 300) : at + 100]


def test_errors_of_the_configuration_show_no_secret(tmp_path: Path) -> None:
    password = f"{MARK}-password"
    good = {"bootstrap_servers": "b:9092", "kind": "kafka"}
    said = []
    for source in (
        {**good, "client_options": {"sasl_plain_password": [password]}},
        {**good, "sasl_plain_password": password},
        {
            **good,
            "client_options": {"sasl_plain_password": password},
            "client_option_files": {"sasl_plain_password": "f"},
        },
        {**good, "kind": "kafak", "client_options": {"sasl_plain_password": password}},
    ):
        file = tmp_path / "flexd.yaml"
        tables = [{"name": "items", "rows": 1000, "dim": 4}]
        file.write_text(yaml.safe_dump({"job": "j", "tables": tables, "stream": {"source": source}}))
        code, printed = checked(file)
        assert code == 2
        said.append(printed)
    assert "stream.source" in said[0]
    assert MARK not in json.dumps(said)
