"""The demo's child processes: training ranks whose progress is followed, and a daemon; ports for them."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from flexd.core.errors import FlexdError
from flexd.demo.setup import RunSetup

_LOWEST, _HIGHEST = 10_000, 32_000


def _tail(path: Path) -> str:
    """Return the last lines, of the last bytes."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-15:])


def _environment() -> dict[str, str]:
    # One thread per process: the ranks share the cores, and spinning threads would take them from each other.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class Ranks:
    """All training ranks. Their output, with a record of each step, and their logs are files."""

    def __init__(self, setup: RunSetup) -> None:
        ranks = range(setup.options.cluster.world_size)
        self._logs = [setup.directory / f"rank-{rank}.log" for rank in ranks]
        self._output = [setup.directory / f"rank-{rank}.out" for rank in ranks]
        self._processes = []
        for rank in ranks:
            with self._output[rank].open("wb") as out, self._logs[rank].open("wb") as log:
                command = [sys.executable, "-m", "flexd.demo.rank", str(setup.file), str(rank)]
                self._processes.append(subprocess.Popen(command, stdout=out, stderr=log, env=_environment()))

    def newest(self) -> list[dict[str, Any]]:
        """Return the newest record of each rank that has one; a library may print too."""
        written = (_tail(output).splitlines() for output in self._output)
        records = ([line for line in lines if line.startswith('{"step"') and line.endswith("}")] for lines in written)
        return [json.loads(of_rank[-1]) for of_rank in records if of_rank]

    def running(self) -> bool:
        """Return True while a rank runs. Raises FlexdError if one has failed."""
        codes = [process.poll() for process in self._processes]
        for code, log in zip(codes, self._logs, strict=True):
            if code not in (None, 0):
                self.stop()
                raise FlexdError(
                    f"training {log.stem.replace('-', ' ')} ended with exit code {code}:\n{_tail(log)}",
                    remedy=f"the whole log is {log}",
                )
        return any(code is None for code in codes)

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait(10)


class DaemonProcess:
    """``flexd run`` as a child process with its log in the run's directory."""

    def __init__(self, config_file: Path, url: str, directory: Path) -> None:
        self._config_file = config_file
        self._url = url
        self._log = directory / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs; negative: ended by this signal."""
        return None if self._process is None else self._process.poll()

    def start(self, timeout_seconds: float = 180.0) -> None:
        """Start and wait until healthy. The first start of an installation compiles the counting kernels.

        Raises:
            FlexdError: it ended, or is not healthy within the deadline.
        """
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flexd", "run", "-c", str(self._config_file)],
                stdout=log,
                stderr=log,
                env=_environment(),
            )
        deadline = time.monotonic() + timeout_seconds
        while True:
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.kill()
                what = "did not start" if ended else f"was not ready within {timeout_seconds:g} s"
                raise FlexdError(f"the daemon {what}:\n{_tail(self._log)}", remedy=f"see {self._log}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self._url}/healthz", timeout=1.0, verify=False).status_code == 200:
                    return
            time.sleep(0.1)

    def status(self) -> dict[str, Any] | None:
        """Return the daemon's status; None while it does not answer."""
        try:
            # Plain HTTP on loopback: loading the CA certificates would take 30 ms of every request.
            answer = httpx.get(f"{self._url}/v1/status", timeout=1.0, verify=False)
            status: dict[str, Any] = answer.json()
            return status if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    def kill(self) -> None:
        """Kill with SIGKILL: nothing is saved."""
        if self._process is not None and self.alive:
            self._process.kill()
            self._process.wait(10)

    def stop(self, timeout_seconds: float = 25.0) -> None:
        """End with SIGTERM, as Kubernetes does; SIGKILL past the deadline."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()


def free_ports(count: int) -> list[int]:
    """Return different TCP ports of loopback at which no process listens.

    The listener starts later, so another process may take the port first. Outgoing connections cannot: these ports lie
    below those that Linux assigns to them (32768 and up). Ports are drawn at random, so two processes rarely collide.

    Raises:
        OSError: not enough free ports were found.
    """
    found: list[int] = []
    for _ in range(2_000):
        if len(found) == count:
            return found
        port = _LOWEST + secrets.randbelow(_HIGHEST - _LOWEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    raise OSError(f"no {count} free ports between {_LOWEST} and {_HIGHEST}")
