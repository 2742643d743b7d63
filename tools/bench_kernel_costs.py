"""Costs of kernels that are learned from measurements, beside the analytic model and AutoShard's.

    python tools/bench_kernel_costs.py --quick
    python tools/bench_kernel_costs.py [--tables tables.csv] [--kernels-of fbgemm] [--plans-only] [--json]

All models are fitted to the same measured sets of tables. Errors are those of sets that none of them saw: of the same
design, and of tables of the list (``--tables``, or a made up one), which no model saw in any set. Times are processor
time of this machine with one thread, the shortest of nine turns; "measured again" compares two measurements of the same
sets, which no model can be better than.
Plans: random placements of whole tables, from even to lopsided, whose ranks' look-ups are timed one after the other;
the busiest counts. All plans are timed in turns over several rounds, each with other ids, and medians are compared; the
correlation of every single round with the median of the others says what noise allows.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from autoshard_costs import AutoShardCosts
from bench_report import check, ending
from planner_problems import made_up_tables
from scipy.stats import spearmanr

from flexd.embedding.kernels.flexd_kernels import FlexdKernels
from flexd.embedding.kernels.probe import FusedKernels, KernelBudget, measure_kernels
from flexd.planner.tables.kernel_costs import FITS, PHASES, HeldOutError, KernelCosts, work_of
from flexd.planner.tables.kernel_work import Pieces
from flexd.planner.tables.table_list import ListedTable, read_tables
from flexd.topology.kernel_design import MAX_TABLES, KernelRange, designed_sets
from flexd.topology.kernel_file import DTYPE_BYTES, KernelMeasurements, TableSet

Figures = dict[str, Any]
Predict = Callable[[Sequence[TableSet]], np.ndarray]

LIMITS = KernelRange()
BATCH = 512
DTYPE = "float16"
SECONDS = 24 * 3600.0
"""No budget of time: a bench measures a number of sets."""
ROUNDS = 5
"""Over all plans."""
HELD_OUT = 5
"""Every so many sets of the design one is held out."""


def sized(tables: Sequence[ListedTable], rng: np.random.Generator) -> list[tuple[float, ...]]:
    """(rows, dim, ids, bags, skew) of listed tables, scaled so that a set of them fits what is measured."""
    made = []
    for table in tables:
        most = LIMITS.memory_bytes / MAX_TABLES / (table.dim * DTYPE_BYTES[DTYPE] + 4)
        length = min(max(table.lookups / max(table.bags, 1.0), 1.0), LIMITS.max_bag)
        ids = float(round(BATCH * length))
        made.append((min(table.rows, int(most)), table.dim, ids, BATCH, rng.uniform(0.7, 1.3)))
    return made


def set_of(tables: Sequence[tuple[float, ...]]) -> TableSet:
    columns = np.array(tables, dtype=np.float64).T
    return TableSet(DTYPE, *columns, np.zeros(len(tables)))


def measured(kernels: FusedKernels, sets: Sequence[TableSet], seed: int) -> tuple[list[TableSet], np.ndarray]:
    """(sets with their distinct rows, float64[n, 2] seconds by phase)."""
    found = measure_kernels(kernels, sets, torch.device("cpu"), KernelBudget(SECONDS, len(sets)), seed)
    return list(found.sets), np.stack([found.answer_seconds, found.update_seconds], axis=1)


def fitted(sets: Sequence[TableSet], seconds: np.ndarray, epochs: int) -> tuple[dict[str, Predict], KernelCosts]:
    """Every model, and flexd's choice among its three, which was made without the sets that are compared here."""
    kept = KernelMeasurements("", "cpu", "", tuple(sets), seconds[:, 0], 0 * seconds[:, 0], seconds[:, 1])
    work, costs = work_of(kept), KernelCosts.learned(kept)

    def by_work(model: Callable[[np.ndarray], np.ndarray]) -> Predict:
        def predict(others: Sequence[TableSet]) -> np.ndarray:
            pieces, place = Pieces.of_sets(others)
            return model(pieces.work(place, len(others)))

        return predict

    models: dict[str, Predict] = {}
    for name, fit in FITS.items():
        phases = [fit(work, seconds[:, at], at) for at in range(len(PHASES))]
        models[name] = by_work(lambda w, phases=phases: np.stack([p.seconds(w) for p in phases], axis=1))  # type: ignore[misc]
    models["autoshard"] = AutoShardCosts(sets, seconds, epochs).seconds
    models["flexd"] = by_work(costs.seconds)
    return models, costs


def errors_of(models: dict[str, Predict], sets: Sequence[TableSet], seconds: np.ndarray) -> dict[str, Figures]:
    """Of every model the error of look-up and update, sets of one table and of several apart."""
    single = np.array([len(one.rows) == 1 for one in sets])
    result: dict[str, Figures] = {}
    for name, predict in models.items():
        predicted = predict(sets)
        result[name] = {}
        for at, phase in enumerate(PHASES):
            for kind, chosen in (("single", single), ("several", ~single)):
                if chosen.any():
                    error = HeldOutError.of(predicted[chosen, at], seconds[chosen, at])
                    result[name][f"{phase}_{kind}"] = {"median": error.median, "high": error.high}
    return result


def rank_sets(tables: Sequence[tuple[float, ...]], place: np.ndarray, ranks: int) -> list[TableSet]:
    return [set_of([tables[at] for at in np.flatnonzero(place == rank)]) for rank in range(ranks)]


def random_plans(rng: np.random.Generator, tables: int, ranks: int, plans: int) -> list[np.ndarray]:
    """Placements in which no rank is empty, from even to lopsided."""
    found: list[np.ndarray] = []
    while len(found) < plans:
        share = rng.dirichlet(np.full(ranks, rng.uniform(0.7, 5.0)))
        place = rng.choice(ranks, tables, p=share)
        if len(np.unique(place)) == ranks:
            found.append(place)
    return found


def greedy_plan(tables: Sequence[tuple[float, ...]], predict: Predict, ranks: int, distinct: np.ndarray) -> np.ndarray:
    """Each table, the dearest first, where the seconds of its rank are least with it."""

    def seconds(members: Sequence[int]) -> float:
        one = replace(set_of([tables[at] for at in members]), distinct=distinct[list(members)])
        return float(predict([one]).sum())

    held: list[list[int]] = [[] for _ in range(ranks)]
    for at in sorted(range(len(tables)), key=lambda at: -seconds([at])):
        held[min(range(ranks), key=lambda rank: seconds([*held[rank], at]))].append(at)
    place = np.empty(len(tables), np.int64)
    for rank, members in enumerate(held):
        place[members] = rank
    return place


def compare_plans(
    kernels: FusedKernels,
    models: dict[str, Predict],
    listed: Sequence[ListedTable],
    shape: tuple[int, int, int],
    rounds: int = ROUNDS,
) -> Figures:
    """Predicted against measured busiest rank of random plans, and the measured one of each model's own plan."""
    count, ranks, plans = shape
    rng = np.random.default_rng(7)
    tables = sized([listed[at] for at in rng.choice(len(listed), count, replace=False)], rng)
    singles, _ = measured(kernels, [set_of([table]) for table in tables], 3)
    distinct = np.array([one.distinct[0] for one in singles])
    places = random_plans(rng, count, ranks, plans)
    own = {name: greedy_plan(tables, predict, ranks, distinct) for name, predict in models.items()}
    every = [*places, *own.values()]
    wanted = [one for place in every for one in rank_sets(tables, place, ranks)]
    timed = [measured(kernels, wanted, 4 + number) for number in range(rounds)]
    sets, of_rounds = timed[0][0], np.stack([seconds for _, seconds in timed])

    def of_plans(values: np.ndarray) -> np.ndarray:
        """The busiest rank of each phase, both together."""
        return values.reshape(len(every), ranks, -1).max(axis=1).sum(axis=1)

    busiest = of_plans(np.median(of_rounds, axis=0))
    others = [np.median(np.delete(of_rounds, number, axis=0), axis=0) for number in range(rounds) if rounds > 1]
    again = [
        float(spearmanr(of_plans(one)[:plans], of_plans(rest)[:plans]).statistic)
        for one, rest in zip(of_rounds, others, strict=False)
    ]
    correlation = {
        name: float(spearmanr(of_plans(predict(sets))[:plans], busiest[:plans]).statistic)
        for name, predict in models.items()
    }
    outcome = {name: float(busiest[plans + at]) for at, name in enumerate(own)}
    return {
        "tables": count, "ranks": ranks, "plans": plans, "rank_correlation": correlation, "own_plan_seconds": outcome,
        "random_plan_seconds": float(np.median(busiest[:plans])), "rounds": rounds, "rounds_correlation": again,
    }  # fmt: skip


def kernels_of(name: str) -> FusedKernels:
    if name == "fbgemm":
        from flexd.torchrec.fused_kernels import FbgemmKernels

        return FbgemmKernels(LIMITS.memory_bytes, torch.device("cpu"))
    return FlexdKernels(LIMITS.memory_bytes, torch.device("cpu"))


def run(kernels: FusedKernels, listed: Sequence[ListedTable], *, quick: bool) -> Figures:
    """All comparisons; ``quick``: a fifth of the sets."""
    pooled = [table for table in listed if table.bags > 0]
    designed, unseen, again = (60, 12, 12) if quick else (300, 60, 60)
    sets, seconds = measured(kernels, list(islice(designed_sets(LIMITS), designed)), 1)
    repeated = measured(kernels, sets[:again], 1)[1]
    held = np.arange(len(sets)) % HELD_OUT == HELD_OUT - 1
    models, costs = fitted(
        [one for one, out in zip(sets, held, strict=True) if not out], seconds[~held], 100 if quick else 300
    )
    rng = np.random.default_rng(5)
    groups = [1 if at % 2 else int(rng.integers(2, 13)) for at in range(unseen)]
    drawn = [sized([pooled[at] for at in rng.choice(len(pooled), n, replace=False)], rng) for n in groups]
    new_sets, new_seconds = measured(kernels, [set_of(one) for one in drawn], 2)
    noise = HeldOutError.of(repeated.ravel(), seconds[:again].ravel())
    return {
        "kernels": kernels.name,
        "chosen": {phase: costs.phases[at].chosen for at, phase in enumerate(PHASES)},
        "measured_again": {"median": noise.median, "high": noise.high},
        "held_out": errors_of(models, [one for one, out in zip(sets, held, strict=True) if out], seconds[held]),
        "unseen_tables": errors_of(models, new_sets, new_seconds),
        "plans": compare_plans(kernels, models, pooled, (10, 2, 6) if quick else (32, 4, 20), 2 if quick else ROUNDS),
    }


def run_plans(kernels: FusedKernels, listed: Sequence[ListedTable], *, quick: bool) -> Figures:
    """Random plans alone, by models that are fitted to all measured sets."""
    pooled = [table for table in listed if table.bags > 0]
    models, costs = fitted(*measured(kernels, list(islice(designed_sets(LIMITS), 60 if quick else 300)), 1), 100)
    return {
        "kernels": kernels.name,
        "chosen": {phase: costs.phases[at].chosen for at, phase in enumerate(PHASES)},
        "plans": compare_plans(kernels, models, pooled, (10, 2, 6) if quick else (32, 4, 20), 2 if quick else ROUNDS),
    }


def show(figures: Figures) -> None:
    if "held_out" in figures:
        show_errors(figures)
    plans = figures["plans"]
    print(f"\n{plans['plans']} random plans of {plans['tables']} tables on {plans['ranks']} ranks: rank correlation")
    for name, value in plans["rank_correlation"].items():
        print(f"  {name:12}{value:8.3f}   its own plan, measured {plans['own_plan_seconds'][name] * 1e3:8.2f} ms")
    print(f"  random (median)        {plans['random_plan_seconds'] * 1e3:8.2f} ms")
    print("  each round with the others: " + ", ".join(f"{value:.3f}" for value in plans["rounds_correlation"]))


def show_errors(figures: Figures) -> None:
    noise = figures["measured_again"]
    print(f"kernels of {figures['kernels']}; chosen: {figures['chosen']}")
    print(f"the same sets measured again: median {noise['median']:.1%}, 95th percentile {noise['high']:.1%}")
    for part in ("held_out", "unseen_tables"):
        print(f"\n{part.replace('_', ' ')}: |predicted / measured - 1|, median and 95th percentile")
        kinds = list(next(iter(figures[part].values())))
        print(f"  {'model':12}" + "".join(f"{kind:>20}" for kind in kinds))
        for name, errors in figures[part].items():
            cells = (f"{errors[kind]['median']:.1%} {errors[kind]['high']:.0%}" for kind in kinds)
            print(f"  {name:12}" + "".join(f"{cell:>20}" for cell in cells))


def checks(figures: Figures) -> list[Figures]:
    result = []
    for part in (part for part in ("held_out", "unseen_tables") if part in figures):
        for kind, error in figures[part]["flexd"].items():
            result.append(check(f"{part}, {kind}: median error", error["median"], "<= 0.10", error["median"] <= 0.10))
            result.append(check(f"{part}, {kind}: 95th percentile", error["high"], "<= 0.25", error["high"] <= 0.25))
            least = min(figures[part][peer][kind]["median"] for peer in ("analytic", "autoshard"))
            ratio = error["median"] / least
            result.append(check(f"{part}, {kind}: over the best peer", ratio, "<= 1", ratio <= 1))
    plans = figures["plans"]
    correlation = plans["rank_correlation"]["flexd"]
    result.append(check("random plans: rank correlation", correlation, ">= 0.9", correlation >= 0.9))
    ratio = plans["own_plan_seconds"]["flexd"] / plans["own_plan_seconds"]["analytic"]
    result.append(check("measured plan over that of the analytic model", ratio, "<= 1", ratio <= 1))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, metavar="CSV", help="a list as TorchRec's published example")
    parser.add_argument("--kernels-of", choices=("flexd", "fbgemm"), default="flexd")
    parser.add_argument("--quick", action="store_true", help="fewer sets")
    parser.add_argument("--plans-only", action="store_true", help="random plans alone, without held-out errors")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    listed = read_tables(options.tables) if options.tables else made_up_tables()
    measure = run_plans if options.plans_only else run
    figures = measure(kernels_of(options.kernels_of), listed, quick=options.quick)
    show(figures)
    return ending(figures, checks(figures), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
