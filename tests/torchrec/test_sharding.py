"""``flexd.torchrec.sharding_plan``: DistributedModelParallel trains with plans of ``flexd shard``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.planner.tables.sharding import shard_tables, sharding_document
from flexd.topology.files import load_preset
from flexd.torchrec import sharding_plan
from tests.support import sharding_jobs
from tests.support.rank_pool import RankPool

KINDS = {"t0": ("table_wise", [3]), "t1": ("table_row_wise", [2, 3]), "t2": ("column_wise", [1, 2]),
         "t3": ("data_parallel", [0, 1, 2, 3]), "t4": ("row_wise", [0, 1, 2, 3]),
         "s0": ("table_wise", [1]), "s1": ("column_wise", [0, 3])}  # fmt: skip


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def document(kinds: dict[str, tuple[str, list[int]]]) -> dict[str, Any]:
    entries = {name: {"sharding_type": kind, "ranks": ranks} for name, (kind, ranks) in kinds.items()}
    modules = {"bags": {n: e for n, e in entries.items() if n[0] == "t"}}
    modules["rows"] = {n: e for n, e in entries.items() if n[0] == "s"}
    return {"format": 1, "nodes": 2, "local_ranks": 2, "modules": modules}


def planned() -> dict[str, Any]:
    from flexd.cli.model_tables import tables_of_model
    from tests.support.sharding_jobs import constrained

    tables = tables_of_model(constrained(), "constrained", 8)
    assert [(table.module, table.name, table.lookups, table.bags, table.batch) for table in tables[:2]] == [
        ("bags", "t0", 40.0, 1.0, 32), ("bags", "t1", 1.0, 1.0, 8),
    ]  # fmt: skip
    assert [table.bags for table in tables[5:]] == [0.0, 0.0]
    # Un-pooled tables cannot be data-parallel on a CPU (sharding_jobs), and TorchRec keeps the process groups of
    # table-row-wise tables when a pool's ranks make new ones.
    found = shard_tables(
        tables, RankLayout(2, 2), load_preset("azure-a100-200g"), 1e9, evaluations=200,
        without=["data_parallel", "table_row_wise"],
    )  # fmt: skip
    return sharding_document(tables, found)


def test_training_with_a_plan_has_the_losses_of_another(four: RankPool):
    row_wise = document({name: ("row_wise", [0, 1, 2, 3]) for name in KINDS})
    expected, kinds = four.run(sharding_jobs.train, row_wise, 6)[0]
    assert set(kinds.values()) == {"row_wise"}
    assert expected[-1] < 0.9 * expected[0]
    for plan in (document(KINDS), planned()):
        losses, kinds = four.run(sharding_jobs.train, plan, 6)[0]
        wanted = {n: e["sharding_type"] for tables in plan["modules"].values() for n, e in tables.items()}
        assert kinds == wanted
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2), "format 2"),
        (lambda d: d.update({"for": "flexd"}), "sharding types for flexd's trainer"),
        (lambda d: d["modules"]["bags"].pop("t3"), "lacks 't3'"),
        (lambda d: d["modules"].update(other={}), "the model 'other'"),
        (lambda d: d["modules"]["bags"]["t0"].update(ranks=[4]), r"'t0': ranks \[4\] of 4"),
        (lambda d: d["modules"]["bags"]["t0"].update(ranks=3), "'t0': ranks 3 of 4"),
        (lambda d: d["modules"]["bags"]["t0"].update(sharding_type="grid"), "'t0': sharding type 'grid'"),
        (lambda d: d.pop("nodes"), "damaged: KeyError"),
        (lambda d: d.update(modules=["bags"]), "damaged: AttributeError"),
        (lambda d: d["modules"]["bags"].update(t0="row_wise"), "damaged: ValueError"),
    ],
)
def test_a_plan_of_something_else_is_refused_by_name(change: Any, message: str):
    from tests.support.sharding_jobs import model

    bad = copy.deepcopy(document(KINDS))
    change(bad)
    with pytest.raises(EmbeddingError, match=message):
        sharding_plan(model("meta"), bad, device_type="cpu")
