"""What a trainer's log says of a daemon that is killed and comes back: one line for either, and no stack traces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexd.demo.ports import free_ports
from tests.support.flexd_processes import DAEMON_START_SECONDS, RunningDaemon
from tests.support.until import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]
ROOT = Path(__file__).parents[2]


def test_a_daemon_that_dies_and_comes_back_is_two_lines_of_a_trainers_log(tmp_path: Path) -> None:
    stop, out, log = tmp_path / "stop", tmp_path / "out", tmp_path / "log"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_", "FLEXD_"))}
    settings = {"stream": {"source": {"kind": "tap"}}, "control": {"timeout_seconds": 2.0}}
    with RunningDaemon(tmp_path, settings) as daemon:
        address = f"127.0.0.1:{daemon.config.control.listen_port}"
        with out.open("wb") as printed, log.open("wb") as logged:
            trainer = subprocess.Popen(
                [sys.executable, "-m", "tests.support.logging_trainer", address, str(stop)],
                stdout=printed, stderr=logged, cwd=ROOT,
                env={
                    **clean, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]),
                    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                },
            )  # fmt: skip
        try:
            until(lambda: daemon.status().get("ready"), 60, log.read_text)
            before = len(log.read_text().splitlines())
            daemon.process.kill()
            until(lambda: "the daemon is away" in log.read_text(), 30, log.read_text)
            steps = len(out.read_text().splitlines())
            until(lambda: len(out.read_text().splitlines()) > steps + 100, 30, "it does not train on")
            daemon.process.start(DAEMON_START_SECONDS)
            until(lambda: daemon.status().get("ready"), 60, log.read_text)
            until(lambda: "the daemon is back" in log.read_text(), 30, log.read_text)
        finally:
            stop.touch()
            trainer.wait(30)
    assert trainer.returncode == 0, log.read_text()
    said = log.read_text().splitlines()[before:]
    away = [line for line in said if "the daemon is away" in line]
    assert len(away) == 1, said
    assert len(said) <= 3, said
    for line in said:
        for noise in ("Traceback", "C++", "frame #", "c10", "Exception raised", "check the address", "remedy"):
            assert noise not in line, said
