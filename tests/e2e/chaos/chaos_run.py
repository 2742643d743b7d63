"""One fault after another in one world, checked after each; the report of what they did."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np

from flexd.control.daemon.journal import PlacementJournal
from flexd.core.errors import SnapshotError
from flexd.daemon.config_file import sketch_settings
from flexd.sketch.decay import UNIT_BITS
from flexd.sketch.sketch_set import SketchSet
from flexd.stream.types import AccessBatch
from tests.e2e.chaos.chaos_faults import RANKS_STRUCK, Injection, kill_broker
from tests.e2e.chaos.chaos_processes import ProcessServer
from tests.e2e.chaos.chaos_training import RANK_SECONDS, TABLES, WORLD, Reference
from tests.e2e.chaos.chaos_world import Attempt, ChaosWorld
from tests.support.saved_sketches import loaded_sketches, newest_snapshot
from tests.support.until import until

RECOVERY_SECONDS = 90.0


@dataclass(frozen=True)
class Outcome:
    """One fault and what it cost.

    Attributes:
        recovery_seconds: from the end of the fault until every rank had applied a chunk that it had not before.
        added_step_seconds: longest step during fault and recovery over the median step before, of any rank; 0 if the
            fault held up the ranks themselves.
        steps: of every rank, during fault and recovery.
        violations: one line each; empty is well.
    """

    kind: str
    detail: str
    recovery_seconds: float
    added_step_seconds: float
    steps: int
    violations: tuple[str, ...]


class ChaosRun:
    """A context manager: a world in which faults strike until its end.

    ``finish`` checks what can be checked at the end only.
    """

    def __init__(self, directory: Path, seed: int, server: ProcessServer, **options: Any) -> None:
        self._chance = random.Random(seed)
        self.world = ChaosWorld(directory, seed, server, **options)
        self.outcomes: list[Outcome] = []
        self.end_violations: list[str] = []
        self.steps = 0
        self.largest_loss_difference = self.longest_step_seconds = 0.0
        self.misuses: Counter[str] = Counter()

    def __enter__(self) -> ChaosRun:
        self.world.__enter__()
        try:
            self.checker = Checker(self.world)
            until(lambda: self.world.job.version > 0, 90.0, self.world.where)
        except BaseException:
            self.world.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.world.__exit__(kind, error, trace)
        # A soak of hours keeps the results alone.
        checker = self.checker
        self.steps, self.largest_loss_difference = checker.steps_checked, checker.largest_loss_difference
        self.misuses, self.longest_step_seconds = checker.misuses, checker.longest_step_seconds
        self.world.attempts.clear()
        del self.checker

    def strike(self, kind: str, injection: Injection) -> Outcome:
        """Inject a fault, heal it, wait for recovery and check. Raises AssertionError if a process does not recover."""
        world = self.world
        job, began, steps = world.job, time.monotonic(), world.job.done
        detail = injection(world, self._chance)
        healed = time.monotonic()
        version = world.job.version
        world.moved_on(RECOVERY_SECONDS)
        recovered = max(next(step.at for step in rank if step.version > version) for rank in world.job.steps)
        longest, usual = longest_step(job, began, time.monotonic())
        same = world.job is job
        outcome = Outcome(
            kind=kind,
            detail=detail,
            recovery_seconds=max(0.0, recovered - healed),
            added_step_seconds=0.0 if kind in RANKS_STRUCK else max(0.0, longest - usual),
            steps=world.job.done - (steps if same else 0),
            violations=(*self.checker.training(), *self.checker.placement()),
        )
        self.outcomes.append(outcome)
        return outcome

    def count(self) -> list[str]:
        """Check that all accesses so far are counted once."""
        with self.world.publishing_held():
            wrong = self.checker.counted()
        self.end_violations += wrong
        return wrong

    def finish(self, *, lose_broker: bool = False) -> list[str]:
        """Counts, ends training and daemon, and compares tables. The violations that this has found."""
        wrong = self.count()
        if lose_broker:
            self.strike("broker killed", kill_broker)
        self.world.stop_training()
        self.world.stop_daemon()
        wrong += [*self.checker.training(), *self.checker.tables()]
        self.end_violations += wrong
        return wrong


def figures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """By kind of fault: how many, violations, recovery and added step time in seconds."""
    rows = []
    for kind in sorted({outcome.kind for outcome in outcomes}):
        mine = [outcome for outcome in outcomes if outcome.kind == kind]
        recovery = [outcome.recovery_seconds for outcome in mine]
        rows.append(
            {
                "kind": kind,
                "injected": len(mine),
                "violations": sum(len(outcome.violations) for outcome in mine),
                "recovery_seconds_median": median(recovery),
                "recovery_seconds_longest": max(recovery),
                "added_step_seconds_longest": max(outcome.added_step_seconds for outcome in mine),
                "steps": sum(outcome.steps for outcome in mine),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        "| fault | injected | violations | time to recover, median / longest, s | longest added step time, s |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        added = "its own" if row["kind"] in RANKS_STRUCK else f"{row['added_step_seconds_longest']:.2f}"
        lines.append(
            f"| {row['kind']} | {row['injected']} | {row['violations']} | {row['recovery_seconds_median']:.1f} / "
            f"{row['recovery_seconds_longest']:.1f} | {added} |"
        )
    return "\n".join(lines)


LOSS_TOLERANCE = 1e-9
_WEIGHT_TOLERANCE = 1e-3
"""Relative, of a row's decayed accesses."""
_UNITS_AN_ACCESS = 0.5
"""In units of at most 2^-UNIT_BITS accesses. An access that is counted late weighs few units, and is rounded to whole
ones: after a restart one partition may be read up to its end before another, half a minute of event time behind."""


class Checker:
    """Check the invariants of a run; each method returns one line a violation."""

    def __init__(self, world: ChaosWorld, reference: Reference | None = None) -> None:
        self._world = world
        self.reference = reference or Reference(world.seed)
        self._checked: dict[str, int] = {}
        """By attempt: steps checked."""
        self._digests: dict[tuple[str, int], int] = {}
        """By attempt and version: of the placement that the ranks had."""
        self.steps_checked = 0
        self.versions_checked = 0
        self.largest_loss_difference = self.longest_step_seconds = 0.0
        self.misuses: Counter[str] = Counter()
        """Steps of the job by kind of misuse."""

    def training(self) -> list[str]:
        """Losses as without faults; replicas bit-equal; one placement version on all ranks, never going back."""
        wrong: list[str] = []
        for attempt in self._world.attempts:
            done = attempt.done
            for at in range(self._checked.get(attempt.name, 0), done):
                wrong += self._step(attempt, at)
            self._checked[attempt.name] = done
        return wrong

    def placement(self) -> list[str]:
        """Check that the ranks have applied a prefix of the chunks in the journal, version by version."""
        world, wrong = self._world, []
        copy = world.directory / "journal-copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        original = world.state / "placement" / "placement.journal"
        if not original.exists():
            return []
        shutil.copy(original, copy / original.name)
        try:
            journal = PlacementJournal(copy)
        except SnapshotError as error:
            return [f"the journal cannot be read: {error}"]
        segment = journal.segment
        for (attempt, version), digest in self._digests.items():
            if segment is None or attempt != segment.attempt:
                continue
            try:
                expected = journal.placement_at(version).digest()
            except SnapshotError:
                continue  # folded into the segment since
            self.versions_checked += 1
            if expected != digest:
                wrong.append(f"{attempt}: version {version} of the ranks is not the journal's")
        journal.close()
        return wrong

    def counted(self) -> list[str]:
        """The counters of a snapshot and its positions are what the log holds, each message once.

        Publishing must be held. Waits until everything published is counted and saved.
        """
        world = self._world
        logged = self._count_log()
        positions: dict[str, int] = {}

        def saved() -> bool:
            nonlocal found, positions
            # Files come and go beside this reader.
            try:
                meta, arrays = newest_snapshot(world.state / "snapshots")
            except (SnapshotError, IndexError):
                return False
            positions = meta["positions"]
            tables, settings = world.config.keyspace().tables, sketch_settings(world.config)
            found = loaded_sketches(tables, settings, meta["sketches"], arrays)
            return found.samples >= published

        published = sum(int(accesses.sum()) for accesses in logged.accesses.values())
        found = SketchSet(world.config.keyspace().tables, sketch_settings(world.config))
        until(saved, 40.0, lambda: f"{found.samples} of {published} accesses are counted\n{world.where()}")
        wrong = []
        if found.samples != published:
            wrong.append(f"{found.samples} accesses counted, {published} published")
        if sum(positions.values()) != logged.messages:
            wrong.append(f"positions of {sum(positions.values())} messages, there are {logged.messages}")
        for name, (rows, _, _) in TABLES.items():
            got, expected, accesses = found.query(name, np.arange(rows)), logged.weights[name], logged.accesses[name]
            rounded = _UNITS_AN_ACCESS * 2.0**-UNIT_BITS * (accesses + 1)
            beyond = np.abs(got - expected) - _WEIGHT_TOLERANCE * expected - rounded
            if beyond.max() > 0:
                row = int(beyond.argmax())
                wrong.append(
                    f"table {name}: {(beyond > 0).sum()} rows weigh something else than in the log; row {row} "
                    f"{got[row]:.6g}, there {expected[row]:.6g} ({accesses[row]} accesses)"
                )
        return wrong

    def _step(self, attempt: Attempt, at: int) -> list[str]:
        ranks = [steps[at] for steps in attempt.steps]
        step, name, wrong = ranks[0].step, attempt.name, []
        for rank, record in enumerate(ranks):
            difference = abs(record.loss - self.reference.loss(step, rank))
            self.largest_loss_difference = max(self.largest_loss_difference, difference)
            # Written so that NaN is a difference.
            if not difference <= LOSS_TOLERANCE:
                wrong.append(f"{name}: loss of step {step}, rank {rank} differs by {difference:.3g}")
            if not record.bit_equal:
                wrong.append(f"{name}: a replica on rank {rank} differs from its home after step {step}")
        if len({(record.version, record.digest) for record in ranks}) > 1:
            wrong.append(f"{name}: versions {[record.version for record in ranks]} in step {step}")
        if at and any(steps[at].version < steps[at - 1].version for steps in attempt.steps):
            wrong.append(f"{name}: the placement version fell in step {step}")
        self._digests[name, ranks[0].version] = ranks[0].digest
        self.misuses.update([ranks[0].misuse] if ranks[0].misuse else [])
        self.longest_step_seconds = max(self.longest_step_seconds, *(record.seconds for record in ranks))
        if self.longest_step_seconds > RANK_SECONDS:
            wrong.append(f"{name}: step {step} took {self.longest_step_seconds:.0f} s on a rank")
        self.steps_checked += WORLD
        return wrong

    def tables(self) -> list[str]:
        """After the end of training: the tables as without faults."""
        attempt = self._world.job
        last = attempt.first_step + attempt.done - 1
        self.reference.loss(last, 0)
        if len(self.reference.losses) != last + 1:
            return [f"the reference has done {len(self.reference.losses)} steps, the ranks {last + 1}"]
        found = np.load(self._world.directory / f"{attempt.name}-tables.npz")
        return [
            f"table {name} differs by {np.abs(found[name] - table.detach().numpy()).max():.3g}"
            for name, table in self.reference.tables.items()
            if not np.allclose(found[name], table.detach().numpy(), rtol=0.0, atol=LOSS_TOLERANCE)
        ]

    def _count_log(self) -> Log:
        log = Log(sketch_settings(self._world.config).half_life_seconds)
        for batches in self._world.batches():
            log.add(batches)
        return log


class Log:
    """Every message of the topic once, in floating point and without the code under test.

    Attributes:
        messages: read. accesses: int64[rows] by table. weights: float64[rows] by table, the accesses decayed to the
            newest of all.
    """

    def __init__(self, half_life_seconds: float) -> None:
        self.messages = 0
        self.accesses = {name: np.zeros(rows, np.int64) for name, (rows, _, _) in TABLES.items()}
        self.weights = {name: np.zeros(rows) for name, (rows, _, _) in TABLES.items()}
        self._half_life_seconds = half_life_seconds
        self._newest = -np.inf

    def add(self, batches: Sequence[AccessBatch]) -> None:
        self.messages += 1
        for batch in batches:
            later = batch.event_time_seconds - self._newest
            if later > 0:
                self._newest = batch.event_time_seconds
                for weights in self.weights.values():
                    weights *= 2.0 ** (-later / self._half_life_seconds)
            counts = np.bincount(batch.rows, minlength=len(self.accesses[batch.table]))
            self.accesses[batch.table] += counts
            self.weights[batch.table] += counts * 2.0 ** (min(later, 0.0) / self._half_life_seconds)


def longest_step(attempt: Attempt, since: float, until_: float) -> tuple[float, float]:
    """(longest step of any rank that ended in a span of CLOCK_MONOTONIC, median of all steps before it), seconds."""
    attempt.follow()
    steps = [step for rank in attempt.steps for step in rank]
    inside = [step.seconds for step in steps if since <= step.at <= until_]
    before = [step.seconds for step in steps if step.at < since] or inside
    return max(inside, default=0.0), float(np.median(before)) if before else 0.0
