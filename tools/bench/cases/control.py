"""The cost of the control plane with many ranks, and of the daemon as a process.

ranks: agents and inboxes without training, many in a process, take a delta of many rows from one coordinator: the time
until all have acknowledged it, and the bytes. The processes agree on versions as training ranks do, once a turn.

daemon: its start, idle load and memory (``sections.daemon``).
"""

from __future__ import annotations

import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path

import numpy as np

from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import ControlOptions
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration import MigrationRecord, MigrationState
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Placement, Tier
from flexd.demo.processes import free_ports
from tools.bench.harness import Outcome, check
from tools.bench.programs.control import JOB, big_keyspace, simulated_ranks
from tools.bench.ranks import children, results_of
from tools.bench.sections import daemon

LISTED_CHUNK_ROWS = 4096
"""The daemon's default ``control.chunk_rows``."""
_DEADLINE_SECONDS = 120.0


@contextmanager
def hosted(directory: Path, keyspace: KeySpace) -> Iterator[Coordinator]:
    journal = PlacementJournal(directory)
    options = ControlOptions(JOB, listen_port=0, timeout_seconds=60.0, tick_seconds=0.005)
    coordinator = Coordinator(options, keyspace, journal)
    coordinator.start()
    try:
        yield coordinator
    finally:
        coordinator.stop(20.0)
        journal.close()


def until_ready(coordinator: Coordinator) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while (live := coordinator.live()) is None or not live.ready:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks are not ready: {coordinator.status().reason}")
        time.sleep(0.005)


def ranks_section(options: Namespace) -> Outcome:
    ranks, rows = (16, 50_000) if options.quick else (options.ranks, options.rows)
    keyspace, processes = big_keyspace(rows), min(8, ranks // 4)
    target = Placement.of(
        np.arange(0, 4 * rows, 4, dtype=np.int64), np.full(rows, Tier.DEVICE, dtype=np.uint8), 0
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory, hosted(Path(directory), keyspace) as coordinator:
        ports = (free_ports(1)[0], coordinator.port)
        numbered = [(number, processes, *ports, ranks, rows) for number in range(processes)]
        began = time.perf_counter()
        with children("tools.bench.programs.control", simulated_ranks, numbered) as pipes:
            until_ready(coordinator)
            joined = time.perf_counter() - began
            used = time.process_time()
            began = time.perf_counter()
            coordinator.limit_chunks(LISTED_CHUNK_ROWS, 2**40)
            migration = coordinator.migrate(MigrationRecord(migration_id="big", plan_id="big"), target)
            committed = migration.wait(4 * _DEADLINE_SECONDS) is MigrationState.COMMITTED
            seconds, used = time.perf_counter() - began, time.process_time() - used
            for pipe in pipes:
                pipe.send("stop")
            reports = results_of(pipes, _DEADLINE_SECONDS)
            status = coordinator.status()
            progress = migration.record
            journal_bytes = sum(path.stat().st_size for path in Path(directory).iterdir())
    versions = {version for found, _, _, _ in reports for version in found}
    digests = {digest for _, digest, _, _ in reports}
    delivered = sum(chunks for _, _, chunks, _ in reports)
    figures = {
        "ranks": ranks, "processes": processes, "rows": rows, "chunks": progress.chunks_pushed,
        "start_and_join_seconds": joined, "deliver_seconds": seconds, "rows_per_second": rows / seconds,
        "bytes_to_a_rank": progress.pushed_bytes, "bytes_to_all_ranks": progress.pushed_bytes * ranks,
        "journal_bytes": journal_bytes, "daemon_processor_seconds": used, "epochs": status.epochs,
        "largest_rank_process": max((resources for *_, resources in reports), key=itemgetter("rss_bytes")),
    }  # fmt: skip
    everywhere = versions == {progress.last_version} and digests == {target.digest()}
    checks = [
        check("ranks: delta committed", int(committed), "1", committed),
        check("ranks: placement equal everywhere", int(everywhere), "1", everywhere),
        check("ranks: chunks received", delivered, f"{ranks * progress.chunks_pushed}",
              delivered == ranks * progress.chunks_pushed),
        check("ranks: epochs", status.epochs, "1", status.epochs == 1),
    ]  # fmt: skip
    return Outcome(figures, checks)


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=128, help="a multiple of 8")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the delta")


SECTIONS = {"ranks": ranks_section, "daemon": daemon.section}
