"""Measure what comparing announced inputs by value costs a step of ``flexd.prefetch``.

One rank, processor time of the training thread. Copying at the announcement and comparing at the look-up are timed
inside the step; "with a dense part" adds products of matrices that take about as long as in a small ranking model.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch

import flexd
from flexd.core.layout import RankLayout
from flexd.embedding.prefetch.announced_input import AnnouncedInput
from tools.bench.harness import Outcome, at_most

WARM_UP = 3
TARGET = 0.005
TIMED = ("__init__", "compare", "check_overwritten")


@contextmanager
def spent_on_comparing(spent: list[float]) -> Iterator[None]:
    """Add the processor seconds of ``AnnouncedInput`` to ``spent[0]``."""
    plain = {name: getattr(AnnouncedInput, name) for name in TIMED}

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                spent[0] += time.thread_time() - began

        return run

    for name, method in plain.items():
        setattr(AnnouncedInput, name, timed(method))
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(AnnouncedInput, name, method)


def seconds_per_step(features: int, ids: int, dense_flops: float, steps: int) -> tuple[float, float]:
    """Return the median processor seconds of a step, and of copying and comparing in it."""
    names = [f"feature_{number}" for number in range(features)]
    rng, per_feature = np.random.default_rng(1), ids // features
    tables = [flexd.EmbeddingTable(name, 100_000 // features, 32) for name in names]
    collection = flexd.EmbeddingCollection(tables, layout=RankLayout(1, 1), optimizer=flexd.RowWiseAdagrad())
    lengths = torch.ones(per_feature, dtype=torch.int64)

    def batch() -> dict[str, flexd.Jagged]:
        rows = (rng.random((features, per_feature)) ** 4 * (100_000 // features)).astype(np.int64)
        return {name: flexd.Jagged(torch.from_numpy(rows[at]), lengths) for at, name in enumerate(names)}

    left, right = torch.rand(1024, 1024), torch.rand(1024, 1024)
    spent, found = [0.0], []
    with spent_on_comparing(spent):
        began = time.thread_time()
        for features_of_step in flexd.prefetch([batch() for _ in range(steps)], collection, one_thread=True):
            rows = collection(features_of_step)
            for _ in range(round(dense_flops / 2 / 1024**3)):
                left @ right
            torch.stack([one.values.sum() for one in rows.values()]).sum().backward()
            collection.optimizer.step()
            found.append((time.thread_time() - began, spent[0]))
            began, spent[0] = time.thread_time(), 0.0
    step, comparing = np.median(np.array(found[WARM_UP:]), axis=0)
    return float(step), float(comparing)


def section(options: Namespace) -> Outcome:
    steps = 15 if options.quick else 60
    figures, checks = {}, []
    for title, features, ids, dense in (
        ("1 feature", 1, 25_600, 0.0), ("26 features", 26, 25_600, 0.0),
        ("26 features with a dense part", 26, 25_600, 2e10),
    ):  # fmt: skip
        step, comparing = seconds_per_step(features, ids, dense, steps)
        figures[title] = {"step_ms": 1e3 * step, "comparing_ms": 1e3 * comparing, "share": comparing / step}
        checks.append(at_most(f"{title}: share of comparing announced inputs", comparing / step, TARGET))
    return Outcome(figures, checks)
