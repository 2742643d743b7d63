"""Hold ``flexd advise`` against measured steps on an emulated cluster (``cases.cluster``).

The step time of one strategy, ``direct, dedup``, is measured with a dense part and without; those of four others are
predicted from it, its time on the unlimited link (``--computing-ms``), that time without a dense part
(``--row-work-ms``), the batches and the link's given rate, as by a user of ``flexd advise``, and compared with what the
same processes measured in turns with it; beside it the error without the computing time.

Needs root, ip, tc and setpriv; says so and ends well without. Without TorchRec (``make torchrec``) its row is missing.
``--quick``: an eighth of the batch and two steps; only that there is a prediction is checked.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.simulate.accesses import Accesses
from flexd.simulate.advice import NOW, Advice, AdviceSettings, advise
from flexd.simulate.simulation import SimulationSettings
from tools.bench.cases import cluster
from tools.bench.harness import Outcome, at_least, at_most, of_runs
from tools.bench.strategies import Effort
from tools.bench.workloads import Setting, batches_of, given_cluster, keys_of

MEASURED = "direct, dedup"
PREDICTED = {
    "TorchRec row-wise": "row_wise",
    "chain": "two_hops",
    "direct, dedup, prefetch pipeline": "dedup_prefetch_pipeline",
    "chain, prefetch pipeline": "two_hops_prefetch_pipeline",
}
"""Strategies of the benchmark, and their names in the advice. Copies are left out: the benchmark makes a plan that the
planner, which knows the latencies here, would not make."""
TARGET = 0.15


def batch_accesses(setting: Setting) -> Accesses:
    """Return the batches that the ranks train."""
    batches = [batches_of(setting, rank) for rank in range(setting.layout.world_size)]
    specs = [TableSpec(t.name, t.rows, t.dim, t.dtype, "rowwise_adagrad") for t in setting.embedding_tables()]
    return Accesses(
        f"Zipf {setting.zipf:g}", "independent draws", KeySpace(specs), setting.batches, 1,
        lambda step: [tuple(keys_of(setting, of_rank[step]) for of_rank in batches)],
    )  # fmt: skip


def predict(
    setting: Setting, rate_mbit: float, step_seconds: float, row_work_seconds: float = 0.0,
    computing_seconds: float | None = None,
) -> Advice:  # fmt: skip
    return advise(
        batch_accesses(setting), setting.layout, given_cluster(setting.local_ranks, rate_mbit),
        SimulationSettings(replica_fraction=0.0),
        AdviceSettings(step_seconds, computing_seconds, row_work_seconds, NOW["dedup"]),
    )  # fmt: skip


def compare(setting: Setting, rate_mbit: float, effort: Effort) -> dict[str, Any]:
    """Return measured and predicted seconds of each part and strategy."""
    measured = cluster.run_setting(setting, rate_mbit, effort, [MEASURED, *PREDICTED])
    parts: dict[str, Any] = {}
    # Without a dense part, on an unlimited link, a step is the work on rows.
    row_work = min(rows[MEASURED]["unlimited_step_seconds"] for rows in measured["parts"].values())
    for title, rows in measured["parts"].items():
        basis = rows[MEASURED]
        blind = predict(setting, rate_mbit, basis["step_seconds"], row_work)
        # On a busy machine the unlimited link's steps may take longer than those of the slow one.
        computing = min(basis["unlimited_step_seconds"], 0.99 * basis["step_seconds"])
        found = predict(setting, rate_mbit, basis["step_seconds"], row_work, computing)
        parts[title] = {}
        for name, option in PREDICTED.items():
            if name not in rows:
                continue
            step, by_prices = (one.options[option].step_seconds.expected for one in (found, blind))
            taken = rows[name]["step_seconds"]
            parts[title][name] = {
                "measured_seconds": taken,
                "predicted_seconds": step,
                "relative_error": step / taken - 1,
                "relative_error_by_prices_alone": by_prices / taken - 1,
            }
        parts[title][MEASURED] = {
            "measured_seconds": found.step_seconds,
            "exchange_seconds_by_prices": blind.exchange_seconds,
            "exposed_seconds": rows[MEASURED]["exposed_seconds"],
        }
    return parts


def run(options: Namespace) -> Outcome:
    figures, checks, effort = {}, [], Effort.of(options)
    for setting in cluster.settings_of(options):
        answers = [compare(setting, options.rate_mbit, effort) for _ in range(effort.runs)]
        figures[f"zipf {setting.zipf}"] = answer = of_runs(answers)
        for title, rows in answer.items():
            errors = {name: abs(row["relative_error"]) for name, row in rows.items() if name != MEASURED}
            worst = max(errors, key=errors.__getitem__)
            name = f"Zipf {setting.zipf}, {title}: "
            if options.quick:
                checks.append(at_least(f"{name}strategies predicted", len(errors), len(PREDICTED) - 1))
            else:
                checks.append(at_most(f"{name}largest error of a predicted step ({worst})", errors[worst], TARGET))
    return Outcome(figures, checks)


arguments = cluster.arguments
SECTIONS = {"strategies": run}
