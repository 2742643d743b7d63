"""Translation of the planner section of the configuration into settings of the planner."""

from __future__ import annotations

from flexd.config.planner import PlannerConfig
from flexd.control.protocol.trainer_settings import TrainerSettings, with_answers
from flexd.core.keyspace import TableSpec
from flexd.operations.plan_settings import (
    contradictions,
    plan_limits,
    running_exchange,
    settings_of_job,
    training_shape,
)
from flexd.planner.model.row_bytes import Exchange

TABLES = [TableSpec(name, 10, 4) for name in "abc"]
TOLD = with_answers(TrainerSettings("direct", "float16", "home"), TABLES, {"a": "sums", "c": "rows"})


def test_what_the_trainer_says_need_not_be_configured() -> None:
    settings = PlannerConfig(micro_batches=4)
    of_job = settings_of_job(settings, TOLD, TABLES)
    shape = training_shape(of_job)
    assert (shape.comm_dtype, shape.replica_sums, shape.micro_batches) == ("float16", "home", 4)
    assert running_exchange(of_job) is Exchange.DIRECT_DEDUP
    assert of_job.pooled_tables == {"a": "sums", "c": "rows"}
    assert plan_limits(of_job).exclude_tables == {"a"}
    assert contradictions(settings, TOLD, TABLES) == ()


def test_a_trainer_that_says_nothing_or_what_is_not_known_leaves_the_configuration() -> None:
    settings = PlannerConfig(exchange="direct_no_dedup", comm_dtype="bfloat16", replica_sums="home")
    assert settings_of_job(settings, None, TABLES) is settings
    later = TrainerSettings("auto", "float8", "everywhere")
    of_job = settings_of_job(settings, later, TABLES)
    assert of_job == settings
    assert contradictions(settings, None, TABLES) == contradictions(settings, later, TABLES) == ()


def test_what_is_configured_otherwise_is_named_with_both_values_and_does_not_count() -> None:
    settings = PlannerConfig(
        exchange="chain", comm_dtype="bfloat16", replica_sums="home", pooled_tables={"a": "rows", "b": "sums"}
    )
    assert contradictions(settings, TOLD, TABLES) == (
        "planner.pooled_tables.a is 'rows', and the trainer has 'sums', which counts: remove the key",
        "planner.pooled_tables.b is 'sums', and the trainer has a table without pooling, which counts: remove the key",
        "planner.exchange is 'chain', and the trainer has 'direct', which counts: remove the key",
        "planner.comm_dtype is 'bfloat16', and the trainer has 'float16', which counts: remove the key",
    )
    assert settings_of_job(settings, TOLD, TABLES).comm_dtype == "float16"
    (stored,) = contradictions(PlannerConfig(comm_dtype="float16"), TrainerSettings(), TABLES)
    assert stored.startswith("planner.comm_dtype is 'float16', and the trainer has the tables' own dtype")
