"""``flexd shard``'s planner: loads of TorchRec's shardings, table lists, and the document."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flexd
from flexd.core.errors import ConfigError, PlanError
from flexd.core.placement import RankLayout
from flexd.planner.tables.costs import TORCHREC_OPTIONS, TORCHREC_PHASES, torchrec_options
from flexd.planner.tables.options import Part, ShardingKind
from flexd.planner.tables.sharding import (
    ListedTable,
    TableStatistics,
    flexd_sharding,
    listed_seconds,
    plan_rules,
    read_tables,
    rules_document,
    shard_tables,
    sharding_document,
    torchrec_sharding,
    torchrec_work,
)
from flexd.planner.tables.solve import TablePlacement
from flexd.sketch.profile import Profile, zipf_table
from flexd.topology.cluster import StepCosts
from flexd.topology.files import load_preset, scale_model

CLUSTER = load_preset("azure-a100-200g")
BATCH, DIM, LOOKUPS = 100, 128, 6.0
POOLED = ListedTable("pooled", 4000, DIM, LOOKUPS, 2.0, BATCH)
ROWS = replace(POOLED, name="rows", bags=0.0)


@pytest.mark.parametrize("layout", [RankLayout(3, 2), RankLayout(1, 4), RankLayout(4, 1)])
def test_loads_are_the_bytes_of_the_collectives(layout: RankLayout):
    """All that is sent is received, and the mean rank sends to other nodes what TorchRec's collectives carry."""
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    work = torchrec_work([POOLED, ROWS], layout, TableStatistics())
    options = torchrec_options(work, [DIM, DIM], layout, CLUSTER.of_layout(nodes, local))
    ranks_of = np.array([world, local, nodes, 1])
    every = np.einsum("topk,p->tok", options.loads, ranks_of)[..., :-2].reshape(2, len(TORCHREC_OPTIONS), -1, 2, 2)
    assert np.allclose(every[..., 0], every[..., 1])
    assert options.loads[:, :, Part.HOME_RAIL].sum() == 0
    sent = {name: every[..., at // 2, at % 2, 0] / world for at, name in enumerate(TORCHREC_PHASES[:-2])}
    ids, remote = BATCH * LOOKUPS * 8, (world - local) / world
    for table, vectors in enumerate((BATCH * 2 * DIM * 4, BATCH * LOOKUPS * DIM * 4)):
        for at, option in enumerate(TORCHREC_OPTIONS):
            between = {name: value[table, at] * option.pieces for name, value in sent.items() if "inter" in name}
            if option.rule in (ShardingKind.TABLE_WISE, ShardingKind.COLUMN_WISE):
                assert between["ids_inter_node"] == pytest.approx(ids * remote * option.pieces)
                assert between["values_inter_node"] == pytest.approx(vectors * remote)
            if option.rule is ShardingKind.TABLE_ROW_WISE and table == 0:
                assert between["values_inter_node"] == pytest.approx(vectors * remote)
                assert between["ids_inter_node"] == pytest.approx(ids * remote)
            if option.rule is ShardingKind.ROW_WISE:
                kind, size = ("values", remote) if table else ("scattered_values", (world - 1) / local)
                assert between[f"{kind}_inter_node"] == pytest.approx(vectors * size if nodes > 1 else 0)
            if option.rule is ShardingKind.DATA_PARALLEL:
                summed = 2 * (world - 1) / world * 4000 * DIM * 4
                assert sum(between.values()) == pytest.approx(summed / local if nodes > 1 else 0)
    assert not options.allowed[1, 1]
    assert options.allowed[0, 1] == (nodes > 1)


def made(count: int = 12) -> list[ListedTable]:
    rng = np.random.default_rng(0)
    return [
        replace(POOLED, name=f"t{i}", module="sparse", rows=int(rng.integers(100, 200_000)),
                lookups=float(rng.integers(1, 60)), bags=1.0)
        for i in range(count)
    ]  # fmt: skip


def test_a_plan_is_faster_than_row_wise_and_names_every_table():
    document = sharding_document(made(), shard_tables(made(), RankLayout(2, 2), CLUSTER, 1e9, evaluations=300))
    assert document["predicted"]["step_seconds"] < document["predicted"]["row_wise_step_seconds"]
    assert set(document["modules"]["sparse"]) == {f"t{i}" for i in range(12)}
    assert max(document["predicted"]["memory_bytes"]) <= 1e9
    without = shard_tables(
        made(), RankLayout(2, 2), CLUSTER, 1e9, evaluations=300,
        without=["table_wise", "column_wise", "table_row_wise", "data_parallel"],
    )  # fmt: skip
    assert {kind for kind, _ in torchrec_sharding(without)} == {"row_wise"}
    with pytest.raises(PlanError, match="no place within the memory"):
        shard_tables(made(), RankLayout(2, 2), CLUSTER, 1e6, evaluations=300)


def test_a_profile_counts_and_must_be_of_these_tables():
    tables = [replace(POOLED, name="t0")]
    layout = RankLayout(2, 2)
    profile = Profile((zipf_table("t0", 4000, 0.5, 100, 7000.0, 0),), 1, 1000)
    assert torchrec_work(tables, layout, TableStatistics(profile=profile)).statistics[0, 1] == pytest.approx(7000 / 4)
    wrong = TableStatistics(profile=Profile((zipf_table("t0", 5000, 0.5, 100, 7000.0, 0),), 1, 1000))
    with pytest.raises(PlanError, match="'t0': 4000 rows, in the profile 5000"):
        torchrec_work(tables, layout, wrong)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "fqn,hash_size\na,3\n", "no column emb_dim, sum_pooling_factor"),
        ("t.csv", "fqn,hash_size,emb_dim,sum_pooling_factor,sum_num_poolings,output,batch\na,0,4,1,1,pooled,8\n",
         "line 2: table 'a': rows is 0"),
        ("t.csv", "fqn,hash_size,emb_dim,sum_pooling_factor,sum_num_poolings,output,batch\na,inf,4,1,1,pooled,8\n",
         "line 2: cannot convert float infinity"),
        ("t.json", '[{"name": "a", "rows": Infinity, "dim": 4}]', "table 0: cannot convert float infinity"),
        ("t.json", "[]", "no tables"),
        ("t.json", "{", "not JSON"),
        ("t.json", '[{"name": "a", "rows": 3}]', "table 0: no 'dim'"),
        ("t.json", '[{"name": "a", "rows": 3, "dim": 4, "row": 1}]', "unknown key row"),
        ("t.json", '[{"name": "a", "rows": 3, "dim": 4}, {"name": "a", "rows": 3, "dim": 4}]', "listed twice: a"),
        ("none.csv", None, "cannot be read"),
    ],
)  # fmt: skip
def test_lists_that_are_not_valid_are_refused_by_name(tmp_path: Path, name: str, text: str | None, message: str):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_tables(tmp_path / name)


def test_json_and_csv_say_the_same(tmp_path: Path):
    (tmp_path / "t.csv").write_text(
        "fqn,sharding,sum_pooling_factor,sum_num_poolings,output,emb_dim,hash_size,n_shards,ranks,batch\n"
        'm.a,CW,30,2,pooled,64,100,2,"1,3",64*2\n'
    )
    entry = {"name": "m.a", "module": "m", "rows": 100, "dim": 64, "lookups": 30, "bags": 2, "batch": 64,
             "sharding": "CW", "ranks": [1, 3]}  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps([entry]))
    (of_csv,), (of_json,) = read_tables(tmp_path / "t.csv"), read_tables(tmp_path / "t.json")
    assert of_csv == of_json


def test_the_plan_of_a_list_is_priced_as_the_own():
    layout = RankLayout(2, 2)
    found = shard_tables(made(), layout, CLUSTER, 1e9, evaluations=300)
    kinds = [
        replace(table, sharding=kind, ranks=tuple(ranks))
        for table, (kind, ranks) in zip(made(), torchrec_sharding(found), strict=True)
    ]
    assert listed_seconds(kinds, layout, CLUSTER) == pytest.approx(found.seconds)
    on_one = [replace(table, sharding="TW", ranks=(3,)) for table in made()]
    assert listed_seconds(on_one, layout, CLUSTER) > 1.5 * found.seconds
    columns = [
        listed_seconds([replace(made()[0], sharding=kind, ranks=(2, 3)), *on_one[1:]], layout, CLUSTER)
        for kind in ("column_wise", "table_column_wise")
    ]
    assert columns[0] == columns[1]
    assert listed_seconds(made(), layout, CLUSTER) is None
    for bad, message in (
        (replace(kinds[0], sharding="GRID"), "'t0': sharding 'GRID'"),
        (replace(kinds[0], ranks=(4,)), "'t0': on rank 4 of 4"),
        (replace(kinds[0], ranks=(-1,)), "'t0': on rank -1 of 4"),
    ):
        with pytest.raises(PlanError, match=message):
            listed_seconds([bad], layout, CLUSTER)


UNLATENT = scale_model(load_preset("azure-a100-200g"), 1e9)
"""Without latencies: those of one more collective are more than three small tables save."""
LAYOUT = RankLayout(2, 2)
BAG = ListedTable("t", 1000, 64, 5.0, 1.0, 512)


def listed() -> list[ListedTable]:
    rng = np.random.default_rng(0)
    large = [
        replace(
            BAG,
            name=f"sparse.large{i}",
            module="sparse",
            rows=int(rng.integers(10**5, 10**6)),
            lookups=40.0,
        )
        for i in range(6)
    ]
    small = [replace(BAG, name=f"small{i}", rows=20) for i in range(3)]
    return [*large, *small, replace(BAG, name="history", rows=10**6, bags=0.0)]


def planned(*without: str) -> TablePlacement:
    return plan_rules(listed(), LAYOUT, UNLATENT, 4e9, evaluations=300, without=without)


def test_small_tables_are_copied_and_long_bags_answered_by_sums_at_single_places():
    found = planned()
    rules = dict(zip((table.name for table in listed()), flexd_sharding(listed(), found), strict=True))
    assert [rules[f"small{i}"] for i in range(3)] == [("data_parallel", "requester")] * 3
    assert {rule.partition(":")[0] for rule, _ in list(rules.values())[:6]} <= {"table_row_wise", "table_wise"}
    assert {pooling_at for _, pooling_at in list(rules.values())[:6]} == {"owner"}
    assert rules["history"][1] is None
    assert found.seconds < found.spread_seconds


@pytest.mark.parametrize(
    ("costs", "left_out"), [(StepCosts(1.0, 0.0, 1e12), "owner"), (StepCosts(0.0, 1.0, 1e12), "data_parallel")]
)
def test_what_takes_longer_beside_links_than_it_saves_is_not_planned(costs: StepCosts, left_out: str):
    cluster = replace(UNLATENT, step_costs=costs)
    chosen = flexd_sharding(listed(), plan_rules(listed(), LAYOUT, cluster, 4e9, evaluations=300))
    assert all(left_out not in (rule, pooling_at) for rule, pooling_at in chosen)
    assert any(left_out in (rule, pooling_at) for rule, pooling_at in flexd_sharding(listed(), planned()))


def test_the_document_is_what_a_trainer_reads():
    found = planned()
    read = flexd.TableRules.read(json.loads(json.dumps(rules_document(listed(), found))))
    assert read.layout == LAYOUT
    for table, (rule, pooling_at) in zip(listed(), flexd_sharding(listed(), found), strict=True):
        of_table = read.by_name[table.name.removeprefix("sparse.")]
        assert (of_table.rows, of_table.dim, of_table.sharding, of_table.pooling_at) == (
            table.rows,
            table.dim,
            rule,
            pooling_at,
        )
    assert read.by_name["sparse/large0"] == read.by_name["large0"]
