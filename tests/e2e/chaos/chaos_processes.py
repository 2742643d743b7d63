"""The processes of a chaos run: forked from one that has imported everything, so that a killed one restarts at once.

python -m tests.e2e.chaos.chaos_processes     reads one JSON order a line, forks a child for it, answers with its pid
"""

import ctypes
import faulthandler
import importlib
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT, child_environment

_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
_PR_SET_PDEATHSIG = 1


class Clock:
    """Seconds by which the wall clock of a process that was started ``under`` this file is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(8))

    def jump(self, seconds: float) -> None:
        with self.path.open("r+b") as file:
            file.write(struct.pack("<d", seconds))

    @staticmethod
    def under(path: Path) -> None:
        """Python's wall clock reads the file's offset from here on; monotonic clocks are left alone."""
        with path.open("rb") as file:
            offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
        true_time = time.time
        time.time = lambda: true_time() + struct.unpack_from("<d", offset)[0]


def daemon(config_file: str, clock_file: str) -> None:
    """``flexd run``."""
    from flexd.cli.main import main

    faulthandler.register(signal.SIGUSR2)
    Clock.under(Path(clock_file))
    sys.argv = ["flexd", "run", "-c", config_file]
    main()


class Child:
    """A process that the server has forked. All methods may be called when it has ended."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log

    @property
    def state(self) -> str:
        """Return the state letter of ``/proc`` (``R``, ``S``, ``T`` is stopped, ...); empty when it has ended."""
        try:
            return (Path("/proc") / str(self.pid) / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return ""

    @property
    def alive(self) -> bool:
        """Until its last thread is gone, which may hold files and ports for longer than the first."""
        return self.state != ""

    @property
    def stopped(self) -> bool:
        return self.state == "T"

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and of one that was killed."""
        path = Path(f"{self.log}.{self.pid}.exit")
        return int(path.read_text()) if path.exists() else None

    def signal(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def kill(self, seconds: float = 10.0) -> None:
        self.signal(signal.SIGKILL)
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """AssertionError with the log's tail if it has not ended by then."""
        deadline = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() >= deadline:
                # A daemon writes where its threads are.
                self.signal(signal.SIGUSR2)
                time.sleep(1.0)
                raise AssertionError(f"process {self.pid} does not end:\n{self.tail(300)}")
            time.sleep(0.005)

    def tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else "(no log)"
        return "\n".join(text.splitlines()[-lines:])


class ProcessServer:
    """Starts processes. Closing it, or its owner's death, kills them all.

    Args:
        tree: directory whose ``flexd`` the processes run.
    """

    def __init__(self, tree: Path = ROOT) -> None:
        self._lock = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.chaos.chaos_processes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=tree, env=child_environment(**_QUIET, tree=tree),
        )  # fmt: skip

    def start(self, function: str, log: Path, environ: dict[str, str] | None = None, **arguments: Any) -> Child:
        """Runs ``module:function(**arguments)``; its output goes to the end of ``log``."""
        order = {"function": function, "log": str(log), "environ": environ or {}, "arguments": arguments}
        with self._lock:
            self._server.stdin.write(json.dumps(order) + "\n")
            self._server.stdin.flush()
            return Child(int(self._server.stdout.readline()), log)

    def close(self) -> None:
        self._server.stdin.close()
        try:
            self._server.wait(10.0)
        except subprocess.TimeoutExpired:
            self._server.kill()


def _child(order: dict[str, Any], parent: int) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, target)
    os.environ.update(order["environ"])
    module, _, function = order["function"].partition(":")
    try:
        getattr(importlib.import_module(module), function)(**order["arguments"])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def _record_exit_status(file: Path) -> None:
    """Let ``os._exit``, with which ``flexd run`` ends too, write the status to ``file`` first."""
    end = os._exit

    def write_and_end(status: int) -> None:
        file.write_text(str(status))
        end(status)

    os._exit = write_and_end  # type: ignore[assignment]


def main() -> None:
    import torch

    import flexd.cli.main
    import flexd.daemon.daemon
    from flexd.sketch.sketch_set import warm_up
    from tests.e2e.chaos import chaos_training

    assert chaos_training
    assert flexd.daemon.daemon
    torch.set_num_threads(1)
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getpid()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _record_exit_status(Path(f"{order['log']}.{os.getpid()}.exit"))
            code = _child(order, parent)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
