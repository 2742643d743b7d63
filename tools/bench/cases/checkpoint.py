"""Bytes and time of checkpoints of changed rows, beside whole ones of ``torch.distributed.checkpoint``.

One rank trains one table with row-wise Adagrad on Zipf-popular ids. ``flexd.CheckpointSeries`` saves all rows, then
what changed after some numbers of steps; ``flexd.ShardedState`` saves all of it through
``torch.distributed.checkpoint`` in the same run. Each checkpoint is loaded into another collection. Memory is the most
that a save added to what the process held (``VmHWM``; nothing where the system does not tell). Further saves are
written in the background: the steps meanwhile are compared with those before and after, save by save, so that the noise
of the machine is in both. The thread that writes needs a processor: training on an accelerator leaves it one, and so
does torch here, with one thread less than there are processors. ``beside training, no processor free`` is the same with
as many threads as processors, not judged.

Checked: what was loaded equals what was saved, bit for bit, a changed row takes at most 5 % more bytes than its values
and state, and a step while a save is written in the background takes at most 5 % longer than one alone.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import flexd
from tools.bench.harness import Outcome, at_most, check, peak_resident_bytes, reset_peak, resident_bytes
from tools.bench.workloads import zipf_batches

MOST_OVERHEAD = 1.05
MOST_STALL = 0.05
"""Of a step, while a save is written in the background."""
_STEPS_ALONE = 20


@dataclass(frozen=True)
class Setting:
    rows: int = 2_000_000
    intervals: tuple[int, ...] = (10, 100, 1_000)
    dim: int = 64
    background_saves: int = 25
    ids: int = 25_600
    zipf: float = 1.05

    @property
    def row_bytes(self) -> int:
        return 4 * self.dim + 4

    def collection(self, seed: int) -> flexd.EmbeddingCollection:
        return flexd.EmbeddingCollection(
            [flexd.EmbeddingTable("items", self.rows, self.dim)],
            optimizer=flexd.RowWiseAdagrad(lr=0.05),
            layout=flexd.RankLayout(1, 1),
            seed=seed,
        )


class Trainer:
    def __init__(self, setting: Setting) -> None:
        self.collection = setting.collection(seed=1)
        self._batches = zipf_batches(setting.rows, setting.ids, setting.zipf)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            drawn = torch.from_numpy(next(self._batches))
            ids = flexd.Jagged(drawn, torch.tensor([len(drawn)]))
            self.collection({"items": ids})["items"].values.square().sum().backward()
            self.collection.optimizer.step()


def measured(save: Callable[[], Any], path: Path) -> tuple[Any, dict[str, float]]:
    """Return the result of a save, and its seconds, bytes on the disk and bytes of memory."""
    before = directory_bytes(path)
    held = resident_bytes() if reset_peak() else None
    began = time.perf_counter()
    result = save()
    figures = {"seconds": time.perf_counter() - began, "bytes": float(directory_bytes(path) - before)}
    if held is not None:
        figures["memory_bytes"] = float(max(0, peak_resident_bytes() - held))
    return result, figures


def directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def differing(one: flexd.EmbeddingCollection, other: flexd.EmbeddingCollection) -> int:
    """Return how many tensors of two collections are not equal, bit for bit."""
    states = [each.state_dict() for each in (one, other)]
    return sum(not torch.equal(value, states[1][key]) for key, value in states[0].items())


def beside_training(trainer: Trainer, series: flexd.CheckpointSeries, saves: int) -> dict[str, float]:
    """Return the seconds of a step alone and of the call, which copies the changed rows, medians, and by how much of
    a step those are longer that run while a save is written in the background, the median over the saves."""

    def step() -> float:
        began = time.perf_counter()
        trainer.train(1)
        return time.perf_counter() - began

    def steps(number: int) -> list[float]:
        return [step() for _ in range(number)]

    calls: list[float] = []
    beside: list[list[float]] = []
    alone = [steps(_STEPS_ALONE)]
    for _ in range(saves):
        before, began = len(series.numbers()), time.perf_counter()
        series.save(background=True)
        calls.append(time.perf_counter() - began)
        meanwhile: list[float] = []
        while len(series.numbers()) == before:
            meanwhile.append(step())
        series.wait()
        beside.append(meanwhile[:-1])  # the last ran partly alone
        alone.append(steps(_STEPS_ALONE))
    stalls = [
        statistics.median(meanwhile) / statistics.median([*first, *second]) - 1
        for first, meanwhile, second in zip(alone, beside, alone[1:], strict=False)
        if meanwhile
    ]
    return {
        "step_seconds": statistics.median(seconds for block in alone for seconds in block),
        "call_seconds": statistics.median(calls),
        "saves": saves,
        "steps_meanwhile": sum(map(len, beside)),
        "stall_share": statistics.median(stalls) if stalls else 0.0,
    }


def run(setting: Setting, path: Path) -> dict[str, Any]:
    trainer = Trainer(setting)
    collection = trainer.collection
    series = flexd.CheckpointSeries(collection, path / "series", keep=100, whole_every=100)
    whole, of_whole = measured(series.save, path)
    saves: list[dict[str, Any]] = [{"name": "all rows", "rows": whole.rows, **of_whole}]
    for steps in setting.intervals:
        trainer.train(steps)
        saved, figures = measured(series.save, path)
        saves.append({"name": f"changed in {steps} steps", "rows": saved.rows, **figures})
    _, of_dcp = measured(
        lambda: dcp.save({"tables": flexd.ShardedState(collection)}, checkpoint_id=path / "whole"), path
    )
    saves.append({"name": "torch.distributed.checkpoint", "rows": setting.rows, **of_dcp})
    loads = {}
    for name in ("series", "whole"):
        other = setting.collection(seed=2)
        began = time.perf_counter()
        if name == "series":
            into = flexd.CheckpointSeries(other, path / "series")
            into.load()
            into.close()
        else:
            dcp.load({"tables": flexd.ShardedState(other)}, checkpoint_id=path / "whole")
        loads[name] = {"seconds": time.perf_counter() - began, "differing": differing(collection, other)}
        other.close()
    beside = {}
    threads, processors = torch.get_num_threads(), len(os.sched_getaffinity(0))
    for name, used in (("beside training", max(1, processors - 1)), ("beside training, no processor free", processors)):
        torch.set_num_threads(used)
        beside[name] = beside_training(trainer, series, setting.background_saves)
    torch.set_num_threads(threads)
    series.close()
    collection.close()
    return {"saves": saves, "loads": loads, **beside}


def checks_of(setting: Setting, figures: dict[str, Any], *, judges_stall: bool) -> list[dict[str, Any]]:
    checks = [
        check(f"tensors that differ after loading: {name}", load["differing"], "0", load["differing"] == 0)
        for name, load in figures["loads"].items()
    ]
    for save in figures["saves"][:-1]:
        ratio = save["bytes"] / max(1, save["rows"] * setting.row_bytes)
        checks.append(at_most(f"bytes over those of the rows: {save['name']}", ratio, MOST_OVERHEAD))
    if not judges_stall:
        return checks
    stall = figures["beside training"]["stall_share"]
    checks.append(at_most("stall of a step while a save is written in the background, of a step", stall, MOST_STALL))
    return checks


def section(options: Namespace) -> Outcome:
    setting = Setting(200_000, (10, 50), background_saves=15) if options.quick else Setting()
    with tempfile.TemporaryDirectory() as path:
        figures = run(setting, Path(path))
    return Outcome(
        figures, checks_of(setting, figures, judges_stall=not options.quick)
    )  # few steps are beside a small save


SECTIONS = {"series": section}
