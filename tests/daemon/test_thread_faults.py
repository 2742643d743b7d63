"""An exception in any thread of the daemon is counted, shown and survived, or ends the daemon in order."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from flexd.config.model import Config
from flexd.core import supervision as faults
from flexd.core.supervision import EXIT_UNSAFE_STATE
from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch
from tests.support.flexd_processes import saved_sketches
from tests.support.repository import ROOT, child_environment


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    faults.arm({})


POINTS_OF_THREADS = {
    "loop": "thread.loop",
    "loop (planning)": "thread.planning",
    "flexd-coordinator": "thread.coordinator",
    "flexd-ingest": "thread.ingest",
    "loop (drift)": "thread.drift",
    "flexd-http": "thread.http",
}


def test_a_fault_in_every_thread_is_counted_shown_and_survived(
    start: Callable[..., Any], make_config: Callable[..., Config]
) -> None:
    """Each thread raises in its work, three times in a row; the daemon stays up, names it, and recovers by itself."""
    faults.arm({faults.VARIABLE: ",".join(f"{point}:1-3:raise" for point in POINTS_OF_THREADS.values())})
    running = start(make_config(planner={"drift_interval_seconds": 0.05}))
    daemon, shown, address = running.daemon, set[str](), running.daemon.address

    def all_have_failed() -> bool:
        daemon.renew_status()  # some problems are shorter than a tick
        shown.update(reason.split(":")[0].removeprefix("thread ") for reason in daemon.ready().reasons)
        counted = daemon.supervisor.faults()
        return all(counted.get(name.split(" ")[0], 0) >= 3 for name in POINTS_OF_THREADS)

    running.until(all_have_failed)
    assert daemon.health().ok
    running.until(lambda: not daemon.supervisor.problems())
    assert shown & set(POINTS_OF_THREADS) == set(POINTS_OF_THREADS)
    assert daemon.address == address
    assert httpx.get(f"{address}/healthz", timeout=20).status_code == 200
    counted = daemon.status().stream.accesses
    running.until(lambda: daemon.status().stream.accesses > counted)
    threads = daemon.status().threads
    assert threads.faults["loop"] == 9, "three of its own, of drift, and of planning"
    samples = {sample.labels["thread"]: sample.value for family in threads.metrics() for sample in family.samples}
    assert samples["flexd-ingest"] == 0.0, "the gauge of failing threads comes last"
    assert not any("InjectedFault" in reason for reason in daemon.ready().reasons)


def test_a_half_counted_message_ends_the_daemon_in_order_and_nothing_is_lost(
    start: Callable[..., Any], make_config: Callable[..., Config], tmp_path: Path
) -> None:
    """The counters may hold a part of the message, so nothing is saved; the next start counts everything once."""
    log = FileLogSink(tmp_path / "log", "p0")
    for _ in range(6):
        log.send(encode_arrow([AccessBatch("item", np.arange(100, dtype=np.int32), 0, 1.7e9)]))
    log.close()
    settings = make_config(stream={"source": {"kind": "file_log", "path": str(tmp_path / "log")}, "poll_seconds": 0.05})
    file = tmp_path / "flexd.yaml"
    file.write_text(yaml.safe_dump(settings.document()))
    environ = {**child_environment(), faults.VARIABLE: "thread.counting:4:raise"}
    done = subprocess.run(
        [sys.executable, "-m", "flexd", "run", "-c", str(file)], capture_output=True, text=True, timeout=90, cwd=ROOT,
        env=environ, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_UNSAFE_STATE, done.stderr[-3000:]
    assert "the daemon ends, because it cannot go on safely" in done.stderr
    assert "flexd has stopped" in done.stderr, "every part was stopped"
    running = start(settings)
    running.until(lambda: running.daemon.status().stream.messages == 6)
    running.stop()
    assert saved_sketches(settings).samples == 600


UNSUPERVISED = {
    "flexd/core/supervision.py": "it is the helper",
    "flexd/sketch/snapshot.py": "the ingest thread raises what the job raised",
    "flexd/stream/kafka/sink.py": "the ingest thread gets the error of an attempt; disposing catches everything",
    "flexd/stream/kafka/source.py": "a callback's error is logged and counted by the hand-over",
    "flexd/stream/publisher.py": "a thread of the trainer",
    "flexd/control/agent/agent.py": "a thread of the trainer",
    "flexd/embedding/tap.py": "a thread of the trainer",
    "flexd/embedding/checkpoint/background_save.py": "a thread of the trainer",
    "flexd/embedding/prefetch/pipeline_job.py": "a thread of the trainer",
    "flexd/embedding/exchange/fault_notices.py": "a thread of the trainer",
    "flexd/cli/options.py": "a thread of a command",
    "flexd/demo/processes.py": "a thread of a command",
}


def test_every_thread_of_the_daemon_is_supervised() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "flexd").rglob("*.py")
        if re.search(r"\bthreading\.Thread\(", path.read_text())
    }
    assert found <= set(UNSUPERVISED), "use Supervisor.thread or Supervisor.job, or say why not"


def test_the_table_of_threads_names_them_all() -> None:
    named = set(re.findall(r"^\| `([\w-]+)`", (ROOT / "docs" / "threads.md").read_text(), re.MULTILINE))
    made = {
        name
        for path in (ROOT / "flexd").rglob("*.py")
        for name in re.findall(r'(?:watch|thread|job)\(\s*"((?:flexd-[\w-]+)|loop|other)"', path.read_text())
    }
    made |= set(re.findall(r'"(flexd-[\w-]+)"', (ROOT / "flexd" / "server/http.py").read_text()))
    assert made <= named, made - named
