"""``flexd doctor`` as a command: exit status, JSON, a daemon that runs and one that does not."""

import json
from pathlib import Path

import pytest
import yaml

from flexd.cli.check_commands import configured_address
from flexd.cli.client import ExitCode
from flexd.config.model import load_config
from flexd.config.sections import ServerConfig, TlsConfig, TokenConfig


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "flexd.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "job": "job",
                "tables": [{"name": "items", "rows": 100, "dim": 4}],
                "stream": {"source": {"kind": "file_log", "path": str(tmp_path / "log")}},
                "control": {"listen_port": 0},
                "server": {"port": 0},
                "state": {"dir": str(tmp_path / "state")},
            }
        )
    )
    return path


def found(text: str) -> dict[str, str]:
    return {each["check"]: each["level"] for each in json.loads(text)["findings"]}


def test_warnings_are_no_failure_and_everything_is_looked_at(flexd_command, file, tmp_path):
    done = flexd_command("doctor", "-c", file, "-o", "json", "--url", "http://127.0.0.1:1")
    assert done.returncode == ExitCode.OK, done.stderr
    report = found(done.stdout)
    assert report["configuration"] == report["disk"] == report["versions"] == "ok"
    assert report["stream"] == report["daemon"] == "warning"
    assert {"clock", "secrets", "control port", "api port"} <= set(report)
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "log").exists()


def test_a_wrong_configuration_is_a_fault_a_line(flexd_command, file):
    file.write_text(file.read_text() + "sketch: {memory_bytes: 1}\ntypo: 1\n")
    done = flexd_command("doctor", "-c", file, "--url", "http://127.0.0.1:1")
    assert done.returncode == ExitCode.FOUND
    assert done.stdout.count("  fault  ") == 2
    assert "sketch.memory_bytes" in done.stdout
    assert "remedies:" in done.stdout


def test_the_daemon_is_looked_for_where_the_file_puts_it(flexd_command, file, url):
    port = int(url.rsplit(":", 1)[1])
    file.write_text(file.read_text().replace("server:\n  port: 0", f"server:\n  port: {port}"))
    report = json.loads(flexd_command("doctor", "-c", file, "-o", "json").stdout)["findings"]
    by_check = {each["check"]: each for each in report}
    assert "running configuration" in by_check
    assert by_check["api port"]["level"] == "ok", "the daemon's own port is not another process's"
    report = found(flexd_command("doctor", "-c", file, "-o", "json", FLEXD_URL="http://127.0.0.1:1").stdout)
    assert "running configuration" not in report


@pytest.mark.parametrize(
    ("server", "address"),
    [
        (ServerConfig(), "http://127.0.0.1:9464"),
        (ServerConfig(port=0), "None"),
        (ServerConfig(unix_socket=Path("/run/flexd.sock")), "unix socket /run/flexd.sock"),
        (
            ServerConfig(
                host="::", port=9000, tls=TlsConfig(cert_file=Path("c"), key_file=Path("k")),
                tokens=[TokenConfig(name="ops", file=Path("t"))],
            ),
            "https://[::1]:9000",
        ),
    ],
)  # fmt: skip
def test_the_address_that_a_file_implies(file, server, address):
    config = load_config(file)
    assert str(configured_address(config.model_copy(update={"server": server}))) == address
