#!/usr/bin/env python3
"""Hold ``flexd advise`` against measured steps on an emulated cluster (tools/bench_cluster.py).

The step time of one strategy, ``direct, no dedup``, is measured with a dense part and without; those of five others are
predicted from it, its time on the unlimited link (``--computing-ms``), that time without a dense part
(``--row-work-ms``), the batches and the link's given rate, as by a user of ``flexd advise``, and compared with what the
same processes measured in turns with it; beside it the error without the computing time.

Needs root, ip, tc and setpriv; says so and exits 0 without. Without TorchRec (``make torchrec``) its row is missing.

Usage: tools/bench_advise.py [--quick] [--json] [--zipf 1.05 1.2] [--rate-mbit 200] [--rounds 3]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_cluster import Effort, run_setting
from bench_cluster_data import Setting, batches_of, given_cluster, keys_of
from bench_report import check, ending
from cluster import ClusterError, exit_on_sigterm, why_not

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.simulate.advice import NOW, Advice, advise
from flexd.simulate.simulation import SimulationSettings

MEASURED = "direct, no dedup"
PREDICTED = {
    "TorchRec row-wise": "row_wise",
    "direct, dedup": "dedup",
    "chain": "two_hops",
    "direct, dedup, run-ahead": "dedup_run_ahead",
    "chain, run-ahead": "two_hops_run_ahead",
}
"""Strategies of the benchmark, and their names in the advice. Copies are left out: the benchmark makes a plan that the
planner, which knows the latencies here, would not make."""
TARGET = 0.15


class BatchAccesses:
    """The batches that the ranks train, as ``flexd.simulate.accesses.Accesses``."""

    def __init__(self, setting: Setting) -> None:
        self.name = f"Zipf {setting.zipf:g}"
        self.made_of = "independent draws"
        self.steps, self.micro_batches = setting.batches, 1
        self.keyspace = KeySpace(
            [TableSpec(t.name, t.rows, t.dim, t.dtype, "rowwise_adagrad") for t in setting.embedding_tables()]
        )
        self._setting = setting
        self._batches = [batches_of(setting, rank) for rank in range(setting.layout.world_size)]

    def passes(self, step: int) -> list[tuple[npt.NDArray[np.int64], ...]]:
        return [tuple(keys_of(self._setting, batches[step]) for batches in self._batches)]


def predict(
    setting: Setting, rate_mbit: float, step_seconds: float, row_work_seconds: float = 0.0,
    computing_seconds: float | None = None,
) -> Advice:  # fmt: skip
    return advise(
        BatchAccesses(setting), setting.layout, given_cluster(setting, rate_mbit),
        SimulationSettings(replica_fraction=0.0), step_seconds=step_seconds,
        computing_seconds=computing_seconds, row_work_seconds=row_work_seconds, now=NOW["row_wise"],
    )  # fmt: skip


def compare(setting: Setting, rate_mbit: float, effort: Effort) -> dict[str, Any]:
    """Return measured and predicted seconds of each part and strategy."""
    measured = run_setting(setting, rate_mbit, effort, [MEASURED, *PREDICTED])
    parts: dict[str, Any] = {}
    # Without a dense part, on an unlimited link, a step is the work on rows.
    row_work = min(rows[MEASURED]["unlimited_step_seconds"] for rows in measured["parts"].values())
    for title, rows in measured["parts"].items():
        basis = rows[MEASURED]
        blind = predict(setting, rate_mbit, basis["step_seconds"], row_work)
        found = predict(setting, rate_mbit, basis["step_seconds"], row_work, basis["unlimited_step_seconds"])
        parts[title] = {}
        for name, option in PREDICTED.items():
            if name not in rows:
                continue
            # The measured exchange itself is predicted as it is; only TorchRec's kernels differ.
            step, by_prices = (
                one.step_seconds if option == "row_wise" else one.predictions[option].step_seconds.expected
                for one in (found, blind)
            )
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
    return {"zipf": setting.zipf, "parts": parts}


def show(answer: dict[str, Any]) -> None:
    for title, rows in answer["parts"].items():
        of = rows[MEASURED]
        print(
            f"\nZipf {answer['zipf']}, {title}: {MEASURED} {of['measured_seconds'] * 1e3:.0f} ms, of it exchange by "
            f"the prices {of['exchange_seconds_by_prices'] * 1e3:.0f} ms, measured {of['exposed_seconds'] * 1e3:.0f} ms"
        )
        print(f"{'strategy':<26}{'measured':>12}{'predicted':>12}{'error':>9}{'by prices alone':>17}")
        for name, row in rows.items():
            if name != MEASURED:
                print(
                    f"{name:<26}{row['measured_seconds'] * 1e3:>9.0f} ms{row['predicted_seconds'] * 1e3:>9.0f} ms"
                    f"{row['relative_error']:>+9.1%}{row['relative_error_by_prices_alone']:>+17.1%}"
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.05, 1.2])
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="of a node's link, each direction")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of each strategy, link and round")
    parser.add_argument("--quick", action="store_true", help="an eighth of the batch, two steps: nothing is asserted")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    exit_on_sigterm()
    effort = Effort(arguments.rounds, arguments.steps)
    settings = [Setting(zipf=zipf) for zipf in arguments.zipf]
    if arguments.quick:
        effort = Effort(rounds=1, steps=2)
        settings = [Setting(zipf=arguments.zipf[0], samples=64, batches=4)]
    answers, checks = [], []
    for setting in settings:
        try:
            answers.append(compare(setting, arguments.rate_mbit, effort))
        except ClusterError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
        show(answers[-1])
        for title, rows in answers[-1]["parts"].items():
            errors = {name: abs(row["relative_error"]) for name, row in rows.items() if name != MEASURED}
            if errors and not arguments.quick:
                worst = max(errors, key=errors.__getitem__)
                name = f"Zipf {setting.zipf}, {title}: largest error of a predicted step ({worst})"
                checks.append(check(name, errors[worst], f"<= {TARGET}", errors[worst] <= TARGET))
    return ending(answers, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
