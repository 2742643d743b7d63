"""Times of a step with unbounded ids and of the start of a large table, beside ids that are rows.

The same look-ups in turns on 2 x 2 ranks over loopback: of a table whose ids are rows already, and of unbounded ids. A
rank looks up 25,600 ids a step, Zipf-popular (1.05) of 200,000, of which one in twenty is new. In the fixed table new
ids have rows of their own too, one after another. Without and with ``flexd.prefetch``; there the model multiplies
matrices, for about as long as a look-up takes, in which exchanges can hide.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import flexd
from tools.bench.harness import Outcome, at_most, in_turns, timed
from tools.bench.ranks import on_ranks
from tools.bench.workloads import zipf_batches

KNOWN, SPARE, DIM, LOOK_UPS, NEW_SHARE, SKEW = 200_000, 200_000, 64, 25_600, 0.05, 1.05
MOST_OF_FIXED, MOST_START_SECONDS, START_ROWS = 1.10, 5.0, 10_000_000
FIXED, UNBOUNDED = "ids are rows", "unbounded ids"


def batches(fixed: bool, look_ups: int) -> Iterator[torch.Tensor]:
    """Yield this rank's ids of step after step."""
    drawn = zipf_batches(KNOWN, look_ups, SKEW, dist.get_rank())
    rng = np.random.default_rng(dist.get_rank())
    news = round(look_ups * NEW_SHARE)
    for step, ids in enumerate(drawn):
        came = (step * dist.get_world_size() + dist.get_rank()) * news + np.arange(news)
        ids = ids.copy()
        ids[rng.choice(look_ups, news, replace=False)] = KNOWN + (came % SPARE if fixed else came)
        yield torch.from_numpy(ids)


def measured_on_rank(rounds: int, look_ups: int) -> dict[str, float]:
    """Return the median seconds of a step, by what runs it."""
    lengths, dense = torch.tensor([look_ups]), torch.rand(700, 700)
    runs: dict[str, Callable[[], float]] = {}
    made = []
    for name in (FIXED, UNBOUNDED):
        for ahead in (False, True):
            more: dict[str, Any] = {"ids": "unbounded"} if name == UNBOUNDED else {}
            collection = flexd.EmbeddingCollection(
                [flexd.EmbeddingTable("item", KNOWN + SPARE, DIM, **more)],
                layout=flexd.RankLayout(2, 2), optimizer=flexd.RowWiseAdagrad(),
            )  # fmt: skip
            given = ({"item": flexd.Jagged(ids, lengths)} for ids in batches(name == FIXED, look_ups))
            loop = iter(flexd.prefetch(given, collection)) if ahead else given
            made.append((collection, loop))

            def step(collection: Any = collection, loop: Any = loop, ahead: bool = ahead) -> None:
                values = collection(next(loop))["item"].values
                for _ in range(8 * ahead):
                    dense @ dense
                values.backward(values.detach())
                collection.optimizer.step()

            def run(step: Callable[[], None] = step) -> float:
                dist.barrier()
                return timed(step)

            runs[f"{name}{', prefetch' * ahead}"] = run
    found = {name: float(np.median(seconds)) for name, seconds in in_turns(runs, rounds, warm_up=6).items()}
    for collection, loop in made:
        loop.close()
        collection.close()
    return found


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
    rounds, look_ups = (6, LOOK_UPS // 8) if options.quick else (60, LOOK_UPS)
    steps = on_ranks(measured_on_rank, 2, 2, rounds, look_ups)[0]
    start = on_ranks(start_on_rank, 1, 1, START_ROWS // 10 if options.quick else START_ROWS)[0]
    figures: dict[str, Any] = {f"{name}, ms per step": 1e3 * seconds for name, seconds in steps.items()}
    checks = []
    for way in ("", ", prefetch"):
        ratio = figures[f"over ids that are rows{way}"] = steps[UNBOUNDED + way] / steps[FIXED + way]
        checks.append(at_most(f"step over that of ids that are rows{way}", ratio, MOST_OF_FIXED))
    figures |= {f"start, {name}, seconds": seconds for name, seconds in start.items()}
    checks.append(at_most("start of 10^7 rows, seconds", start[UNBOUNDED], MOST_START_SECONDS))
    return Outcome(figures, checks)
