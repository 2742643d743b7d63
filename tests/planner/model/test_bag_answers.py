"""Expected bytes of bags by rows and by sums against those of drawn bags, counted as real ranks send them."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.planner.model.bag_answers import (
    AnswerBytes,
    answer_bytes,
    choose_answers,
    home_shares,
    parts_of_bag,
)
from flexd.planner.model.row_bytes import Exchange
from flexd.planner.model.training_shape import TrainingShape
from flexd.simulate.byte_counter import StepByteCounter, StepPart, sent_bytes
from flexd.simulate.step_keys import StepPasses
from flexd.sketch.profile import Profile, TableProfile
from tests.support.bag_bytes import GRADIENTS, bytes_of_bags
from tests.support.planner_cases import cluster, zipf

ROWS, BAGS, STEPS = 3_000, 40, 12
KEYSPACE = KeySpace([TableSpec("item", ROWS, 16)])


def _shares(skew: float) -> np.ndarray:
    return zipf(ROWS, skew, 1.0)[np.random.default_rng(3).permutation(ROWS)]


def _profile(shares: np.ndarray, accesses: float, listed: int) -> Profile:
    hot = np.argsort(-shares)[:listed]
    rest = np.sort(np.delete(shares, hot))
    return Profile(
        (
            TableProfile(
                "item", ROWS, 1e6, accesses, hot, shares[hot], shares[hot], shares[hot],
                np.array([part.mean() for part in np.array_split(rest, 20)]) if len(rest) else np.empty(0),
                np.array([float(len(part)) for part in np.array_split(rest, 20)]) if len(rest) else np.empty(0),
                float(ROWS), 1.0,
            ),
        )
    )  # fmt: skip


def _counted(layout: RankLayout, shares: np.ndarray, lengths: np.ndarray, frozen: bool) -> np.ndarray:
    """Return float64[2, 2]: mean bytes of a rank and step without sizes, by answer and link."""
    rng = np.random.default_rng(5)
    total = np.zeros((2, 2))
    counter, none = StepByteCounter(KEYSPACE, layout), [np.empty(0, np.int64)] * layout.world_size

    def of_rows(keys: list[np.ndarray]) -> np.ndarray:
        step = StepPasses.of([keys], layout)
        return sent_bytes(counter.step(step, Placement.empty(), Exchange.CHAIN), layout.world_size)

    for _ in range(STEPS):
        bags = []
        for _ in range(layout.world_size):
            of_bags = rng.choice(lengths, BAGS)
            bags.append([(rng.choice(ROWS, int(of_bags.sum()), p=shares), of_bags)])
        rows = (of_rows([of_rank[0][0] for of_rank in bags]) - of_rows(none))[:, : StepPart.BACKWARD + (not frozen)]
        sums = bytes_of_bags(KEYSPACE, layout, bags, Exchange.CHAIN)[:, : GRADIENTS + (not frozen)]
        total += np.array([rows.sum(axis=(0, 1)), sums.sum(axis=(0, 1))]) / layout.world_size / STEPS
    return total


def _expected(
    layout: RankLayout, shares: np.ndarray, lengths: np.ndarray, listed: int, shape: TrainingShape
) -> AnswerBytes:
    accesses = BAGS * float(lengths.mean()) * layout.world_size
    made = answer_bytes(_profile(shares, accesses, listed), KEYSPACE, layout, {"item": lengths * 1.0}, shape)
    return made["item"]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("lengths", "skew", "listed"), [((4,), 0.9, ROWS), ((0, 2, 30), 1.2, 300)])
@pytest.mark.parametrize(("nodes", "local_ranks"), [(4, 2), (1, 4), (4, 1)])
def test_expected_bytes_are_those_of_drawn_bags(
    nodes: int, local_ranks: int, skew: float, listed: int, lengths: tuple[int, ...], frozen: bool
) -> None:
    layout, shares = RankLayout(nodes, local_ranks), _shares(skew)
    shape = TrainingShape(frozen_tables=frozenset({"item"}) if frozen else frozenset())
    counted = _counted(layout, shares, np.array(lengths), frozen)
    expected = _expected(layout, shares, np.array(lengths), listed, shape)
    assert expected.bags == pytest.approx(BAGS)
    np.testing.assert_allclose(expected.rows, counted[0], rtol=0.06)
    np.testing.assert_allclose(expected.sums, counted[1], rtol=0.06)


def test_shares_of_homes_sum_to_one_and_a_bag_has_no_more_parts_than_ids_or_places() -> None:
    layout = RankLayout(2, 4)
    shares = home_shares(_profile(_shares(1.2), 100.0, 50).tables[0], 0, KEYSPACE, layout)
    assert shares.sum() == pytest.approx(1.0)
    assert shares.max() > 1.5 * shares.min(), "hot rows are not spread evenly"
    assert parts_of_bag(shares, np.array([1.0])) == pytest.approx(1.0)
    assert parts_of_bag(shares, np.array([1000.0])) == pytest.approx(8.0)
    assert parts_of_bag(np.full(2, 0.5), np.array([0.0, 2.0])) == pytest.approx(0.75)


def test_the_answer_that_takes_less_time_is_better_if_it_pays_for_its_collectives() -> None:
    layout, shape = RankLayout(2, 2), TrainingShape(merged_backward=True)
    of_tables = {
        "long": AnswerBytes(10.0, np.array([1e6, 5e6]), np.array([1e6, 1e6])),
        "short": AnswerBytes(10.0, np.array([1e6, 1e6]), np.array([1e6, 5e6])),
    }
    answers = {"long": "rows", "short": "sums"}
    sent = np.full((3, 6, 3), 1e6)

    def better(latency: float) -> list[str]:
        machine = cluster(all_to_all=1e9, latency=latency)
        chosen = choose_answers(of_tables, answers, machine, sent, layout, shape)
        assert [(one.table, one.answer) for one in chosen] == [("long", "rows"), ("short", "sums")]
        assert chosen[0].rows_seconds == pytest.approx(5e6 / 1e9 + 1e6 / 100e9)
        assert chosen[0].sums_seconds == pytest.approx(1e6 / 1e9 + 1e6 / 100e9)
        return [one.better for one in chosen]

    # 4 ms are saved, and there are four more collectives on each of two hops.
    assert better(0.4e-3) == ["sums", "rows"]
    assert better(0.6e-3) == ["rows", "rows"]
