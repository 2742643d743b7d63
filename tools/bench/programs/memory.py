"""Ways to train a table larger than memory, for ``cases.memory``: prints one JSON object with the figures of each.

Ways of flexd use one file one after the other; each begins with the most popular rows in cache slots, changed, which is
where a long training would be. The step of all ways: the distinct rows of a batch are read, their gradients (of half
the squared rows) summed, and rows and row-wise Adagrad state written.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from flexd.embedding.store.slow.fast_memory import FIRST, HALF_LIVES, HalfLife
from tools.bench.harness import timed

LEARNING_RATE = 0.05
AHEAD = {"flexd, prefetch pipeline": 1, "flexd, four batches ahead": 4}
COVER = 1.25
"""The wait for the dense part is as many times a step of flexd with the prefetch pipeline that has none."""
_SPREAD = 2_654_435_761
_KEPT_ROWS = 1 << 16


class Way(Protocol):
    """A way to keep rows."""

    def step(self, ids: torch.Tensor, dense_seconds: float = 0.0) -> None: ...

    def figures(self) -> dict[str, float]: ...

    def close(self) -> None: ...


def batches(rows: int, ids: int, zipf: float, seed: int) -> Iterator[torch.Tensor]:
    """Zipf-popular rows, the popular ones anywhere in the table."""
    generator = np.random.default_rng(seed)
    # The inverse of the integral of x^-s, of which the sum over whole numbers differs by little.
    power = 1.0 - zipf
    while True:
        drawn = ((rows**power - 1.0) * generator.random(ids) + 1.0) ** (1.0 / power)
        yield torch.from_numpy((drawn.astype(np.int64) - 1) * _SPREAD % rows)


def popular_rows(rows: int, count: int) -> torch.Tensor:
    """Return int64 [count]: the rows that ``batches`` draws most often, in that order."""
    return torch.arange(count) * _SPREAD % rows


def popular_touches(rows: int, count: int, ids: int, zipf: float) -> torch.Tensor:
    """Return float64 [count]: the share of batches that use each of ``popular_rows``."""
    power, edges = 1.0 - zipf, torch.arange(1, count + 2, dtype=torch.float64)
    shares = (edges**power).diff() / (float(rows) ** power - 1.0)
    return -torch.expm1(-ids * shares)


class Tensors:
    """Rows and state in tensors: in memory, or in a file that is mapped into it."""

    def __init__(self, setting: dict[str, Any], directory: Path | None) -> None:
        from flexd.embedding.row_optimizers import GroupUpdate, RowWiseAdagrad

        rows, dim = setting["rows"], setting["dim"]
        if directory is None:
            self._rows, self._state = torch.ones(rows, dim), torch.zeros(rows, 1)
        else:
            path = directory / "mapped"
            fill_file(path, rows * dim)
            self._rows = torch.from_file(str(path), shared=True, size=rows * dim).view(rows, dim)
            self._state = torch.zeros(rows, 1)
        self._optimizer, self._update, self._steps = RowWiseAdagrad(lr=LEARNING_RATE), GroupUpdate, 0

    def step(self, ids: torch.Tensor, dense_seconds: float = 0.0) -> None:
        self._steps += 1
        distinct, places, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        values = self._rows.index_select(0, distinct)
        _ = values.index_select(0, places)
        time.sleep(dense_seconds)
        grads = [(distinct, values * counts[:, None])]
        self._optimizer.update_groups([self._update(self._rows, self._state, grads)], self._steps)

    def figures(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class Flexd:
    """A collection of one rank.

    Args:
        ahead: batches that are known ahead; the rows of the next one are fetched during the dense part.
    """

    def __init__(self, setting: dict[str, Any], directory: Path, *, ahead: int = 0) -> None:
        import flexd

        table = flexd.EmbeddingTable("item", setting["rows"], setting["dim"])
        self._collection = flexd.EmbeddingCollection(
            [table], optimizer=flexd.RowWiseAdagrad(lr=LEARNING_RATE), layout=flexd.RankLayout(1, 1),
            fast_memory_bytes=setting["fast_bytes"], slow_memory_dir=directory,
        )  # fmt: skip
        held = self._collection.engine.stores[0].tier
        assert held is not None
        self._tier, self._flexd, self._directory, self._setting = held, flexd, directory, setting
        if setting.get("filled", True):
            self._fill(setting)
        self._loop: Any = None
        self.begin(ahead=ahead)

    def begin(self, *, ahead: int = 0, zipf: float | None = None) -> None:
        """Begin with empty cache slots, or with the rows that are popular by ``zipf``; rows are what the file has."""
        from flexd.embedding.store.slow.cache_slot_table import CacheSlotTable, LookAhead

        self._stop()
        held, rows, ids = self._tier, self._setting["rows"], self._setting["ids"]
        held._table = CacheSlotTable(held.cache_slots, held.home_rows - 1, held.rows.device)
        held._ahead, held._use = LookAhead(held._table), HalfLife(held.cache_slots, rows, held.rows.device)
        self._ahead, self._pending = ahead, list[dict[str, Any]]()
        if zipf is not None:
            touched = popular_touches(rows, held.cache_slots, ids, zipf)
            fillings = len(next(batches(rows, ids, zipf, seed=0)).unique()) / held.cache_slots  # of a step
            counts = torch.log2(touched * HALF_LIVES[FIRST] / fillings / math.log(2))
            for slots, part in zip(
                popular_rows(rows, held.cache_slots).split(_KEPT_ROWS), counts.split(_KEPT_ROWS), strict=True
            ):
                cache_slots = held._table.bring(slots).cache_slots
                held.rows[cache_slots], held.state[cache_slots] = 1.0, 0.0
                held._table.remember(cache_slots, part)
                held._table.changed(cache_slots)
                held._table.release(cache_slots)

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.close()
        self._loop = None

    def _fill(self, setting: dict[str, Any]) -> None:
        """Write every row, so that reading it costs what it costs later in a training."""
        one = torch.cat([torch.ones(setting["dim"]).view(torch.uint8), torch.zeros(3).view(torch.uint8)])
        for first in range(0, setting["rows"], 1 << 18):
            slots = torch.arange(first, min(setting["rows"], first + (1 << 18)))
            self._tier.cold.write(slots, one[None].expand(len(slots), -1))

    def step(self, ids: torch.Tensor, dense_seconds: float = 0.0) -> None:
        features = {"item": self._flexd.Jagged(ids, torch.tensor([len(ids)]))}
        if self._ahead:
            self._pending.append(features)
            if self._loop is None and len(self._pending) <= self._ahead:
                return  # the batches ahead are not known yet
            self._loop = self._loop or iter(self._flexd.prefetch(self._drawn(), self._collection, ahead=self._ahead))
            features = next(self._loop)
        values = self._collection(features)["item"].values
        time.sleep(dense_seconds)
        (values.square().sum() / 2).backward()
        self._collection.optimizer.step()

    def _drawn(self) -> Iterator[Any]:
        while True:
            yield self._pending.pop(0)

    def figures(self) -> dict[str, float]:
        used, missed = self._tier.counts.by_table().sum(dim=0)[:2].tolist()
        traffic = self._tier.cold.traffic
        return {
            "cache_slots": self._tier.cache_slots, "used": used, "missed": missed, "bytes_read": traffic.bytes_read,
            "bytes_written": traffic.bytes_written, "slow_seconds": traffic.seconds,
        }  # fmt: skip

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [n, dim] of distinct rows, wherever they are."""
        # One rank, one table: the slot of a row is its number.
        return self._collection.engine.stores[0].rows.index_select(0, ids)

    def close(self) -> None:
        self._stop()
        self._collection.close()


def fill_file(path: Path, numbers: int) -> None:
    chunk = np.ones(1 << 22, dtype=np.float32)
    with path.open("wb") as file:
        for first in range(0, numbers, len(chunk)):
            file.write(chunk[: min(len(chunk), numbers - first)].tobytes())
        os.fsync(file.fileno())


def made(way: str, setting: dict[str, Any], directory: Path) -> Way:
    if way == "all fast":
        return Tensors(setting, None)
    if way == "memory map":
        return Tensors(setting, directory)
    return Flexd(setting, directory)


def process_figures() -> dict[str, float]:
    """Return what this process has used: processor seconds, and bytes that it had the disk read and write."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {
        "processor_seconds": used.ru_utime + used.ru_stime,
        "disk_bytes_read": float(io["read_bytes"]), "disk_bytes_written": float(io["write_bytes"]),
    }  # fmt: skip


def run(way: Way, drawn: Iterator[torch.Tensor], seconds: float, least: int, dense_seconds: float) -> list[float]:
    """Return the seconds of steps, of at least so many for so long."""
    took: list[float] = []
    end = time.perf_counter() + seconds
    while len(took) < least or time.perf_counter() < end:
        ids = next(drawn)
        took.append(timed(lambda ids=ids: way.step(ids, dense_seconds)))  # type: ignore[misc]
    return took


def answer(way: Way, setting: dict[str, Any], zipf: float, dense_seconds: float = 0.0) -> dict[str, float]:
    """Return figures per step, measured after the warm-up."""
    drawn = batches(setting["rows"], setting["ids"], zipf, seed=1)
    warmed = run(way, drawn, setting["warm_seconds"], 2, dense_seconds)
    before = way.figures() | process_figures()
    # A step of the memory map may take half a minute.
    took = run(way, drawn, setting["seconds"], 3 if max(warmed) < setting["seconds"] else 1, dense_seconds)
    after = way.figures() | process_figures()
    found = {name: (after[name] - before[name]) / len(took) for name in after if name != "cache_slots"}
    found |= {"cache_slots": after.get("cache_slots", 0), "steps": len(took), "warm_steps": len(warmed)}
    return found | {"step_seconds": float(np.median(took)), "mean_step_seconds": float(np.mean(took))}


def main() -> None:
    ways, setting, directory = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(2)
    held = made(ways[0], setting, directory)
    answers: dict[str, dict[str, Any]] = {way: {} for way in ways}
    for way in ways:
        for zipf in setting["zipfs"]:
            if isinstance(held, Flexd):
                held.begin(ahead=AHEAD.get(way, 0), zipf=zipf)
            found = answer(held, setting, zipf)
            seconds = setting["dense_seconds"].get(str(zipf))
            if way == "flexd, prefetch pipeline":
                seconds = COVER * found["step_seconds"]
            if seconds is not None:
                found |= {"dense_seconds": seconds}
                found["device_step_seconds"] = answer(held, setting, zipf, seconds)["step_seconds"]
            answers[way][str(zipf)] = found
    held.close()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
