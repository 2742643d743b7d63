"""Advice from a list of tables: what it predicts is what its plans are priced at."""

from __future__ import annotations

import math

import pytest

from flexd.core.errors import ConfigError, PlanError
from flexd.core.layout import RankLayout
from flexd.planner.tables.sharding import listed_seconds, shard_tables
from flexd.planner.tables.table_list import ListedTable
from flexd.simulate.table_advice import advise_on_tables
from flexd.topology.files import load_preset

LAYOUT = RankLayout(2, 2)
CLUSTER = load_preset("azure-a100-200g")
MEMORY = 4e9


def tables(sharding: str = "", ranks: tuple[int, ...] = ()) -> list[ListedTable]:
    return [
        ListedTable(f"t{i}", 200_000, 64, 20.0 * (i + 1), float(i % 2), 2048, math.nan, sharding, 1, ranks)
        for i in range(5)
    ]


def test_embeddings_are_priced_as_the_plans_are():
    listed = tables("TW", (2,))
    found = advise_on_tables(listed, LAYOUT, CLUSTER, MEMORY, step_seconds=1.0)
    assert found.now == "listed"
    assert found.predictions["listed"].embedding_seconds == listed_seconds(listed, LAYOUT, CLUSTER)
    sharded = shard_tables(listed, LAYOUT, CLUSTER, MEMORY).placement
    assert found.predictions["planned"].embedding_seconds == pytest.approx(sharded.seconds)
    assert found.predictions["row_wise"].embedding_seconds == pytest.approx(sharded.spread_seconds)
    for one in found.predictions.values():
        assert one.saved_seconds.expected == pytest.approx(found.embedding_seconds - one.embedding_seconds)
        assert one.step_seconds.expected + one.saved_seconds.expected == pytest.approx(1.0)
    assert found.predictions["homes_and_answers"].memory_bytes <= MEMORY


def test_a_measured_computing_time_gives_the_rest_of_the_step_to_todays_embeddings():
    found = advise_on_tables(tables(), LAYOUT, CLUSTER, MEMORY, step_seconds=1.0, computing_seconds=0.25)
    assert found.now == "row_wise"
    assert found.embedding_seconds == pytest.approx(0.75)
    row_wise, chain = found.predictions["row_wise"], found.predictions["two_hops"]
    left = 0.25 + 0.75 * chain.embedding_seconds / row_wise.embedding_seconds
    assert chain.step_seconds.expected == pytest.approx(left)
    assert row_wise.saved_seconds.high == 0


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="one rank"):
        advise_on_tables(tables(), RankLayout(1, 1), CLUSTER, MEMORY, step_seconds=1.0)
    with pytest.raises(ConfigError, match="computing"):
        advise_on_tables(tables(), LAYOUT, CLUSTER, MEMORY, step_seconds=1.0, computing_seconds=2.0)
    with pytest.raises(PlanError, match="rank 7 of 4"):
        advise_on_tables(tables("TW", (7,)), LAYOUT, CLUSTER, MEMORY, step_seconds=1.0)
