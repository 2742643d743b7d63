"""Order of test files, gloo ranks, one thread per process, and a garbage collector that does not scan thousands of
modules all the time."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings

# Read when torch and numpy are imported, here and in every child. Three files run at a time, with up to six ranks: more
# threads of each would only wait for one another, and OpenMP's wait by spinning.
for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

# For `make mutate`: a mutant is killed by the first example that fails; looking for a smaller one takes much longer.
settings.register_profile("mutate", phases=(Phase.explicit, Phase.generate), database=None)
# `make test` draws the same examples everywhere; `make test-all` asks for random ones with --hypothesis-profile.
settings.register_profile("fixed", derandomize=True, database=None)
settings.register_profile("random", derandomize=False, print_blob=True)
settings.load_profile("fixed")

# Until all is collected: importing makes little garbage, and each full collection scans all that is imported.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start files marked ``slow`` first: left for the end, they would run while the other process has nothing to do."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def keep_what_there_is() -> None:
    """A full collection costs what is tracked: modules, classes, collected tests. That took a quarter of the time."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    keep_what_there_is()
    gc.enable()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Any]]:
    """Return ``ranks(world_size)``: a ``RankPool``, started on first use and kept for the session."""
    from tests.support.rank_pool import RankPool

    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module", autouse=True)
def _after_each_file() -> Iterator[None]:
    yield
    keep_what_there_is()
    # Fault points belong to the process: a server left running would take the faults of a later file's tests.
    left = [thread.name for thread in threading.enumerate() if thread.name in ("flexd-http", "flexd-metrics")]
    assert not left, f"the tests of this file left running: {left}"
