"""``flexd.TableRules``: planned home rules and answers in a collection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flexd
from flexd.core.errors import TopologyError
from flexd.core.layout import RankLayout

TABLES = [
    flexd.EmbeddingBagTable("item", 61, 8, dtype="float64"),
    flexd.EmbeddingBagTable("shop", 17, 8, dtype="float64", homes="rank:0"),
    flexd.EmbeddingBagTable("city", 23, 5, dtype="float64"),
]


def entry(name: str, rows: int, dim: int, homes: str, answer: str | None, module: str = "") -> dict[str, Any]:
    return {"name": name, "rows": rows, "dim": dim, "homes": homes, "answer": answer, "module": module}


def document(*entries: dict[str, Any], nodes: int = 2, local_ranks: int = 2) -> dict[str, Any]:
    found = entries or (
        entry("item", 61, 8, "node:1", "sums"), entry("shop", 17, 8, "every rank", "rows"),
        entry("city", 23, 5, "rank:3", "rows"), entry("other", 9, 4, "all", None),
    )  # fmt: skip
    return {"format": 1, "for": "flexd", "nodes": nodes, "local_ranks": local_ranks, "tables": list(found)}


def test_rules_and_answers_of_the_plan_replace_those_of_the_tables():
    found = flexd.TableRules.read(document()).apply(TABLES)
    assert [(table.homes, table.answer) for table in found] == [
        ("node:1", "sums"), ("every rank", "rows"), ("rank:3", "rows"),
    ]  # fmt: skip
    assert [table.name for table in found] == ["item", "shop", "city"]
    (plain,) = flexd.TableRules.read(document()).apply([flexd.EmbeddingTable("other", 9, 4, homes="rank:1")])
    assert plain.homes == "all"


@pytest.mark.parametrize(
    ("change", "tables", "message"),
    [
        ({"format": 2}, TABLES, "no table rules of format 1"),
        ({"for": "torchrec"}, TABLES, "no table rules"),
        ({"tables": [{"name": "item"}]}, TABLES, "KeyError: 'answer'"),
        ({"tables": [entry("item", 61, 8, "node:x", "rows")]}, TABLES, "'item': home rule 'node:x'"),
        ({"tables": [entry("item", 61, 8, "all", "mean")]}, TABLES, "'item': answer 'mean'"),
        ({"tables": [entry("item", 61, 8, "all", "rows")]}, TABLES, "no table 'shop'"),
        ({"tables": [entry("item", 60, 8, "all", "rows")]}, TABLES, "'item' has 60 rows of 8, here 61 of 8"),
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
        entry("item", 61, 8, "node:0", "sums"),
        entry("shop", 17, 8, "every rank", "rows"),
        *document()["tables"][2:],
    ]
    one[2] |= {"homes": "rank:0"}
    file.write_text(json.dumps(document(*one, nodes=1, local_ranks=1)))
    bags = flexd.EmbeddingBagCollection(TABLES, rules=str(file), layout=RankLayout(1, 1))
    assert [(table.homes, table.answer) for table in bags.tables] == [
        ("node:0", "sums"), ("every rank", "rows"), ("rank:0", "rows"),
    ]  # fmt: skip
