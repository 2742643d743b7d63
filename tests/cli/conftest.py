"""The command line in a subprocess, and a server over a fake daemon for it to talk to."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pexpect
import pytest

from flexd.cli.main import main
from tests.support.repository import ROOT
from tests.support.served_daemon import daemon, fake, served_daemon, server, url  # noqa: F401

TIMEOUT_SECONDS = 30
Flexd = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def flexd_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Flexd:
    """Runs ``flexd ARGUMENTS`` in this process: what does not need a process of its own is quicker so."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        command = ["flexd", *map(str, arguments)]
        handler = signal.getsignal(signal.SIGTERM)
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("FLEXD")]:
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", command)
            with pytest.raises(SystemExit) as ended:
                main()
            signal.signal(signal.SIGTERM, handler)
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(command, int(ended.value.code or 0), shown.out, shown.err)

    return run


def _restore_sigint() -> None:
    """Tests that run in the background inherit an ignored SIGINT, and a child would never see control-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def terminal(url) -> Iterator[Callable[..., pexpect.spawn]]:  # noqa: F811
    """Start ``flexd ARGUMENTS`` on a terminal of its own."""
    made: list[pexpect.spawn] = []

    def start(*arguments: str, columns: int = 100, **environment: str) -> pexpect.spawn:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith("FLEXD") and name != "NO_COLOR"
        }
        process = pexpect.spawn(
            sys.executable, ["-m", "flexd", *arguments, "--url", url], cwd=os.fspath(ROOT),
            env={**clean, "TERM": "xterm", "COLUMNS": str(columns), "TZ": "UTC", **environment},
            timeout=TIMEOUT_SECONDS,
            dimensions=(40, columns), encoding="utf-8", preexec_fn=_restore_sigint,
        )  # fmt: skip
        made.append(process)
        return process

    yield start
    for process in made:
        process.close(force=True)
