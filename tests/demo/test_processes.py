"""Progress and failures of rank processes, and ports for processes that are about to start."""

import socket
import sys
from pathlib import Path

import pytest

from flexd.core.errors import FlexdError
from flexd.demo.processes import Ranks, free_ports
from flexd.demo.setup import DemoOptions, EmulatedCluster, RunSetup
from tests.support.until import until


def _ranks_that_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> Ranks:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{program}'\n")
    script.chmod(0o755)
    monkeypatch.setattr("flexd.demo.processes.sys.executable", str(script))
    options = DemoOptions(cluster=EmulatedCluster(1, 1))
    return Ranks(RunSetup(options, tmp_path, tmp_path, tmp_path, "t", 1, "127.0.0.1:1"))


def test_output_of_libraries_among_the_progress_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = 'print("[Gloo] connected"); print("{\\"step\\": 0}"); print("{\\"step\\": 1}"); print("7")'
    ranks = _ranks_that_run(monkeypatch, tmp_path, program)
    until(lambda: not ranks.running())
    assert ranks.newest() == [{"step": 1}]


def test_a_failed_rank_is_reported_with_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = _ranks_that_run(monkeypatch, tmp_path, 'import sys; print("what went wrong", file=sys.stderr); sys.exit(3)')
    with pytest.raises(FlexdError, match=r"rank 0 ended with exit code 3:\nwhat went wrong"):
        until(lambda: not ranks.running())


def test_they_differ_are_free_and_no_outgoing_connection_gets_one() -> None:
    found = free_ports(50)
    assert len(set(found)) == 50
    assert max(found) < 32_768
    for port in found:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
