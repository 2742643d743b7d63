"""``flexd.TableRules``: planned sharding types and pooling places in a collection."""

import json
from pathlib import Path
from typing import Any

import pytest

import flexd
from flexd.core.errors import TopologyError
from flexd.core.placement import RankLayout

TABLES = [
    flexd.EmbeddingBagTable("item", 61, 8, dtype="float64"),
    flexd.EmbeddingBagTable("shop", 17, 8, dtype="float64", sharding="table_wise:0"),
    flexd.EmbeddingBagTable("city", 23, 5, dtype="float64"),
]


def entry(name: str, rows: int, dim: int, homes: str, pooling_at: str | None, module: str = "") -> dict[str, Any]:
    return {"name": name, "rows": rows, "dim": dim, "sharding": homes, "pooling_at": pooling_at, "module": module}


def document(*entries: dict[str, Any], nodes: int = 2, local_ranks: int = 2) -> dict[str, Any]:
    found = entries or (
        entry("item", 61, 8, "table_row_wise:1", "owner"), entry("shop", 17, 8, "data_parallel", "requester"),
        entry("city", 23, 5, "table_wise:3", "requester"), entry("other", 9, 4, "row_wise", None),
    )  # fmt: skip
    return {"format": 1, "for": "flexd", "nodes": nodes, "local_ranks": local_ranks, "tables": list(found)}


def test_rules_and_answers_of_the_plan_replace_those_of_the_tables():
    found = flexd.TableRules.read(document()).apply(TABLES)
    assert [(table.sharding, table.pooling_at) for table in found] == [
        ("table_row_wise:1", "owner"), ("data_parallel", "requester"), ("table_wise:3", "requester"),
    ]  # fmt: skip
    assert [table.name for table in found] == ["item", "shop", "city"]
    (plain,) = flexd.TableRules.read(document()).apply([flexd.EmbeddingTable("other", 9, 4, sharding="table_wise:1")])
    assert plain.sharding == "row_wise"


@pytest.mark.parametrize(
    ("change", "tables", "message"),
    [
        ({"format": 2}, TABLES, "no table rules of format 1"),
        ({"for": "torchrec"}, TABLES, "no table rules"),
        ({"tables": [{"name": "item"}]}, TABLES, "KeyError: 'pooling_at'"),
        (
            {"tables": [entry("item", 61, 8, "table_row_wise:x", "requester")]},
            TABLES,
            "'item': sharding type 'table_row_wise:x'",
        ),
        ({"tables": [entry("item", 61, 8, "row_wise", "mean")]}, TABLES, "'item': pooling_at 'mean'"),
        ({"tables": [entry("item", 61, 8, "row_wise", "requester")]}, TABLES, "no table 'shop'"),
        ({"tables": [entry("item", 60, 8, "row_wise", "requester")]}, TABLES, "'item' has 60 rows of 8, here 61 of 8"),
        ({}, [flexd.EmbeddingTable("item", 61, 8)], "'item' is planned as pooled, and is not"),
    ],
)
def test_rules_of_something_else_are_refused_by_name(change: dict[str, Any], tables: Any, message: str):
    with pytest.raises(flexd.core.errors.FlexdError, match=message):
        flexd.TableRules.read(document() | change).apply(tables)


def test_a_plan_for_other_ranks_is_refused():
    one = document(*document()["tables"], nodes=2, local_ranks=1)
    with pytest.raises(TopologyError, match="planned for 2 nodes x 1 ranks, this job has 1 x 1"):
        flexd.EmbeddingBagCollection(TABLES, rules=flexd.TableRules.read(one), layout=RankLayout(1, 1))


def test_a_collection_takes_the_rules_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    one = [
        entry("item", 61, 8, "table_row_wise:0", "owner"),
        entry("shop", 17, 8, "data_parallel", "requester"),
        *document()["tables"][2:],
    ]
    one[2] |= {"sharding": "table_wise:0"}
    file.write_text(json.dumps(document(*one, nodes=1, local_ranks=1)))
    bags = flexd.EmbeddingBagCollection(TABLES, rules=str(file), layout=RankLayout(1, 1))
    assert [(table.sharding, table.pooling_at) for table in bags.tables] == [
        ("table_row_wise:0", "owner"), ("data_parallel", "requester"), ("table_wise:0", "requester"),
    ]  # fmt: skip
