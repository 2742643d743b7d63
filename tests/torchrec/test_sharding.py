"""``flexd.torchrec.sharding_plan``: DistributedModelParallel trains with plans of ``flexd shard``."""

import copy
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.planner.tables.sharding import shard_tables, sharding_document
from flexd.topology.files import load_preset
from flexd.torchrec import sharding_plan
from tests.support.rank_pool import RankPool

ROWS = (64, 40, 96, 24, 80)
RATE = 50.0


def model(device: str = "cpu") -> nn.Module:
    """Five pooled tables of 64 columns in ``bags``, two un-pooled ones in ``rows``.

    Un-pooled ones have a fused optimizer: without one TorchRec takes FBGEMM's dense kernel, which on a CPU pools them
    whatever it is told, so that the look-up ends with sizes that do not add up.
    """
    with_values = {"embedding_dim": 64, "init_fn": partial(nn.init.constant_, val=0.1)}
    bags = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, feature_names=[f"f{i}"], **with_values)
        for i, rows in enumerate(ROWS)
    ]
    rows = [
        EmbeddingConfig(name=f"s{i}", num_embeddings=count, feature_names=[f"g{i}"], **with_values)
        for i, count in enumerate((48, 32))
    ]
    found = nn.Module()
    found.bags = torchrec.EmbeddingBagCollection(tables=bags, device=torch.device(device))
    found.rows = torchrec.EmbeddingCollection(tables=rows, device=torch.device(device))
    apply_optimizer_in_backward(torch.optim.SGD, found.rows.parameters(), {"lr": RATE})
    return found


def constrained() -> Any:
    """The model with what TorchRec's planner is told of its tables, as an entry point of ``flexd shard``."""
    from torchrec.distributed.planner import ParameterConstraints

    return model("meta"), {"t0": ParameterConstraints(pooling_factors=[40.0], batch_sizes=[32])}


def _batch(rank: int, step: int) -> KeyedJaggedTensor:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    keys = [*(f"f{i}" for i in range(5)), "g0", "g1"]
    lengths = torch.randint(0, 5, (len(keys) * 8,), generator=drawn)
    return KeyedJaggedTensor(keys, torch.randint(0, 24, (int(lengths.sum()),), generator=drawn), lengths=lengths)


def _of(batch: KeyedJaggedTensor, kind: str) -> KeyedJaggedTensor:
    parts = batch.to_dict()
    names = [name for name in parts if name[0] == kind]
    return KeyedJaggedTensor(
        names,
        torch.cat([parts[name].values() for name in names]),
        lengths=torch.cat([parts[name].lengths() for name in names]),
    )


def train(rank: int, document: dict[str, Any], steps: int) -> tuple[list[float], dict[str, str]]:
    """Return the mean loss of the ranks in every step, and the sharding type of each table."""
    os.environ["LOCAL_WORLD_SIZE"] = str(document["local_ranks"])
    plan = sharding_plan(made := model(), document, device_type="cpu")
    kinds = {name: entry.sharding_type for module in plan.plan.values() for name, entry in module.items()}
    parallel = DistributedModelParallel(made, device=torch.device("cpu"), plan=plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    target = torch.linspace(-1, 1, 64)
    losses = []
    for step in range(steps):
        batch = _batch(rank, step)
        bags = parallel.module.bags(_of(batch, "f")).wait().values().view(8, 5, 64)
        rows = parallel.module.rows(_of(batch, "g"))
        loss = (bags - target).square().mean()
        loss = loss + torch.cat([rows[name].values() - target for name in ("g0", "g1")]).square().sum() / 2000
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses, kinds


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

    from flexd.cli.shard_command import tables_of_model

    tables = tables_of_model(constrained(), "constrained", 8)
    assert [(table.module, table.name, table.lookups, table.bags, table.batch) for table in tables[:2]] == [
        ("bags", "t0", 40.0, 1.0, 32), ("bags", "t1", 1.0, 1.0, 8),
    ]  # fmt: skip
    assert [table.bags for table in tables[5:]] == [0.0, 0.0]
    # Un-pooled tables cannot be data-parallel on a CPU (``model``), and TorchRec keeps the process groups of
    # table-row-wise tables when a pool's ranks make new ones.
    found = shard_tables(
        tables, RankLayout(2, 2), load_preset("azure-a100-200g"), 1e9, evaluations=200,
        without=["data_parallel", "table_row_wise"],
    )  # fmt: skip
    return sharding_document(tables, found)


def test_training_with_a_plan_has_the_losses_of_another(four: RankPool):
    expected, kinds = four.run(train, document({name: ("row_wise", [0, 1, 2, 3]) for name in KINDS}), 6)[0]
    assert set(kinds.values()) == {"row_wise"}
    assert expected[-1] < 0.9 * expected[0]
    for plan in (document(KINDS), planned()):
        losses, kinds = four.run(train, plan, 6)[0]
        assert kinds == {n: e["sharding_type"] for tables in plan["modules"].values() for n, e in tables.items()}
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
    bad = copy.deepcopy(document(KINDS))
    change(bad)
    with pytest.raises(EmbeddingError, match=message):
        sharding_plan(model("meta"), bad, device_type="cpu")
