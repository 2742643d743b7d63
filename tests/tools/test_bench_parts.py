"""Parts of the benchmarks: settled plans and intervals, accesses and samples of traces, bounds, tables larger than
memory, RecShard's split; figures by path, and medians of runs."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools.bench.cases.advise import batch_accesses
from tools.bench.cases.affinity import trace_samples
from tools.bench.cases.verify import has_settled, interval
from tools.bench.harness import flat, in_turns, of_runs
from tools.bench.peers.recshard import place_and_split
from tools.bench.programs.memory import Flexd, Tensors, batches
from tools.bench.workloads import Setting, batches_of, bound_bytes, flexshard_tiers, keys_of


def status(
    plans: dict[str, int], verification: str | None = None, migration: str | None = None, of: str = "p-1"
) -> dict[str, Any]:
    newest = {"state": verification, "migration_id": "p-1", "rolled_back": verification == "slower"}
    return {
        "planning": {"plans": plans, "verification": {"newest": None if verification is None else newest}},
        "migration": None if migration is None else {"state": migration, "migration_id": of},
    }


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ({}, False),
        (status({"refused": 9}), False),
        (status({"unchanged": 1}), False),
        (status({"unchanged": 1, "withheld": 1}), True),
        (status({"changed": 1}, None, "pushing"), False),
        (status({"changed": 1}, None, "committed"), False),
        (status({"changed": 1}, "running", "committed"), False),
        (status({"changed": 1}, "slower", "applying"), False),
        (status({"changed": 1}, "slower", "committed", "p-1.rollback"), True),
        (status({"changed": 1}, "slower", "committed", "p-1.verify-3"), False),
        (status({"changed": 2}, "slower", "committed", "p-2"), False),
        (status({"changed": 2}, "faster", "committed", "p-10"), False),
        (status({"changed": 1, "unchanged": 2}, "faster", "committed"), True),
    ],
)
def test_a_decision_is_a_verdict_or_twice_nothing_to_move(given: dict[str, Any], settled: bool) -> None:
    assert has_settled(given) is settled


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    for count in (9, 15):
        found = [interval(rng.normal(1.0, 0.1, count).tolist()) for _ in range(2_000)]
        covered = np.mean([low <= 1.0 <= high for low, high in found])
        assert 0.94 <= covered <= 0.995, (count, covered)
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


SETTING_OF_BATCHES = Setting(rows=4_000, dim=16, samples=16, length=10, batches=8)


def test_the_accesses_are_the_batches_of_each_rank() -> None:
    accesses = batch_accesses(SETTING_OF_BATCHES)
    assert accesses.steps == 8
    for rank, keys in enumerate(accesses.passes(3)[0]):
        assert (keys == keys_of(SETTING_OF_BATCHES, batches_of(SETTING_OF_BATCHES, rank)[3])).all()


def test_pieces_of_users_do_not_overlap_and_are_in_order_of_their_last_event(tmp_path: Path) -> None:
    user = np.resize(np.array([1, 0, 2]), 320)
    np.savez(tmp_path / "shop.npz", row=np.arange(320), user=user, table_rows=np.array([320]))
    samples = trace_samples(tmp_path / "shop.npz")
    assert samples.lengths.tolist() == [32] * 9
    rows = np.split(samples.keys[samples.rows], samples.offsets[1:-1])
    assert all(len(np.unique(user[each])) == 1 for each in rows)
    assert len(np.unique(np.concatenate(rows))) == 9 * 32
    assert (np.diff([each.max() for each in rows]) > 0).all()


SMALL = Setting(nodes=3, local_ranks=2, rows=120, dim=8, tables=4, samples=5, length=6, batches=3)


def test_the_bound_counts_rows_that_a_node_touches_and_does_not_home() -> None:
    far = 0
    for step in range(3):
        of_rank = [set(keys_of(SMALL, batches_of(SMALL, rank)[step]).tolist()) for rank in range(6)]
        for node in range(3):
            far += len({key for key in of_rank[2 * node] | of_rank[2 * node + 1] if (key % 6) // 2 != node})
    assert bound_bytes(SMALL) == pytest.approx(far / 3 * 2 * 8 * 4)


def test_tiers_of_flexshard_fill_the_slots_with_the_hottest_rows() -> None:
    setting = replace(SMALL, rows=1200, replica_fraction=0.05)
    tiers = flexshard_tiers(setting)
    assert setting.layout.replica_slots_used(tiers.keys, tiers.tiers).tolist() == [60] * 6
    # Key = table * 300 + row; the row is drawn as row * 4 + table.
    share = setting.share().reshape(300, 4).T.ravel()
    for home in range(6):
        mine = np.arange(home, 1200, 6)
        copied = np.isin(mine, tiers.keys)
        assert share[mine[copied]].min() >= share[mine[~copied]].max()


SETTING = {"rows": 3_000, "dim": 8, "ids": 500, "fast_bytes": 40_000}


@pytest.mark.parametrize("ahead", [False, True])
def test_all_ways_train_the_same(tmp_path: Path, ahead: bool) -> None:
    mapped = Tensors(SETTING, tmp_path)
    (tmp_path / "rows").mkdir()
    held = Flexd(SETTING, tmp_path / "rows", ahead=ahead)
    drawn = batches(3_000, 500, 1.05, seed=3)
    given = [next(drawn) for _ in range(4)]
    for ids in given:
        held.step(ids)
    for ids in given[: 3 if ahead else 4]:  # the last one is still to come
        mapped.step(ids)
    figures = held.figures()
    assert 0 < figures["cache_slots"] < 3_000
    assert figures["missed"] > 0
    assert torch.allclose(held._collection.gather_table("item"), mapped._rows, rtol=1e-5)
    assert not torch.equal(mapped._rows, torch.ones(3_000, 8))
    held.close()


ROWS = np.array([0.0, 1.0, 4.0, 16.0])
"""Fast bytes by split: convex, as the inverse of a CDF is."""


def problem(tables: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    fast = rng.uniform(0.5, 2.0, tables)[:, None] * ROWS
    return rng.pareto(1.0, tables)[:, None] * np.linspace(1.0, 0.02, len(ROWS)), fast


@pytest.mark.parametrize("room", [2.0, 8.0, 30.0])
def test_greedy_is_near_the_best_of_all(room: float) -> None:
    over = []
    for seed in range(8):
        seconds, fast = problem(4, seed)
        best = np.inf
        for rank in product(range(2), repeat=4):
            for split in product(range(len(ROWS)), repeat=4):
                at = (np.arange(4), np.array(split))
                load, used = (np.bincount(rank, weights=values[at], minlength=2) for values in (seconds, fast))
                if used.max() <= room:
                    best = min(best, load.max())
        found = place_and_split(seconds, fast, 2, room)
        at = (np.arange(4), found[1])
        assert np.bincount(found[0], weights=fast[at], minlength=2).max() <= room
        over.append(np.bincount(found[0], weights=seconds[at], minlength=2).max() / best)
    assert min(over) >= 1 - 1e-9
    assert np.mean(over) < 1.1


def test_figures_are_named_by_their_path_and_lists_by_what_tells_them_apart() -> None:
    nested = {
        "a": {"b": 1, "text": "no number", "none": None},
        "rows": [{"name": "x", "v": 2.5}, {"tables": 3}, [True]],
    }
    assert flat(nested) == {"a/b": 1.0, "rows/x/v": 2.5, "rows/tables 3/tables": 3.0, "rows/2/0": 1.0}


def test_runs_become_medians_with_their_spread() -> None:
    def answer(step: float) -> dict[str, Any]:
        return {"chain": {"step_seconds": step, "bytes": 7}, "name": "t"}

    whole = of_runs([answer(0.3), answer(0.1), answer(0.2)], ("step_seconds",))
    assert whole == {"chain": {"step_seconds": 0.2, "step_seconds_spread": [0.1, 0.3], "bytes": 7}, "name": "t"}
    assert "step_seconds_spread" not in of_runs([answer(0.3)], ("step_seconds",))["chain"]
    with pytest.raises(ValueError, match=r"runs differ: .*other"):
        of_runs([answer(0.3), answer(0.3) | {"other": 1}])
    with pytest.raises(ValueError, match="no run"):
        of_runs([])


def test_turns_alternate_and_the_first_do_not_count() -> None:
    order: list[str] = []

    def one(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = in_turns({"a": lambda: one("a"), "b": lambda: one("b")}, rounds=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert found == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
