"""The planner's input: the configuration, what the trainer says of itself, and prices as reports correct them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.api.planning import prices_status
from flexd.config.sections import PlannerConfig
from flexd.control.protocol.report import (
    PHASE_QUANTITIES,
    PhaseReport,
    PhasesReport,
    StepReport,
    TrainerSettings,
    UsedExchange,
)
from flexd.core.keyspace import TableSpec
from flexd.core.placement import RankLayout, Tier
from flexd.core.step_phases import StepPhase
from flexd.operations.live_plan import MIN_STEPS, LivePrices, TrainingJob, plan_limits, price_samples, priced_by
from flexd.operations.training_monitor import TrainingMonitor
from flexd.planner.model.prices import MIN_REPORTS, Exchange
from flexd.topology.cluster import Collective, Exposed, Link, WorldModel
from tests.support.components import report
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.planner_cases import cluster, flat
from tests.support.planning_harness import filled_harness

TABLES = [TableSpec(name, 10, 4) for name in "abc"]
TOLD = TrainerSettings("direct", "float16", "o-r", "-r-")


def test_every_setting_is_passed_on() -> None:
    settings = PlannerConfig.model_validate(
        {
            "exclude_tables": ["b"],
            "pins": [{"table": "c", "tier": "NODE"}, {"table": "d", "tier": "DEVICE", "rows": [3, 1]}],
        }
    )
    job = TrainingJob.of(TOLD, TABLES, 4)
    limits, shape = plan_limits(settings, job), job.shape
    assert (shape.micro_batches, shape.comm_dtype, shape.frozen_tables) == (4, "float16", {"b"})
    assert job.exchange is Exchange.DIRECT_DEDUP
    assert job.uncopied == {"a"}
    assert limits.exclude_tables == {"a", "b"}, "no row of a table that is pooled at the owner is copied"
    whole, rows = limits.pins
    assert (whole.table, whole.tier, whole.rows) == ("c", Tier.NODE, None)
    assert (rows.table, rows.tier) == ("d", Tier.DEVICE)
    np.testing.assert_array_equal(rows.rows, [3, 1])


def test_rows_of_unbounded_ids_are_copied_where_rows_are_counted_and_not_ids() -> None:
    trainer = TrainerSettings("chain", unbounded="-u-")
    assert trainer.fits(3)
    assert not trainer.fits(4)
    assert TrainingJob.of(trainer, TABLES).uncopied == set()
    assert TrainingJob.of(trainer, TABLES, counts_rows=False).uncopied == {"b"}


def test_a_trainer_that_says_nothing_or_what_is_not_known_has_the_defaults() -> None:
    assert TrainingJob.of(None, TABLES) == TrainingJob()
    assert TrainingJob.of(TrainerSettings("chain", "float8"), TABLES) == TrainingJob()
    assert TrainingJob.of(TrainerSettings("auto"), TABLES) == TrainingJob(chooses_exchange=True)


def test_plans_for_a_trainer_that_chooses_are_for_the_exchange_that_it_has_measured() -> None:
    training = TrainingMonitor()
    for reason, exchange in (("trial", Exchange.CHAIN), ("measured", Exchange.DIRECT_DEDUP)):
        training.add(1, report(0))
        training.add(0, replace(report(0), exchange=UsedExchange("direct", reason)))
        assert TrainingJob.of(TrainerSettings("auto"), TABLES, 1, training.measured_exchange()).exchange is exchange
    assert TrainingJob.of(TrainerSettings("chain"), TABLES, 1, "direct").exchange is Exchange.CHAIN


MACHINE = cluster(all_to_all=1e9, all_reduce=2e9, intra=10e9, latency=1e-4)
MEGABYTES = {"ids": 0.1, "rows": 4.0, "push": 4.0}


def prices_of(coordinator: FakeCoordinator, training: TrainingMonitor | None = None) -> LivePrices:
    return LivePrices(MACHINE, training or TrainingMonitor(), coordinator)


def step_report(factor: float, *, steps: int = 10, exchange: str = "chain", intra: float = 1.0) -> StepReport:
    """Steps of 0.5 s in which all collectives between nodes take ``factor`` times what the curve says."""
    phases = [
        PhaseReport(
            name,
            inter_seconds=steps * factor * (1e-4 * (2 if name == "ids" else 1) + size * 1e6 / 1e9),
            inter_bytes=int(steps * size * 1e6), inter_collectives=steps * (2 if name == "ids" else 1),
            intra_seconds=steps * intra * (1e-4 + size * 1e6 / 10e9), intra_bytes=int(steps * size * 1e6),
            intra_collectives=steps,
        )
        for name, size in MEGABYTES.items()
    ]  # fmt: skip
    return replace(report(1, steps=steps), phases=PhasesReport(tuple(phases), steps), exchange=UsedExchange(exchange))


def teach(prices: LivePrices, factor: float, times: int = 2 * MIN_REPORTS, world: int = 4, **more: Any) -> None:
    for _ in range(times):
        for rank in range(world):
            prices.add(rank, step_report(factor, **more))


def test_corrected_prices_are_used_once_they_predict_better() -> None:
    prices = prices_of(FakeCoordinator())
    teach(prices, 3.0, MIN_REPORTS - 1)
    assert prices.cluster is MACHINE
    teach(prices, 3.0, 20)
    corrected = prices.cluster
    for collective in Collective:
        before, after = (of.curve(Link.INTER_NODE, collective) for of in (MACHINE, corrected))
        assert after.seconds(1e6) == pytest.approx(3 * before.seconds(1e6), rel=0.1)
    assert corrected.intra_node == MACHINE.intra_node, "the curve holds there"
    assert corrected.name.startswith("test (corrected: between nodes x2.")
    assert MACHINE.name == "test"


def test_all_ranks_and_enough_steps_are_needed() -> None:
    prices = prices_of(FakeCoordinator())
    for _ in range(50):
        for rank in range(3):
            prices.add(rank, step_report(3.0))
    assert prices.corrections() == {}
    prices.add(3, step_report(3.0, steps=MIN_STEPS - 1))
    assert prices.corrections() == {}
    prices.add(3, step_report(3.0, steps=1))
    assert prices.corrections()[Link.INTER_NODE].reports == 1
    short = replace(step_report(3.0), step_seconds=0.01)
    for rank in range(4):
        prices.add(rank, short)
    assert prices.corrections()[Link.INTER_NODE].reports == 1, "less than a second of training"


def test_the_status_says_what_was_learnt_and_why() -> None:
    prices = prices_of(FakeCoordinator())
    assert prices_status(prices).links == ()
    teach(prices, 3.0, 40)
    status = prices_status(prices)
    by_link = {link.link: link for link in status.links}
    across, inside = by_link["inter_node"], by_link["intra_node"]
    assert (across.reports, across.factor) == (40, pytest.approx(3.0, rel=0.1))
    assert inside.factor == 1.0
    assert across.probed_error == pytest.approx(2 / 3, rel=0.01)
    assert across.corrected_error == pytest.approx(0.03, abs=0.03)
    assert "as probed 67%" in across.reason
    samples = {
        (family.name, *sample.labels.values()): sample.value for family in status.metrics() for sample in family.samples
    }
    assert samples["flexd_price_factor", "inter_node"] == across.factor
    assert samples["flexd_price_error", "inter_node", "probed"] == across.probed_error


LAYOUT = RankLayout(2, 2)


ROWS = np.zeros((4, len(StepPhase), len(PHASE_QUANTITIES)))
"""The quantities of one phase by rank."""
for quantity, by_rank in {
    "inter_seconds": [0.5, 0.2, 0.1, 0.6], "inter_bytes": [4e6, 1e6, 2e6, 3e6], "inter_collectives": [1] * 4,
    "intra_seconds": [0.02, 0.03, 0.05, 0.04], "intra_bytes": [1e6, 2e6, 3e6, 3e6], "intra_collectives": [1] * 4,
}.items():  # fmt: skip
    ROWS[:, list(StepPhase).index(StepPhase.ROWS), PHASE_QUANTITIES.index(quantity)] = by_rank


def test_a_collective_takes_as_long_as_for_the_rank_that_waits_least() -> None:
    found = price_samples(ROWS, LAYOUT, MACHINE, "chain")
    # Rails are ranks 0, 2 and 1, 3; the busiest of each sends 4 and 3 MB. Nodes are ranks 0, 1 and 2, 3.
    assert found[Link.INTER_NODE] == pytest.approx((1e-4 + 3.5e6 / 1e9, (0.1 + 0.2) / 2))
    assert found[Link.INTRA_NODE] == pytest.approx((1e-4 + 2.5e6 / 10e9, (0.02 + 0.04) / 2))
    assert set(price_samples(ROWS[:2], RankLayout(2, 1), MACHINE, "chain")) == {Link.INTER_NODE}
    assert set(price_samples(ROWS, RankLayout(1, 4), MACHINE, "chain")) == {Link.INTRA_NODE}


def test_a_direct_exchange_shows_the_world() -> None:
    with_world = replace(MACHINE, world=WorldModel(2, 2, flat(0.5e9, 3e-4)))
    assert price_samples(ROWS, LAYOUT, with_world, "direct") == {
        Link.INTER_NODE: pytest.approx((3e-4 + 4e6 / 0.5e9, 0.1))
    }
    assert price_samples(ROWS, LAYOUT, MACHINE, "direct")[Link.INTER_NODE][0] == pytest.approx(1e-4 + 4e6 / 1e9)
    assert price_samples(ROWS, RankLayout(1, 4), MACHINE, "direct")[Link.INTRA_NODE][1] == pytest.approx(0.02)


def add(
    training: TrainingMonitor, rows: float, push: float, cover: float, *, overlapped: float = 1.0, steps: int = 10
) -> TrainingMonitor:
    phases = (
        PhaseReport("rows", inter_seconds=steps * rows, overlapped_seconds=steps * rows * overlapped),
        PhaseReport("push", inter_seconds=steps * push),
    )
    for rank in range(2):
        training.add(rank, replace(report(1), phases=PhasesReport(phases, steps, steps * cover)))
    return training


def test_shares_and_cover_are_what_ranks_measured() -> None:
    exposed = prices_of(FakeCoordinator(), add(TrainingMonitor(), 0.3, 0.1, 0.2, overlapped=0.75)).exposed()
    assert (exposed.forward, exposed.backward) == (pytest.approx(0.25), 1.0)
    assert exposed.sync == pytest.approx(1 - 0.75 * 0.3 / 0.4), "no replicas yet: as the whole"
    assert exposed.cover_seconds == pytest.approx(0.2)
    machine = cluster(exposed=Exposed(1.0, 0.5, 0.5))
    priced = priced_by(machine, exposed)
    assert priced.exposed == exposed
    assert (
        priced.name == f"{machine.name} (measured: outside compute forward 0.25, backward 1.00, sync 0.44; "
        "200 ms cover the rest)"
    )


def test_noise_does_not_change_prices() -> None:
    training = add(TrainingMonitor(), 0.3, 0.1, 0.2)
    prices = prices_of(FakeCoordinator(), training)
    first = prices.exposed()
    add(training, 0.3, 0.1, 0.205, overlapped=0.98, steps=50)
    assert prices.exposed() is first
    add(training, 0.3, 0.1, 0.1, overlapped=1.0, steps=50)
    assert prices.exposed().cover_seconds == pytest.approx(0.1)


def test_plans_use_the_measured_exposure(tmp_path: Path) -> None:
    """Ranks that report everything beside long compute get a plan that moves nothing."""
    harness = filled_harness(tmp_path)
    assert harness.propose("before reports").plan.promotions > 0
    phases = tuple(
        PhaseReport(name, inter_seconds=1.0, overlapped_seconds=1.0) for name in ("ids", "rows", "push", "sync")
    )
    for rank in range(4):
        harness.training.add(rank, replace(report(2, tiers=(200_000, 0, 0)), phases=PhasesReport(phases, 1, 1000.0)))
    plan = harness.propose("after them").plan
    assert (plan.promotions, plan.costs.before.exposed_seconds) == (0, 0)
    assert "1e+06 ms cover the rest" in plan.costs.cluster.name
    assert math.isfinite(plan.costs.cluster.exposed.cover_seconds)
