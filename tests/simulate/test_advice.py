"""Advice: predicted steps follow from the measured step, the prices and the bytes; it says "no gain expected" where
it must."""

import numpy as np
import pytest

from flexd.core.errors import ConfigError
from flexd.core.keyspace import TableSpec
from flexd.core.placement import RankLayout
from flexd.simulate.accesses import Accesses, zipf_accesses
from flexd.simulate.advice import OPTIONS, Advice, AdviceSettings, advise, reused_share
from flexd.simulate.simulation import DIRECT, ROW_WISE, TWO_HOP, Simulation, SimulationSettings, simulate
from flexd.topology.cluster import Cluster, CollectiveCurve, LinkModel

LAYOUT = RankLayout(2, 2)
ROW = TableSpec("rows", 1, 16, optimizer="rowwise_adagrad")


def cluster(inter_bytes_per_second: float, latency_seconds: float = 0.0) -> Cluster:
    def link(bytes_per_second: float) -> LinkModel:
        curve = CollectiveCurve(latency_seconds, ((1.0, bytes_per_second),))
        return LinkModel(bytes_per_second, curve, curve, curve)

    return Cluster("given", "test", link(1e10), link(inter_bytes_per_second))


def zipf(rows: int = 20_000, exponent: float = 1.05, seed: int = 0) -> Accesses:
    return zipf_accesses(
        LAYOUT, ROW, table_rows=rows, exponent=exponent, drift_rows=0.0, accesses_per_rank=2_000,
        steps=16, seed=seed,
    )  # fmt: skip


def replay() -> Simulation:
    """The replay that ``advice()`` predicts from."""
    return simulate(zipf(), LAYOUT, cluster(1e7), SimulationSettings(), (ROW_WISE, DIRECT, TWO_HOP))


def advice(step_seconds: float = 0.1, bytes_per_second: float = 1e7, **options: object) -> Advice:
    return advise(
        zipf(), LAYOUT, cluster(bytes_per_second), SimulationSettings(), AdviceSettings(step_seconds, **options)
    )  # type: ignore[arg-type]


def test_a_slow_network_is_worth_it_and_a_fast_one_is_not_here() -> None:
    slow, fast = advice(), advice(bytes_per_second=1e12)
    assert slow.best_option.saved_share.low > 0.02
    assert fast.best is None
    # Also where even a certain saving is too small to act on.
    small = advice(step_seconds=100.0)
    assert small.options["two_hops"].pays
    assert small.best is None


def test_a_step_is_computing_and_exchange() -> None:
    found = advice()
    for option in OPTIONS[1:3]:
        run = replay().runs[option.strategy.name]
        exchange = run.seconds[-4:].sum(axis=1).mean()
        expected = found.step_seconds - found.exchange_seconds + exchange
        assert found.options[option.name].step_seconds.expected == pytest.approx(expected)
    two_hops = found.options["two_hops"]
    assert two_hops.saved_seconds.expected == pytest.approx(0.1 - two_hops.step_seconds.expected)
    assert two_hops.gpu_hours_per_day.expected == pytest.approx(24 * 4 * two_hops.saved_share.expected)


def test_prefetch_pipeline_hides_behind_computing_only_and_only_rows_that_the_step_before_did_not_touch() -> None:
    much, none = advice(step_seconds=10.0), advice(step_seconds=advice().exchange_seconds * 1.000001)
    hidden = [
        found.options["two_hops"].step_seconds.expected
        - found.options["two_hops_prefetch_pipeline"].step_seconds.expected
        for found in (much, none)
    ]
    run = replay().runs["two_hop"]
    moved = run.seconds[-4:, :3].sum(axis=1).mean()
    assert hidden[0] == pytest.approx((1 - much.reused_share) * moved)
    assert hidden[1] == pytest.approx(0.0, abs=1e-6)


def test_the_range_holds_the_figure_and_widens_with_the_error_of_the_prices() -> None:
    widths = []
    for error in (0.0, 0.15, 0.5):
        found = advice(price_error=error).options["two_hops"].saved_seconds
        assert found.low <= found.expected <= found.high
        widths.append(found.high - found.low)
    assert widths[0] < widths[1] < widths[2]
    assert widths[0] > 0, "steps differ"


def test_the_reused_share_is_that_of_the_rows_of_two_steps() -> None:
    class Two:
        name, steps, micro_batches = "two", 2, 1

        def passes(self, step: int) -> list[tuple[np.ndarray, ...]]:
            return [((np.array([1, 2, 2]), np.array([3])), (np.array([2, 3, 9, 9]), np.array([7, 8])))[step]]

    # Of the first rank's rows 2, 3 and 9 two were touched; of the second's none.
    assert reused_share(Two(), slice(1, 2)) == pytest.approx((2 / 3 + 0) / 2)  # type: ignore[arg-type]

    class OfTwoPasses(Two):
        micro_batches = 2

        def passes(self, step: int) -> list[tuple[np.ndarray, ...]]:
            return [*super().passes(step), (np.array([2]), np.array([3]))]

    # Only the first pass of a step finds rows that the step before has changed, in either of its passes.
    assert reused_share(OfTwoPasses(), slice(1, 2)) == pytest.approx((2 / 3 + 0) / 2 / 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"step_seconds": 0.0}, {"step_seconds": float("nan")}, {"price_error": 1.0}, {"worth": 1.0}, {"scale": 0.0}],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        advice(**wrong)


def test_measured_computing_corrects_the_prices() -> None:
    given, computing = advice(step_seconds=1.0), 0.25
    found = advice(step_seconds=1.0, computing_seconds=computing)
    assert found.exchange_seconds == pytest.approx(0.75)
    factor = found.price_correction
    assert factor == pytest.approx(0.75 / given.exchange_seconds)
    run = replay().runs["two_hop"]
    assert found.options["two_hops"].step_seconds.expected == pytest.approx(
        computing + factor * run.seconds[-4:].sum(axis=1).mean()
    )
    with pytest.raises(ConfigError, match="computing 1"):
        advice(step_seconds=1.0, computing_seconds=1.0)


@pytest.mark.parametrize("computing_seconds", [None, 0.01])
def test_one_rank_is_refused(computing_seconds: float | None) -> None:
    with pytest.raises(ConfigError, match="one rank exchanges no rows"):
        advise(
            zipf(), RankLayout(1, 1), cluster(1e7), SimulationSettings(), AdviceSettings(0.1, computing_seconds)
        )  # fmt: skip


def test_prefetch_pipeline_hides_nothing_behind_the_work_on_rows() -> None:
    free, some, none = (
        advice(step_seconds=1.0, computing_seconds=0.5, row_work_seconds=work).options for work in (0, 0.498, 0.5)
    )
    exposed = [one["dedup_prefetch_pipeline"].step_seconds.expected for one in (free, some, none)]
    assert exposed[0] < exposed[1] < exposed[2]
    assert exposed[2] == pytest.approx(none["dedup"].step_seconds.expected)
    assert exposed[2] - exposed[1] == pytest.approx(0.002, rel=1e-6)
    assert free["dedup"].step_seconds == none["dedup"].step_seconds
    with pytest.raises(ConfigError, match="row work"):
        advice(step_seconds=1.0, row_work_seconds=1.0)
