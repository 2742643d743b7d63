"""Times of a step with unbounded ids and of the start of a large table, beside ids that are rows.

Steps are those of ``programs.ids``, in turns, on the emulated cluster, with its link limited and unlimited, and with
one rank instead of two on each node and as much of the link for it: on two processors each rank has its own then.
Without and with ``flexd.prefetch``, there with a model for about as long as its look-up takes, in which exchanges can
hide.
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import flexd
from tools.bench.harness import Outcome, at_most
from tools.bench.programs.ids import FIXED, RUNS, UNBOUNDED, IdsSetting
from tools.bench.ranks import on_ranks, training_ranks

MOST_OF_FIXED, MOST_START_SECONDS, START_ROWS = 1.10, 5.0, 10_000_000
RATE_MBIT, STEP_SECONDS = 200.0, 10.0


def step_seconds(setting: IdsSetting, rate_mbit: float | None, rounds: int, steps: int) -> dict[str, float]:
    """Return the median seconds of a step, the mean over the ranks, by what runs it."""
    found: dict[str, list[float]] = {name: [] for name in RUNS}
    with training_ranks("tools.bench.programs.ids", setting) as (cluster, ranks):
        cluster.limit(rate_mbit)
        for turn in range(rounds + 1):
            for name in RUNS:
                answers = ranks.ask(60 + STEP_SECONDS * steps, "train", which=name, steps=steps)
                if turn:
                    found[name] += np.mean(answers, axis=0).tolist()
    return {name: float(np.median(seconds)) for name, seconds in found.items()}


def start_on_rank(rows: int) -> dict[str, float]:
    """Return the seconds in which a rank makes its part of a table."""
    found = {}
    for name, more in ((FIXED, {}), (UNBOUNDED, {"ids": "unbounded", "admit_after": 2})):
        table = flexd.EmbeddingTable("item", rows, 16, **more)
        began = time.perf_counter()
        collection = flexd.EmbeddingCollection([table], layout=flexd.RankLayout(1, 1), optimizer=flexd.RowWiseAdagrad())
        collection({"item": torch.arange(4)})
        found[name] = time.perf_counter() - began
        del collection
    return found


def section(options: Namespace) -> Outcome:
    setting = IdsSetting(look_ups=3_200) if options.quick else IdsSetting()
    rounds, steps = (1, 3) if options.quick else (8, 6)
    figures: dict[str, Any] = {}
    checks = []
    alone = replace(setting, local_ranks=1)
    for link, of_link, rate in (
        (f"{RATE_MBIT:g} Mbit/s", setting, RATE_MBIT),
        ("unlimited link", setting, None),
        (f"a rank per node, {RATE_MBIT / 2:g} Mbit/s", alone, RATE_MBIT / 2),
        ("a rank per node, unlimited link", alone, None),
    ):
        seconds = step_seconds(of_link, rate, rounds, steps)
        figures[link] = {f"{name}, ms per step": 1e3 * of_step for name, of_step in seconds.items()}
        for way in ("", ", prefetch"):
            ratio = figures[link][f"over ids that are rows{way}"] = seconds[UNBOUNDED + way] / seconds[FIXED + way]
            checks.append(at_most(f"{link}: step over that of ids that are rows{way}", ratio, MOST_OF_FIXED))
    start = on_ranks(start_on_rank, 1, 1, START_ROWS // 10 if options.quick else START_ROWS)[0]
    figures["start"] = {f"{name}, seconds": of_start for name, of_start in start.items()}
    checks.append(at_most("start of 10^7 rows, seconds", start[UNBOUNDED], MOST_START_SECONDS))
    return Outcome(figures, checks)
