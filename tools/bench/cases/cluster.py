"""Exchange strategies on an emulated cluster, beside TorchRec: bytes by link, step time, exposed communication.

Two nodes of two ranks, joined by a slow link. All strategies are trained by the same processes on the same batches from
the same initial values with the same optimizer (row-wise Adagrad, summed gradients), in turns, with the link limited
and unlimited; their losses must agree. Bytes are those of the interface counters, headers included. The exposed
communication time is the median step time less that on the unlimited link; beside it the same of the lower deciles, the
steps that other work on the machine disturbed least, and the time that the bytes take on the wire alone. With and
without a dense part, behind which communication can hide. ``stored_bytes`` is what the largest rank stores between
steps.

The bound is that of exact synchronous training on the same batches: each node fetches and pushes each row it touches
and does not home once per step (rows only, no ids, no headers).

**read_only**: half of the tables, or all, are not trained. What targets judge are two jobs by default settings, one of
them with a daemon, which plans copies and verifies them (``cases.verify``); both choose their exchange. They take turns
with copies planned from the true profile, with FlexShard's tiers, and with TorchRec. All that copy rows have slots for
5 % of them. ``--quick``: a tenth of the rows, and one turn, of which is checked that it trains.

Needs root, ip, tc and setpriv; says so and ends well without. Without TorchRec (``make torchrec``) its rows are
missing. ``--quick`` trains an eighth of the batch for two steps: bytes and losses alone are checked.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tools.bench import strategies
from tools.bench.cases import verify
from tools.bench.cluster import ClusterError
from tools.bench.harness import Outcome, at_least, at_most, of_runs
from tools.bench.ranks import training_ranks
from tools.bench.strategies import SPREAD_OF, STEP_SECONDS, Bench, Effort
from tools.bench.workloads import Setting, bound_bytes

ROW_WISE, DEDUP = "TorchRec row-wise", "direct, dedup"
LOSS_TOLERANCE, NARROW_LOSS_TOLERANCE = 2e-3, 2e-2
TARGETS = {
    1.05: {"reduction": 0.66, "exposed": 3.0, "prefetch pipeline": 7.0},
    1.2: {"reduction": 0.80, "exposed": 5.0, "prefetch pipeline": 12.0},
}
PREFETCH_PIPELINE_AGAINST_DEDUP = 2.5
BOUND_TARGET, SMALL_BOUND_TARGET, CPU_TARGET = 1.05, 1.1, 1.3
"""Bytes over the bound: of the full batch, and of ``--quick``, where sizes and bit masks weigh more."""


# Of read_only: (whether the link is limited, with a dense part, over flexd.prefetch).
PARTS = {
    "link": (True, False, True), "dense": (True, True, True), "dense-no-prefetch": (True, True, False),
    "unlimited": (False, False, True),
}  # fmt: skip


def arguments(parser: ArgumentParser) -> None:
    strategies.arguments(parser, rounds=4, steps=10)
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.05, 1.2])
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS),
        help="read_only: with the link limited, so with a dense part, the same without flexd.prefetch, and not limited",
    )  # fmt: skip


def settings_of(options: Namespace) -> list[Setting]:
    if options.quick:
        return [Setting(zipf=options.zipf[0], samples=64, batches=4)]
    return [Setting(zipf=zipf) for zipf in options.zipf]


def run_setting(setting: Setting, rate_mbit: float, effort: Effort, wanted: Sequence[str] | None) -> dict[str, Any]:
    """Return all figures of one run of one setting."""
    with training_ranks("tools.bench.programs.cluster", setting) as (cluster, ranks):
        bench = Bench(cluster, ranks, rate_mbit, wanted)
        for name in bench.chosen:
            planned = 1 if name.startswith("tiers") and bench.prepared["replicated_rows"] else 0
            if bench.ask(STEP_SECONDS, "placement_version", strategy=name)[0] != planned:
                raise ClusterError(f"{name}: the placement is not the planned one")
        bound, links = bound_bytes(setting), rate_mbit * 1e6 / 8 * setting.nodes
        dense_seconds = median(np.mean(bench.ask(120, "dense_seconds", steps=5), axis=0))
        parts = {}
        for dense, title in ((False, "no dense part"), (True, "dense part")):
            parts[title] = rows = bench.measure(effort, dense=dense)
            for row in rows.values():
                row["wire_seconds"] = row["inter_node_bytes"] / links
                row["inter_node_bytes_over_bound"] = row["inter_node_bytes"] / bound
                if ROW_WISE in rows:
                    row["row_wise_over_exposed"] = _ratio(rows[ROW_WISE]["exposed_seconds"], row["exposed_seconds"])
        return {
            "zipf": setting.zipf,
            "bound_bytes": bound,
            "dense_seconds": dense_seconds,
            "replicated_rows": bench.prepared["replicated_rows"],
            "stored_bytes": {
                name: max(bench.ask(STEP_SECONDS, "stored_bytes", strategy=name)) for name in bench.chosen
            },
            "loss_differences": bench.loss_differences(),
            "parts": parts,
        }


def checks_of(answer: dict[str, Any], *, full_size: bool) -> list[dict[str, Any]]:
    """``full_size``: the setting that the targets were set for; otherwise only bytes against the bound, and losses."""
    label = f"zipf {answer['zipf']}"
    checks = []
    for name, difference in answer["loss_differences"].items():
        limit = NARROW_LOSS_TOLERANCE if name.endswith("16") else LOSS_TOLERANCE
        checks.append(at_most(f"{label}: {name}: losses differ by", difference, limit))
    targets = TARGETS.get(answer["zipf"]) if full_size else None
    for title, rows in answer["parts"].items():
        prefix = f"{label}, {title}"
        row_wise, dedup = rows.get(ROW_WISE), rows.get(DEDUP)
        for name, row in rows.items():
            if not name.startswith(("chain", "tiers")) or name.endswith("16"):
                continue
            limit = BOUND_TARGET if full_size else SMALL_BOUND_TARGET
            checks.append(at_most(f"{prefix}: {name}: bytes / bound", row["inter_node_bytes_over_bound"], limit))
            if targets is None or row_wise is None:
                continue
            saved = 1 - row["inter_node_bytes"] / row_wise["inter_node_bytes"]
            checks.append(at_least(f"{prefix}: {name}: bytes below row-wise", saved, targets["reduction"]))
            ahead = "prefetch pipeline" in name
            goal, ratio = targets["prefetch pipeline" if ahead else "exposed"], row["row_wise_over_exposed"]
            checks.append(at_least(f"{prefix}: {name}: exposed, row-wise over it", ratio, goal))
            if ahead and dedup is not None:
                ratio = _ratio(dedup["exposed_seconds"], row["exposed_seconds"])
                name = f"{prefix}: {name}: exposed, dedup over it"
                checks.append(at_least(name, ratio, PREFETCH_PIPELINE_AGAINST_DEDUP))
        if full_size and row_wise is not None and "chain" in rows:
            ratio = rows["chain"]["unlimited_step_seconds"] / row_wise["unlimited_step_seconds"]
            checks.append(at_most(f"{prefix}: chain: step on an unlimited link / TorchRec row-wise", ratio, CPU_TARGET))
    return checks


def _ratio(of: float, to: float) -> float:
    """Nothing exposed counts as a thousandth of what it is compared with."""
    return of / max(to, of / 1000)


def run(options: Namespace) -> Outcome:
    figures, checks, effort = {}, [], Effort.of(options)
    for setting in settings_of(options):
        answers = [run_setting(setting, options.rate_mbit, effort, options.strategies) for _ in range(effort.runs)]
        answer = of_runs(answers, (*SPREAD_OF, "row_wise_over_exposed"))
        worst = {name: max(of["loss_differences"][name] for of in answers) for name in answer["loss_differences"]}
        answer["loss_differences"] = worst
        figures[f"zipf {setting.zipf}"] = answer
        checks += checks_of(answer, full_size=not options.quick)
    return Outcome(figures, checks)


READ_ONLY_TARGETS = {  # by (exponent, tables of 4, dense part): step with copies over that without
    (1.2, 2, False): 0.87, (1.2, 4, False): 0.60, (1.05, 2, False): 0.94, (1.05, 4, False): 0.78, (1.2, 4, True): 0.90,
    (1.05, 4, True): 0.90,
}  # fmt: skip
BYTES_TOLERANCE = 0.03
PLANNED, FLEXSHARD = "planned exchange", "FlexShard's tiers"


def read_only(options: Namespace) -> Outcome:
    figures: dict[str, Any] = {}
    checks, parts = [], [PARTS[name] for name in options.parts]
    effort, tables_read_only = verify.Effort(), (2, 4)
    if options.quick:
        parts, tables_read_only = parts[:1], (4,)
        effort = verify.Effort(8.0, 1, 0.0, 256, choosing_steps=10, probe_seconds=2.0, probe_bytes=2**18)
    for one, tables in product(settings_of(options), tables_read_only):
        setting = replace(one, read_only=tables, rows=one.rows // 10 if options.quick else one.rows)
        wanted = [PLANNED, FLEXSHARD] if tables < setting.tables else None  # TorchRec trains all or none
        with (
            TemporaryDirectory(prefix="bench-read-only-") as directory,
            training_ranks("tools.bench.programs.verify", setting) as (cluster, ranks),
        ):
            bench = Bench(cluster, ranks, options.rate_mbit, wanted)
            cell = f"zipf {setting.zipf:g}, {tables} of {setting.tables} tables read only"
            figures[cell] = dict(bench.prepared)
            sent = _payload_per_step(bench, 2 if options.quick else setting.batches)
            figures[cell]["inter_node_bytes_sent"] = sent
            difference = abs(sent / bench.prepared["inter_node_bytes"] - 1)
            tolerance = 2 * BYTES_TOLERANCE if options.quick else BYTES_TOLERANCE
            checks.append(at_most(f"{cell}: bytes, predicted against sent", difference, tolerance))
            beside_daemon = verify.Bench(cluster, ranks, Path(directory))
            for limited, dense, prefetch in parts:
                rate = options.rate_mbit if limited else None
                part = f"{f'{rate:g} Mbit/s' if rate else 'no limit'}{', dense part' * dense}"
                part += "" if prefetch else " without flexd.prefetch"
                most = READ_ONLY_TARGETS.get((setting.zipf, tables, dense)) if rate else None
                job = verify.Job(
                    f"{cell}, {part}", setting, rate, dense, most=most or verify.NEVER_SLOWER, default=True,
                    prefetch=prefetch,
                )  # fmt: skip
                found = figures[cell][part] = beside_daemon.run(job, effort, bench.chosen)
                print(job.name, {name: round(1000 * s) for name, s in found.items() if name.endswith("_seconds")})
                if options.quick:
                    steps = found["steps_until_decided"]
                    checks.append(at_least(f"{job.name}: steps beside the daemon", steps, verify.TURN_STEPS))
                else:
                    checks += verify.checks_of(job, found)
    return Outcome(figures, checks)


def _payload_per_step(bench: Bench, steps: int) -> float:
    """Return the mean over the ranks of the bytes between nodes of a step with the planned copies and exchange."""
    before = bench.ask(STEP_SECONDS, "inter_node_bytes", strategy=PLANNED)
    bench.train(PLANNED, dense=False, steps=steps)
    after = bench.ask(STEP_SECONDS, "inter_node_bytes", strategy=PLANNED)
    return float(np.mean(after) - np.mean(before)) / steps


SECTIONS = {"strategies": run, "read_only": read_only}
