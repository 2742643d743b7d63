"""The cost of the control plane over a long life, with many ranks, and of the daemon as a process.

replans: a coordinator in this process makes plan after plan from a profile that drifts, and migrates four gloo ranks
(2 x 2) that train meanwhile; each plan is committed before the next. At the hundredth re-plan and at the end: resident
memory, file descriptors and threads of the daemon and of each rank, bytes queued in the daemon; the seconds from
submitting to committed, of the first and of the last hundred (of a tenth, if that is less); and the replica slots in
use after a last migration that demotes everything.

ranks: agents and inboxes without training, many in a process, take a delta of many rows from one coordinator: the time
until all have acknowledged it, and the bytes. The processes agree on versions as training ranks do, once a turn.

daemon: its start, idle load and memory (``sections.daemon``).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from flexd.control.daemon.coordinator import ControlOptions, Coordinator
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration import MigrationState
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import Tier
from flexd.core.placement import Delta, Placement
from flexd.demo.ports import free_ports
from flexd.planner.delta import delta_chunks, plan_delta
from flexd.planner.plan import make_plan
from flexd.sketch.profile import Profile, TableProfile
from flexd.topology.files import load_preset, scale_model
from tools.bench.harness import Outcome, at_most, check
from tools.bench.programs.control import (
    DIM,
    ITEMS,
    JOB,
    LAYOUT,
    Footprint,
    big_keyspace,
    simulated_ranks,
    training_rank,
)
from tools.bench.ranks import preloaded
from tools.bench.sections import daemon

HOT_ROWS = 1_000
LISTED_CHUNK_ROWS = 4096
"""The daemon's default ``control.chunk_rows``."""
_PLAN_CHUNK_ROWS = 128
_MESSAGES_BYTES = 2**14
"""On their way at any moment: a few reports and heartbeats."""
_DEADLINE_SECONDS = 120.0
_SETTLED_MEMORY_BYTES = 24 * 2**20
"""Growth of a process that is no leak: arenas of allocators that have not come to rest."""


@contextmanager
def children(count: int, target: Any, *arguments: Any) -> Iterator[list[Connection]]:
    """Runs ``target(number, pipe, *arguments)`` in so many processes; they are killed at the end."""
    context = preloaded("tools.bench.programs.control")
    pipes, processes = [], []
    try:
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(number, theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
        for process in processes:
            process.join(20)
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def receive_all(pipes: list[Connection]) -> list[Any]:
    """One answer of every child. Raises TimeoutError."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    for number, pipe in enumerate(pipes):
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"child {number} does not answer")
    return [pipe.recv() for pipe in pipes]


@contextmanager
def hosted(directory: Path, keyspace: KeySpace, timeout_seconds: float = 60.0) -> Iterator[Coordinator]:
    journal = PlacementJournal(directory)
    options = ControlOptions(JOB, listen_port=0, timeout_seconds=timeout_seconds, tick_seconds=0.005)
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


def drifting_profile(number: int) -> Profile:
    """Zipf over rows of which a tenth is exchanged from one plan to the next."""
    share = np.arange(1, HOT_ROWS + 1) ** -1.1
    share /= share.sum()
    rows = (np.arange(HOT_ROWS) * 17 + number * 61) % ITEMS
    order = np.argsort(rows)
    rows, share = rows[order], share[order]
    none = np.empty(0)
    table = TableProfile(
        table="item", rows=ITEMS, weight=1e6, accesses_per_step=2_000.0, hot_rows=rows, hot_share=share,
        hot_lower=share, hot_upper=share, bin_share=none, bin_rows=none, distinct_rows=float(HOT_ROWS), coverage=1.0,
    )  # fmt: skip
    return Profile((table,))


def replan(coordinator: Coordinator, keyspace: KeySpace, number: int) -> tuple[float, int]:
    """Plans and migrates; (seconds from submitting to committed, rows moved)."""
    live, topology = coordinator.placement(), coordinator.live()
    assert topology is not None
    plan = make_plan(
        drifting_profile(number), keyspace, topology.layout, scale_model(load_preset("azure-a100-200g"), 1e9),
        topology.replica_slots, live, plan_id=f"p{number}", parent_id=f"p{number - 1}",
        topology_generation=topology.generation, horizon_steps=1e9, now_unix_seconds=time.time(), reason="bench",
    )  # fmt: skip

    def chunks(placement: Placement) -> Iterator[Delta]:
        delta = plan_delta(placement, plan.target, plan.gains, keyspace, topology.layout, plan.budgets)
        return delta_chunks(delta, keyspace, topology.layout, _PLAN_CHUNK_ROWS, 2**20)

    started = time.perf_counter()
    migration = coordinator.migrate(plan.plan_id, chunks, generation=topology.generation)
    state = migration.wait(_DEADLINE_SECONDS)
    if state is not MigrationState.COMMITTED:
        raise RuntimeError(f"re-plan {number} is {state.value}: {migration.reason}")
    return time.perf_counter() - started, migration.record.rows_pushed


def bench_replans(count: int) -> Outcome:
    keyspace = KeySpace([TableSpec("item", ITEMS, DIM, "float32", "sgd")])
    sample = max(1, min(100, count // 10))
    seconds, rows = [], 0
    looks: list[tuple[list[Footprint], int]] = []
    with tempfile.TemporaryDirectory() as directory, hosted(Path(directory), keyspace) as coordinator:

        def look(pipes: list[Connection]) -> list[int]:
            """Appends the footprints of daemon and ranks; replica slots in use by rank."""
            for pipe in pipes:
                pipe.send("look")
            of_ranks = receive_all(pipes)
            prints = [Footprint.of_this_process(), *(footprint for footprint, _ in of_ranks)]
            counters = coordinator.channel_counters()
            looks.append((prints, counters.queued_bytes + counters.unread_bytes))
            return [slots for _, slots in of_ranks]

        with children(LAYOUT.world_size, training_rank, free_ports(1)[0], coordinator.port) as pipes:
            until_ready(coordinator)
            for number in range(1, count + 1):
                took, moved = replan(coordinator, keyspace, number)
                seconds.append(took)
                rows += moved
                if number == sample:
                    look(pipes)
            in_use = look(pipes)
            empty = Placement.empty()
            last = coordinator.migrate("home", lambda placement: placement.delta_to(empty).chunks(_PLAN_CHUNK_ROWS))
            demoted = last.wait(_DEADLINE_SECONDS) is MigrationState.COMMITTED
            left = look(pipes)
            for pipe in pipes:
                pipe.send("stop")
        status = coordinator.status()
    (early, early_bytes), (late, late_bytes) = looks[0], looks[1]
    first, final = statistics.median(seconds[:sample]), statistics.median(seconds[-sample:])
    growth = [after.rss_bytes - before.rss_bytes for before, after in zip(early, late, strict=True)]
    descriptors = max(after.descriptors - before.descriptors for before, after in zip(early, late, strict=True))
    threads = max(after.threads - before.threads for before, after in zip(early, late, strict=True))
    figures = {
        "replans": count, "rows_moved": rows, "epochs": status.epochs, "placement_version": status.applied_version,
        "first_seconds_median": first, "last_seconds_median": final, "compared_replans": sample,
        "rss_growth_bytes": {"daemon": growth[0], "ranks": max(growth[1:])},
        "at_start": asdict(early[0]), "at_end": asdict(late[0]),
        "channel_bytes": {"start": early_bytes, "end": late_bytes},
        "replica_slots_in_use": max(in_use), "replica_slots_left_over": max(left),
    }  # fmt: skip
    checks = [
        at_most("re-plans: last median over first", final / first, 1.5),
        at_most("re-plans: memory growth, bytes", max(growth), _SETTLED_MEMORY_BYTES),
        at_most("re-plans: file descriptors more", descriptors, 0),
        at_most("re-plans: threads more", threads, 0),
        at_most("re-plans: bytes left in the channel", late_bytes, _MESSAGES_BYTES),
        check("re-plans: replica slots left over", max(left), "0", demoted and max(left) == 0),
        check("re-plans: epochs", status.epochs, "1", status.epochs == 1),
    ]  # fmt: skip
    return Outcome(figures, checks)


def bench_ranks(ranks: int, rows: int) -> Outcome:
    keyspace, processes = big_keyspace(rows), min(8, ranks // 4)
    target = Placement.of(
        np.arange(0, 4 * rows, 4, dtype=np.int64), np.full(rows, Tier.DEVICE, dtype=np.uint8), 0
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory, hosted(Path(directory), keyspace) as coordinator:
        ports = (free_ports(1)[0], coordinator.port)
        began = time.perf_counter()
        with children(processes, simulated_ranks, processes, *ports, ranks, rows) as pipes:
            until_ready(coordinator)
            joined = time.perf_counter() - began
            used = time.process_time()
            began = time.perf_counter()
            migration = coordinator.migrate("big", lambda now: now.delta_to(target).chunks(LISTED_CHUNK_ROWS))
            committed = migration.wait(4 * _DEADLINE_SECONDS) is MigrationState.COMMITTED
            seconds, used = time.perf_counter() - began, time.process_time() - used
            for pipe in pipes:
                pipe.send("stop")
            reports = receive_all(pipes)
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
        "largest_rank_process": asdict(max((look for *_, look in reports), key=lambda look: look.rss_bytes)),
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


def replans_section(options: Namespace) -> Outcome:
    return bench_replans(60 if options.quick else options.replans)


def ranks_section(options: Namespace) -> Outcome:
    return bench_ranks(*((16, 50_000) if options.quick else (options.ranks, options.rows)))


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--replans", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=128, help="a multiple of 8")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the delta")


SECTIONS = {
    "replans": replans_section,
    "ranks": ranks_section,
    "daemon": daemon.section,
}
