"""Process groups: their timeout, layouts that do not fit them, one set for each default group, released at exit."""

import re
import subprocess
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d

import flexd
from flexd.core.errors import TopologyError
from flexd.core.placement import RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.connect import connect
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.exchange import process_groups
from flexd.embedding.exchange.fault_notices import FaultNotices
from flexd.embedding.exchange.process_groups import layout_from_environment
from flexd.embedding.prefetch.loop import prefetch
from flexd.embedding.row_optimizers import SGD, RowWiseAdagrad
from tests.support.collection_jobs import ROWS, some, tables, train_step
from tests.support.rank_pool import Ranks, error_of
from tests.support.repository import ROOT, child_environment


def construct(rank: int, arguments: list[dict[str, Any]]) -> str:
    """Construct a collection on each rank with its own arguments; return the error."""
    keywords = {"tables": [EmbeddingTable("item", 64, 2)], "layout": RankLayout(2, 2)} | arguments[rank]
    return error_of(EmbeddingCollection, **keywords)


def closed_groups(rank: int, layout: RankLayout) -> dict[str, Any]:
    """Count the process groups that collections and loops of ``prefetch`` make, and those that are left at the end."""
    made: list[str] = []
    groups: list[weakref.ref[Any]] = []
    new_subgroup = process_groups.new_subgroup

    def counted(ranks: Any, name: str, timeout: Any) -> Any:
        made.append(name.split("/")[2])
        group = new_subgroup(ranks, name, timeout)
        groups.append(weakref.ref(group))
        return group

    def loop(collection: EmbeddingCollection) -> None:
        for features in prefetch([some(0, step, rank) for step in range(3)], collection):
            train_step(collection, features)

    out: dict[str, Any] = {}
    before = set(distributed_c10d._world.pg_map)
    with (
        mock.patch.object(process_groups, "new_subgroup", counted),
        mock.patch.object(process_groups, "_present", [process_groups.JobGroups()]),
    ):
        for name, exchange in (("first", "chain"), ("again", "direct")):
            made.clear()
            with EmbeddingCollection(tables(), layout=layout) as first, EmbeddingCollection(tables(), layout=layout):
                out[f"{name}: collections"] = list(made)
                loop(first)
                loop(first)
                out[f"{name}: loops"] = list(made)
                with EmbeddingCollection(tables(), layout=layout, exchange=exchange) as third:
                    loop(third)
                out[f"{name}: another collection"] = list(made)
            out[f"{name}: left"] = len(set(distributed_c10d._world.pg_map) - before)
        with EmbeddingCollection(tables(), layout=layout) as kept:
            with EmbeddingCollection(tables(), layout=layout):
                loop(kept)
            loop(kept)
            train_step(kept, some(0, 1, rank))
            out["kept"] = {name: kept.gather_table(name).numpy() for name in ROWS}
    out["closed"] = error_of(kept, some(0, 1, rank))
    out["held"] = sum(group() is not None for group in groups)
    kept.close()
    return out


def late(rank: int, layout: RankLayout, missing: list[int], where: str, seconds: float) -> str:
    """Make or connect a collection on all ranks but the missing ones; return the error of this rank."""
    if where == "construct" and rank in missing:
        FaultNotices()  # instances are numbered alike on all ranks
    elif where == "construct":
        with mock.patch.object(process_groups, "_timeout", return_value=timedelta(seconds=seconds)):
            return error_of(EmbeddingCollection, tables(), layout=layout)
    else:
        collection = EmbeddingCollection(tables(), layout=layout)
        collection._groups.timeout_seconds = seconds
        if rank not in missing and where == "connect":
            return error_of(connect, collection, "127.0.0.1:1", job="job")
        if rank not in missing:
            return error_of(collection.close)
    return ""


def timeouts(rank: int, layout: RankLayout) -> list[float]:
    """Return the timeouts of the collectives of world, node and rail in seconds."""
    groups = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout)._groups
    backends = [peers.group._get_backend(torch.device("cpu")) for peers in (groups.world, groups.node, groups.rail)]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_collectives_have_the_timeout_of_the_default_group(ranks: Ranks) -> None:
    assert ranks(4).run(timeouts, RankLayout(2, 2)) == [[60.0] * 3] * 4


def test_without_a_process_group_each_rank_would_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    table = flexd.EmbeddingTable("item", 10, 4)
    with pytest.raises(TopologyError, match=r"WORLD_SIZE=4, but there is no process group.*init_process_group first"):
        flexd.EmbeddingCollection([table])
    flexd.EmbeddingCollection([table], layout=RankLayout(1, 1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert layout_from_environment() == RankLayout(1, 1)


OTHER = [EmbeddingTable("item", 65, 2)]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ([{}, {}, {"tables": OTHER}, {}], "ranks [2] have other names or row counts of tables than rank 0"),
        ([{"tables": OTHER}, {}, {}, {}], "ranks [1, 2, 3] have other names or row counts of tables"),
        ([{}, {"exchange": "direct"}, {}, {}], "ranks [1] have other settings than rank 0"),
        ([{}, {"average_gradients": False}, {}, {}], "ranks [1] have other settings than rank 0"),
        ([{}, {}, {"max_migration_bytes_per_step": 1}, {}], "ranks [2] have other settings"),
        ([{}, {}, {}, {"optimizer": SGD(lr=0.5)}], "ranks [3] have other settings"),
        ([{"optimizer": RowWiseAdagrad(eps=eps)} for eps in (0.1, 0.1, 0.1, 0.2)], "ranks [3] have other settings"),
        ([{}, {}, {"layout": RankLayout(4, 1)}, {}], "rank 2 has a layout of 4 nodes x 1 local ranks, rank 0 of 2 x 2"),
        ([{}, {}, {"layout": RankLayout(2, 3)}, {}], "rank 2 has a layout of 2 nodes x 3 local ranks, rank 0 of 2 x 2"),
        ([{"layout": RankLayout(2, 3)}] * 4, "but the process group has 4 ranks"),
    ],
)
def test_different_arguments_are_refused_on_every_rank(
    ranks: Ranks, arguments: list[dict[str, Any]], cause: str
) -> None:
    for text in ranks(4).run(construct, arguments, timeout=30):
        assert text.startswith("TopologyError")
        assert cause in text


def test_groups_are_made_once_and_closed_with_the_last_collection(ranks: Ranks) -> None:
    """A rank makes its own node, rail and world, for the training threads and for each second thread, and each once
    more for the first messages of look-ups; the world of a second thread only for the exchange that uses it."""
    chain, world = ["node"] * 2 + ["rail"] * 2, ["world"] * 2
    for rank, found in enumerate(ranks(4).run(closed_groups, RankLayout(2, 2))):
        for name in ("first", "again"):
            assert found[f"{name}: collections"] == chain + world
            assert found[f"{name}: loops"] == chain + world + chain
            # The second collection with a loop has a thread of its own.
            added = chain + world * (name == "again")
            assert found[f"{name}: another collection"] == chain + world + chain + added
            assert found[f"{name}: left"] == 0
        assert found["held"] == 0, "collected in a forked child, they wait for threads of their parent"
        assert f"rank {rank}: the collection is closed - read and save its tables before close()" in found["closed"]
        assert set(found["kept"]) == {"item", "odd", "tiny"}


@pytest.mark.parametrize(
    ("where", "missing", "call"),
    [
        ("construct", [2], "flexd.EmbeddingCollection()"),
        ("connect", [0, 3], "flexd.connect()"),
        ("close", [1], "EmbeddingCollection.close()"),
    ],
)
def test_ranks_that_do_not_come_are_named_within_the_deadline(
    ranks: Ranks, where: str, missing: list[int], call: str
) -> None:
    for rank, text in enumerate(ranks(4).run(late, RankLayout(2, 2), missing, where, 0.3)):
        if rank not in missing:
            found = re.match(rf"CollectiveError: rank {rank}: {re.escape(call)}: ranks \[(.*)\] did not call it", text)
            assert found, text
            # On a busy machine a rank that came late is named too.
            assert set(missing) <= {int(other) for other in found[1].split(", ")} < set(range(4))


PROGRAM = """
import atexit
seen = []
atexit.register(lambda: print("default is", seen[0]._present[0].default))  # runs after what is registered later
import torch.distributed as dist
from flexd.embedding.exchange import process_groups
seen.append(process_groups)

def begin():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return process_groups.JobGroups.current()

first = begin()
first.begin_use()
dist.destroy_process_group()
second = begin()
second.begin_use()
first.end_use(destroy=True)
print("same", first is second, "users", second._users, "kept", process_groups.JobGroups.current() is second)
"""


def test_groups_belong_to_their_default_group_and_are_released_at_exit() -> None:
    """The end of a collection of an earlier job counts there. A group that a module holds to the end is destroyed with
    the modules, and its threads abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
        env=child_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["same False users 1 kept True", "default is None"]


def test_the_end_of_a_process_waits_for_threads_of_gloo_that_run(tmp_path: Path) -> None:
    """One that frees a tensor while the interpreter ends aborts the process."""
    thread = tmp_path / "12" / "stat"
    thread.parent.mkdir()
    thread.write_text("12 (pt_gloo_runloop) R 1 2")
    assert process_groups._gloo_runs(tmp_path)
    for other in ("12 (pt_gloo_runloop) S 1 2", "12 (python) R 1 2", "12 (odd) name) R 1 2"):
        thread.write_text(other)
        assert not process_groups._gloo_runs(tmp_path)
    seen = [True, True, False]
    with (
        mock.patch.object(process_groups, "_gloo_runs", side_effect=lambda _: seen.pop(0)),
        mock.patch.object(process_groups, "_present", [process_groups.JobGroups()]),
    ):
        process_groups._release()
        assert seen == []
        with (
            mock.patch.object(process_groups, "_gloo_runs", return_value=True),
            mock.patch.object(process_groups, "_RELEASE_SECONDS", 0.01),
        ):
            process_groups._release()  # a thread that never rests does not keep the process
