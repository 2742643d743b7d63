"""Start-up, idle load and memory of the daemon, as processes that are really started.

Ready to ingest is when ``/healthz`` says yes: the ingest thread reads, the API answers. Wall time on a busy machine is
mostly other processes' time, so the daemon's own CPU time is shown beside it.
"""

from __future__ import annotations

import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from flexd.demo.processes import free_ports
from tools.bench.harness import Outcome, check, peak_resident_bytes, resident_bytes

MANY_TABLES = 1_935
"""As many as TorchRec's published planner example has (arXiv 2301.02959 starts from jobs of this size)."""
START_SECONDS = 120.0
START_TARGET_SECONDS = 2.0
IDLE_TARGET_SHARE = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")


def tables_of(count: int) -> list[dict[str, Any]]:
    """One table of a million rows, or many whose rows spread over five orders of magnitude as a job's do."""
    if count == 1:
        return [{"name": "items", "rows": 1_000_000, "dim": 64}]
    rows = np.clip(np.random.default_rng(0).lognormal(8.5, 2.5, count), 4, 20_000_000).astype(int)
    dims = (16, 32, 64, 128)
    return [
        {"name": f"table_{i}", "rows": int(rows[i]), "dim": dims[i % len(dims)], "dtype": "float16"}
        for i in range(count)
    ]


def start(directory: Path, tables: int, idle_seconds: float) -> dict[str, float]:
    """Start a daemon with an empty file log, let it idle, look, and stop it.

    Returns:
        Seconds and processor seconds until it was ready to ingest; its share of a core while nothing arrives and nobody
        asks; resident memory then and at the most; and seconds and bytes of a page of metrics.
    """
    (port,) = free_ports(1)
    config = directory / "flexd.yaml"
    document = {
        "job": "bench",
        "tables": tables_of(tables),
        "stream": {"source": {"kind": "file_log", "path": str(directory / "log")}},
        "control": {"listen_port": 0},
        "server": {"port": port},
        "state": {"dir": str(directory / f"state-{tables}-{port}")},
    }
    config.write_text(yaml.safe_dump(document))
    url = f"http://127.0.0.1:{port}"
    begun = time.monotonic()
    with (directory / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flexd", "run", "-c", str(config)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _until_ready(process, url, begun + START_SECONDS, directory / "daemon.log")
        ready, ready_cpu = time.monotonic() - begun, _cpu_seconds(process.pid)
        _until_hosting(directory / "daemon.log", begun + START_SECONDS)
        # Until what the start has left to do is done.
        time.sleep(3.0)
        cpu, clock = _running_seconds(process.pid), time.monotonic()
        time.sleep(idle_seconds)
        idle = (_running_seconds(process.pid) - cpu) / (time.monotonic() - clock)
        asked = time.monotonic()
        page = httpx.get(f"{url}/metrics", timeout=30, trust_env=False)
        scrape = time.monotonic() - asked
        page.raise_for_status()
        return {
            "ready_seconds": ready, "ready_cpu_seconds": ready_cpu, "idle_cpu_share": idle,
            "rss_bytes": resident_bytes(process.pid), "peak_rss_bytes": peak_resident_bytes(process.pid),
            "scrape_seconds": scrape, "page_bytes": len(page.content),
        }  # fmt: skip
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _until_ready(process: subprocess.Popen[bytes], url: str, deadline: float, log: Path) -> None:
    with httpx.Client(trust_env=False, timeout=5) as client:
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the daemon did not start:\n{log.read_text(errors='replace')[-2000:]}")
            try:
                if client.get(f"{url}/healthz").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.01)


def _until_hosting(log: Path, deadline: float) -> None:
    """The control channel comes up after ingest: only then has the daemon nothing left to start."""
    while b"control channel: hosting" not in log.read_bytes():
        if time.monotonic() > deadline:
            raise SystemExit(f"no control channel:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def _cpu_seconds(pid: int) -> float:
    """User and system time of all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _running_seconds(pid: int) -> float:
    """As ``_cpu_seconds`` of the threads there are, to the nanosecond: a tick of 10 ms is much of an idle second."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def command_cpu_seconds() -> float:
    """Of one ``flexd status`` where no daemon answers: what every client command takes before it has an answer."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = [sys.executable, "-m", "flexd", "status", "--url", f"http://127.0.0.1:{free_ports(1)[0]}"]
    subprocess.run(arguments, capture_output=True, timeout=60, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def section(options: Namespace) -> Outcome:
    repeats, idle_seconds = (2, 5.0) if options.quick else (5, 20.0)
    with tempfile.TemporaryDirectory(prefix="flexd-bench-") as temporary:
        directory = Path(temporary)
        # The first start of an installation compiles the counting kernels into numba's cache.
        start(directory, 1, 0.1)
        small = [start(directory, 1, idle_seconds if i == 0 else 0.1) for i in range(repeats)]
        many = start(directory, MANY_TABLES, idle_seconds)
    ready_cpu = statistics.median(found["ready_cpu_seconds"] for found in small)
    idle = small[0]["idle_cpu_share"]
    figures = {
        "1 table": small[0], f"{MANY_TABLES} tables": many,
        "ready_seconds": statistics.median(found["ready_seconds"] for found in small),
        "command_cpu_seconds": statistics.median(command_cpu_seconds() for _ in range(5)),
    }  # fmt: skip
    checks = [
        check("ready_cpu_seconds", ready_cpu, f"< {START_TARGET_SECONDS:g} s", ready_cpu < START_TARGET_SECONDS),
        check("idle_cpu_share", idle, f"< {IDLE_TARGET_SHARE:g} of a core", idle < IDLE_TARGET_SHARE),
    ]
    return Outcome(figures, checks)
