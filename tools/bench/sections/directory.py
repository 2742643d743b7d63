"""The directory of listed rows: bytes a row, look-ups a second, and the time of a chunk that changes it."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from flexd.core.keyspace import DimGroup
from flexd.core.layout import RankLayout, Tier
from flexd.embedding.store.directory import Directory
from tools.bench.harness import Outcome, at_most, timed

DIM, SKEW = 64, 1.05
CHUNK_ROWS = 4096


def device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, all kernels that it launches included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def median_seconds(run: Callable[[], object], device: torch.device, repeat: int) -> float:
    return float(np.median([device_seconds(run, device) for _ in range(repeat + 2)][2:]))


def chunk_seconds(chunk: Callable[[], object], repeat: int) -> float:
    """Return the median processor time: a chunk takes one thread, and other load of the machine is not its own."""
    return float(np.median([timed(chunk, time.process_time) for _ in range(repeat + 2)][2:]))


def zipf_ids(rows: int, count: int, device: torch.device, seed: int | list[int] = 1) -> torch.Tensor:
    share = np.arange(1, rows + 1) ** -SKEW
    rng = np.random.default_rng(seed)
    at = np.searchsorted(np.cumsum(share / share.sum()), rng.random(count)).clip(max=rows - 1)
    return torch.from_numpy(np.random.default_rng(1).permutation(rows)[at]).to(device)


def directory(hot_rows: int, device: torch.device, repeat: int) -> dict[str, dict[str, float]]:
    """Return the bytes of a directory of ``hot_rows`` among ten times as many rows, million ids found a second, and the
    time of a chunk that unlists 4,096 rows and lists as many others.

    Half of the ids are hot. The comparison is a sorted list of int64 keys with int32 slots and a byte for the tier.
    "plain" has DEVICE rows only; "mixed" has half NODE rows.
    """
    layout = RankLayout(2, 4)
    group = DimGroup(DIM, "float32", "sgd", 0, 10 * hot_rows, (0,))
    generator = torch.Generator().manual_seed(1)
    found: dict[str, dict[str, float]] = {}
    for name, device_share in (("plain", 1.0), ("mixed", 0.5)):
        device_rows = torch.arange(int(hot_rows * device_share)) * 7
        turns = torch.arange(hot_rows - len(device_rows)) * 10 + 3
        rail_rows = turns - turns % layout.local_ranks + 1  # homes on the rank's rail
        rail_rows = rail_rows[~torch.isin(rail_rows, device_rows)].unique()
        keys = torch.cat([device_rows, rail_rows])
        tiers = torch.full((len(keys),), int(Tier.NODE), dtype=torch.uint8)
        tiers[: len(device_rows)] = int(Tier.DEVICE)
        made = Directory([group], layout, 0, hot_rows, device)
        none = np.empty(0, dtype=np.int64)
        slots = np.arange(len(keys), dtype=np.int32)
        made.change(none, keys.numpy(), slots, tiers.numpy())
        cold = torch.randint(0, 10 * hot_rows, (102_400,), generator=generator)
        hot = keys[torch.randint(0, len(keys), (102_400,), generator=generator)]
        ids = torch.cat([hot, cold]).to(device)
        ordered = keys.sort().values.to(device)
        few = keys[:: len(keys) // CHUNK_ROWS][:CHUNK_ROWS].numpy()
        others = np.setdiff1d(np.arange(0, 10 * hot_rows, max(1, 5 * hot_rows // CHUNK_ROWS)), keys.numpy())[: len(few)]
        pairs = [(few, others), (others, few)]

        def plain(ordered: torch.Tensor = ordered, ids: torch.Tensor = ids) -> torch.Tensor:
            at = torch.searchsorted(ordered, ids).clamp_(max=len(ordered) - 1)
            return ordered.index_select(0, at) == ids

        def chunk(made: Directory = made, pairs: list[tuple[Any, Any]] = pairs) -> None:
            removed, new = pairs[0]
            pairs.reverse()
            tiers = np.full(len(new), int(Tier.DEVICE), np.uint8)
            made.change(removed[: len(new)], new, np.arange(len(new), dtype=np.int32), tiers)

        ours = median_seconds(partial(made.find, ids), device, repeat)
        theirs = median_seconds(plain, device, repeat)
        pairs[:] = [(few[: len(others)], others), (others, few[: len(others)])]
        change = chunk_seconds(chunk, repeat)
        found[name] = {
            "rows": float(len(made)), "bytes": float(made.nbytes), "bytes per row": made.nbytes / len(made),
            "of keys, slots and tiers": made.nbytes / (13 * len(made)), "find": len(ids) / ours / 1e6,
            "find in sorted int64": len(ids) / theirs / 1e6, "chunk rows": float(len(others)),
            "chunk milliseconds": change * 1e3,
        }  # fmt: skip
    return found


def section(options: Namespace) -> Outcome:
    torch.set_num_threads(1)
    rows, repeat = (100_000, 7) if options.quick else (10_000_000, 7)
    figures = directory(rows, torch.device(options.device), repeat)
    checks = [
        at_most(f"directory, {name}: {what}", part[what], most)
        for name, part in figures.items()
        for what, most in (("bytes per row", 18), ("chunk milliseconds", 3))
    ]
    return Outcome(figures, checks)
