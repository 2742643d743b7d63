"""Invariants 1-3 for any combination: optimizers, exchanges and changes between them, sums, dtypes, passes, layouts,
prefetch pipeline, uneven loaders, evaluation, migrations, kills and reloads, rows in tiered storage, sharding types,
bags answered by rows and by sums, factors of rows, optimizers and rates by table, tables that are read only, frozen
and unfrozen, rows of int8, values that are loaded, and the kernels of an accelerator.

``FLEXD_EXACTNESS_EXAMPLES`` sets the number of combinations.
"""

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.exactness import Scenario, check_training
from tests.support.prefetch_pipeline_jobs import Loop, on_accelerator, train
from tests.support.rank_pool import Ranks

OPTIMIZERS = ["sgd", "sgd_decay", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam", "dense_adam"]
KINDS = {"sgd_decay": "sgd", "dense_adam": "adam"}
"""Names of other rules that have the same optimizer state."""

pooling_at = st.sampled_from(
    [None, None, ("requester", "requester"), ("owner", "owner"), ("owner", "requester"), ("requester", "owner")]
)
sharding_types = st.sampled_from(
    ["row_wise", "row_wise", "table_row_wise:0", "table_row_wise:1", "table_wise:1", "table_wise:2", "data_parallel"]
)
read_only = st.sampled_from([(), (), ("item",), ("shop",), ("item", "shop")])
turns = st.one_of(
    st.just(()),
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([("item",), ("shop",), ("item", "shop")])),
        min_size=1, max_size=3, unique_by=lambda turn: turn[0],
    ).map(tuple),
)  # fmt: skip
loads = st.lists(
    st.sampled_from([("item", 0, 61), ("item", 7, 20), ("shop", 0, 17), ("shop", 3, 1)]).flatmap(
        lambda part: st.tuples(st.integers(0, 9), *map(st.just, part))
    ),
    max_size=2,
).map(tuple)
unbounded = st.sampled_from([(), (), (("item", 1),), (("shop", 2),), (("item", 2), ("shop", 1))])
homes = st.one_of(st.just(("row_wise", "row_wise")), st.tuples(sharding_types, sharding_types))
scenarios = st.builds(
    Scenario,
    nodes=st.sampled_from([1, 2]),
    local_ranks=st.sampled_from([1, 2]),
    optimizer=st.sampled_from(OPTIMIZERS),
    exchange=st.sampled_from(["chain", "direct", "auto"]),
    steps=st.just(10),
    seed=st.integers(0, 100_000),
    slots_share=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    migrate_every=st.sampled_from([1, 2, 5]),
    two_dims=st.booleans(),
    passes=st.sampled_from([1, 3]),
    gamma=st.sampled_from([1.0, 0.9]),
    average_gradients=st.booleans(),
    idle_rank=st.sampled_from([-1, 0]),
    only_rail=st.sampled_from([-1, -1, 0]),
    switch_every=st.sampled_from([0, 0, 2, 3]),
    comm_dtype=st.sampled_from([None, None, None, "float32", (None, "float32")]),
    second_dtype=st.sampled_from(["", "", "", "float32"]),
    second_rate=st.sampled_from([1.0, 1.0, 0.25]),
    fast_memory_bytes=st.sampled_from([None, None, 1, 1_500, 10_000]),
    slow_file=st.booleans(),
    divide_every=st.sampled_from([0, 1, 3]),
    pooling_at=pooling_at,
    homes=homes,
    second_optimizer=st.sampled_from(["", "", "sgd", "rowwise_adagrad", "adam", "dense_adam"]),
    mixed=st.booleans(),
    moved=st.booleans(),
    weighted=st.booleans(),
    uneven=st.booleans(),
    read_only=read_only,
    quantized=st.booleans(),
    turns=turns,
    loads=loads,
    unbounded=unbounded,
)
three_nodes = st.builds(
    Scenario,
    nodes=st.just(3),
    local_ranks=st.just(2),
    optimizer=st.sampled_from(OPTIMIZERS),
    steps=st.just(10),
    seed=st.integers(0, 100_000),
    migrate_every=st.sampled_from([1, 2]),
    passes=st.sampled_from([1, 3]),
    two_dims=st.booleans(),
    pooling_at=pooling_at,
    homes=homes,
    mixed=st.booleans(),
    moved=st.booleans(),
    weighted=st.booleans(),
    uneven=st.booleans(),
    read_only=read_only,
    quantized=st.booleans(),
    turns=turns,
    loads=loads,
    unbounded=unbounded,
)
BAGS = Scenario(2, 2, pooling_at=("owner", "requester"), weighted=True, switch_every=3, slots_share=1.0, steps=8)
"""Of bags with factors, which are drawn too."""
UNBOUNDED = Scenario(2, 2, unbounded=(("item", 1), ("shop", 2)), passes=3, slots_share=0.3, migrate_every=1, moved=True)
LOOP = {"evaluate_every": 0, "loops": 1, "depth": 0, "restarts": False, "changes": ""}


EXAMPLES = int(os.environ.get("FLEXD_EXACTNESS_EXAMPLES", "8"))


@pytest.mark.timeout(240 + 10 * EXAMPLES)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    scenario=st.one_of(scenarios, scenarios, scenarios, three_nodes),
    ahead=st.booleans(),
    evaluate_every=st.sampled_from([0, 2]),
    loops=st.sampled_from([1, 2]),
    accelerator=st.booleans(),
    depth=st.sampled_from([0, 0, 1, 2, 3, 4]),
    restarts=st.booleans(),
    changes=st.sampled_from(["", "any"]),
)
@example(scenario=BAGS, ahead=True, accelerator=False, **LOOP)
@example(scenario=replace(BAGS, exchange="direct"), ahead=False, accelerator=True, **LOOP)
@example(scenario=UNBOUNDED, ahead=True, accelerator=False, **LOOP)
@example(scenario=replace(UNBOUNDED, passes=1), ahead=True, accelerator=True, **LOOP | {"changes": "any"})
@example(scenario=replace(UNBOUNDED, passes=1), ahead=True, accelerator=False, **LOOP | {"changes": "any", "depth": 1})
@example(
    scenario=replace(BAGS, unbounded=UNBOUNDED.unbounded, optimizer="adagrad", fast_memory_bytes=1500),
    ahead=True, accelerator=False, **LOOP | {"loops": 2, "restarts": True},
)  # fmt: skip
def test_any_training_equals_one_process(
    ranks: Ranks,
    scenario: Scenario,
    ahead: bool,
    evaluate_every: int,
    loops: int,
    accelerator: bool,
    depth: int,
    restarts: bool,
    changes: str,
) -> None:
    """``accelerator``: with the kernels for tensors that are not in host memory. ``changes``: batches are changed after
    they were announced, on each rank in ways of its own."""
    kinds = {KINDS.get(name, name) for name in (scenario.optimizer, scenario.second_optimizer)}
    if len(kinds) == 1:  # of one kind, tables differ in their rates alone
        scenario = replace(scenario, second_optimizer="")
    if "dense_adam" in (scenario.optimizer, scenario.second_optimizer):  # refuses tiered storage
        scenario = replace(scenario, fast_memory_bytes=None)
    if scenario.uneven:
        loops = 1
    summed = scenario.quantized and scenario.read_only and scenario.pooled  # rows of float32 are
    tolerance = 1e-4 if scenario.comm_dtype or scenario.second_dtype or summed else 1e-9
    loop = Loop(
        ahead=ahead, evaluate_every=evaluate_every, loops=loops if ahead or restarts else 1, depth=depth,
        restarts=restarts, changes=changes,
    )  # fmt: skip
    job = (on_accelerator, train) if accelerator else (train,)
    results = ranks(scenario.layout.world_size).run(*job, scenario, loop)
    # Where every look-up is a step, the tuner proposes its own arm before the other one is agreed.
    if scenario.switch_every and all(len(scenario.frozen_at(step)) < 2 for step in range(scenario.steps)):
        assert set(results[0]["exchanges"]) == {"chain", "direct"}, "the exchange must really change"
    check_training(results, scenario, tolerance)
