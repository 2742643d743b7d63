"""Processes that run an ``Ingestor`` and can be killed, forked from a server that has imported everything.

python -m tests.support.ingest_server     reads one JSON object a line, forks a child for it, answers with its pid
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexd.core.keyspace import TableSpec
from flexd.ingest import Ingestor
from flexd.sketch.kinds import warm_up
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.types import SketchSettings
from tests.support.repository import child_environment
from tests.support.saved_sketches import loaded_sketches, newest_snapshot
from tests.support.until import until

TABLES = [TableSpec("items", 5000, 4)]
SETTINGS = SketchSettings(memory_bytes=2**22, half_life_seconds=None, max_future_seconds=1e9, max_hot_rows=100)


def _open_source(order: Mapping[str, Any]) -> Any:
    if order["source"] == "file_log":
        from flexd.stream.file_log.log import FileLogSource

        return FileLogSource(Path(order["path"]), discovery_seconds=0.01)
    options = {"session_timeout_seconds": 3.0, "on_position_lost": "fail"}
    from flexd.stream.kafka.source import KafkaSource

    return KafkaSource(order["bootstrap"], order["topic"], order["group"], max_poll_messages=50, **options)


def _run(order: Mapping[str, Any]) -> None:
    """Ingest in the child until SIGTERM, and keep a status file of the counts."""
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    state = Path(order["state"])
    ingestor = Ingestor(
        _open_source(order), TABLES, SETTINGS, SnapshotStore(state, 3), poll_seconds=0.02,
        snapshot_interval_seconds=order["interval"],
    )  # fmt: skip
    with (state.parent / "starts.jsonl").open("a") as file:
        file.write(
            json.dumps({"restored": ingestor._unrestored_positions, "problems": ingestor.stats().restore_problems})
            + "\n"
        )
    ingestor.start()
    status = state.parent / "status.json"
    while not stopped:
        stats = ingestor.stats()
        known = ingestor.sketches.samples
        text = {"pid": os.getpid(), "samples": known, "failures": stats.snapshot_failures, "problem": stats.problem,
                "snapshots": stats.snapshots, "messages": stats.messages}  # fmt: skip
        temporary = status.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(text))
        temporary.rename(status)
        time.sleep(0.01)
    os._exit(0 if ingestor.stop(20.0) else 3)


class IngestServer:
    """Starts the server; ``start`` forks ingesting processes from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ingest_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )

    def start(self, state: Path, *, interval: float = 0.03, **source: Any) -> int:
        """Start a process that ingests into ``state`` and return its pid (any thread)."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        order = {"state": str(state), "interval": interval, **source}
        with self._lock:
            self._server.stdin.write(json.dumps(order) + "\n")
            self._server.stdin.flush()
            return int(self._server.stdout.readline())

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(10.0)


def status_of(state: Path, pid: int) -> dict[str, Any]:
    """Return the newest status of this process; empty before its first."""
    try:
        status: dict[str, Any] = json.loads((state.parent / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return status if status["pid"] == pid else {}


def wait_for_status(state: Path, pid: int, condition: Any, seconds: float = 60.0) -> dict[str, Any]:
    def reached() -> dict[str, Any]:
        status = status_of(state, pid)
        return status if status and condition(status) else {}

    reached_status: dict[str, Any] = until(reached, seconds, lambda: status_of(state, pid))
    return reached_status


def end(pid: int, number: int = signal.SIGTERM, seconds: float = 30.0) -> None:
    """Signal a process and wait until it is gone (the server reaps it)."""
    os.kill(pid, number)
    until(lambda: not Path(f"/proc/{pid}").exists(), seconds, f"process {pid} ends")


def saved_counters(state: Path) -> tuple[Any, dict[str, int]]:
    """Return (counters of the newest snapshot, its positions)."""
    meta, arrays = newest_snapshot(state)
    return loaded_sketches(TABLES, SETTINGS, meta["sketches"], arrays), meta["positions"]


def counted(batches: Any) -> SketchSet:
    """Return the sketches that an uninterrupted run ends with."""
    sketches = SketchSet(TABLES, SETTINGS)
    for batch in batches:
        sketches.ingest(batch.table, batch.rows, batch.source_rank, batch.event_time_seconds)
    return sketches


def main() -> None:
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                _run(json.loads(line))
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(4)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
