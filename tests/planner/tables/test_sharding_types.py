"""``flexd shard --for flexd``: sharding types and pooling places of a list, and the document that a trainer reads."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import flexd
from flexd.core.placement import RankLayout
from flexd.planner.tables.sharding import ListedTable, flexd_sharding, plan_rules, rules_document
from flexd.planner.tables.solve import TablePlacement
from flexd.topology.cluster import StepCosts
from flexd.topology.files import load_preset, scale_model

CLUSTER = scale_model(load_preset("azure-a100-200g"), 1e9)
"""Without latencies: those of one more collective are more than three small tables save."""
LAYOUT = RankLayout(2, 2)
POOLED = ListedTable("t", 1000, 64, 5.0, 1.0, 512)


def listed() -> list[ListedTable]:
    rng = np.random.default_rng(0)
    large = [
        replace(POOLED, name=f"sparse.large{i}", module="sparse", rows=int(rng.integers(10**5, 10**6)), lookups=40.0)
        for i in range(6)
    ]
    small = [replace(POOLED, name=f"small{i}", rows=20) for i in range(3)]
    return [*large, *small, replace(POOLED, name="history", rows=10**6, bags=0.0)]


def planned(*without: str) -> TablePlacement:
    return plan_rules(listed(), LAYOUT, CLUSTER, 4e9, evaluations=300, without=without)


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
    cluster = replace(CLUSTER, step_costs=costs)
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
