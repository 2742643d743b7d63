"""Jobs of ranks: series of checkpoints, saved while rows train and move, and loaded elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from flexd.core.errors import CheckpointError
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.embedding.checkpoint import blocks, saved_rows, series_directory
from flexd.embedding.checkpoint.series import CheckpointSeries
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.prefetch.loop import prefetch
from flexd.embedding.row_optimizers import RowOptimizer
from tests.support.checkpoint_jobs import OPTIMIZERS, share, train_steps, whole
from tests.support.collection_jobs import offer, random_placement, tables, train_step

Events = list[tuple[str, Any]]
"""What happens to a job: ("train", steps), ("move", seed), ("ahead", steps), ("rows", (table, first, count)),
("reset", None), ("save", None), ("load", number)."""


def made(
    layout: RankLayout,
    optimizer: str,
    seed: int,
    *,
    fast_memory_bytes: int | None = None,
    directory: str | None = None,
    exchange: str = "chain",
    names: tuple[str, ...] = ("item", "odd", "tiny"),
    rule: RowOptimizer | None = None,
    dtype: str = "float64",
) -> EmbeddingCollection:
    slots = dict(zip(("item", "odd", "tiny"), (61, 23, 3), strict=True))
    return EmbeddingCollection(
        tables(dtype, names), optimizer=rule or OPTIMIZERS[optimizer], layout=layout, average_gradients=False,
        replica_slots=[slots[name] for name in names], seed=seed, exchange=exchange,
        fast_memory_bytes=fast_memory_bytes, slow_memory_dir=directory,
    )  # fmt: skip


def run(
    rank: int, layout: RankLayout, path: str, optimizer: str, events: Events, more: dict[str, Any], settings: dict
) -> list[dict[str, Any]]:
    """Run events; return of each save its number, base, rows and bytes, and all tables and state at its time."""
    blocks.MAX_WINDOW_BYTES = 300
    collection = made(layout, optimizer, 1, **more)
    series = CheckpointSeries(collection, path, **settings)
    placement, step, saves = Placement.empty(), 0, []
    for event, value in events:
        if event == "train":
            train_steps(collection, step, value)
            step += value
        elif event == "move":
            following = random_placement(value, 40, layout)
            offer(collection, placement.delta_to(following))
            placement = following
        elif event == "ahead":
            batches = [share(n, rank, layout.world_size) for n in range(step, step + value)]
            for number, batch in enumerate(prefetch(batches, collection)):
                train_step(collection, batch)
                if number == value // 2:
                    saves.append(saved(collection, series))
            step += value
        elif event == "rows":
            name, first, count = value
            values = torch.full((count, next(t.dim for t in collection.tables if t.name == name)), float(step))
            collection.load_rows(name, first, values)
        elif event == "reset":
            collection.reset_parameters()
        elif event == "load":
            series.load(value)
        else:
            saves.append(saved(collection, series))
    series.close()
    collection.close()
    return saves


def saved(collection: EmbeddingCollection, series: CheckpointSeries) -> dict[str, Any]:
    made = series.save({"step": torch.tensor(collection.steps)})
    return {
        "number": made.number, "base": made.base, "rows": made.rows, "nbytes": made.nbytes, "removed": made.removed,
        "tables": whole(collection), "steps": collection.steps,
    }  # fmt: skip


def load(
    rank: int, layout: RankLayout, path: str, optimizer: str, numbers: list[int | None], more: dict[str, Any]
) -> list[dict[str, Any]]:
    """Load checkpoints over other values; return what was loaded, and the tables after more training."""
    blocks.MAX_WINDOW_BYTES = 200
    collection = made(layout, optimizer, 2, **more)
    series = CheckpointSeries(collection, path)
    offer(collection, Placement.empty().delta_to(random_placement(8, 30)))
    found = []
    for number in numbers:
        train_steps(collection, 100, 2)
        loaded = series.load(number)
        at_load = whole(collection)
        equal = train_steps(collection, 300, 2)
        found.append(
            {
                "number": loaded.number, "steps": loaded.steps, "state": int(loaded.state["step"]), "tables": at_load,
                "equal": equal, "interrupted": loaded.interrupted, "end": whole(collection),
            }
        )  # fmt: skip
    series.close()
    return found


def refused(rank: int, layout: RankLayout, path: str, number: int | None, names: tuple[str, ...]) -> tuple[str, bool]:
    """Return the error of loading a checkpoint, and whether the collection is unchanged."""
    collection = made(layout, "adam", 2, names=names)
    before = whole(collection)
    series = CheckpointSeries(collection, path)
    text = "loaded"
    try:
        series.load(number)
    except CheckpointError as error:
        text = str(error)
    after = whole(collection)
    series.close()
    return text, all(np.array_equal(before[key], after[key]) for key in before) and collection.steps == 0


def failing_save(rank: int, layout: RankLayout, path: str, where: str) -> dict[str, Any]:
    """Save, and again while one rank cannot write; then train on and save a third time."""
    blocks.MAX_WINDOW_BYTES = 300
    collection = made(layout, "adam", 1)
    series = CheckpointSeries(collection, path)
    train_steps(collection, 0, 1)
    first = saved(collection, series)
    train_steps(collection, 1, 1)

    def broken(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    failing = {
        "rows": (saved_rows.RowFileWriter, "write", 2),
        "complete": (series_directory.SeriesDirectory, "complete", 0),
        "begin": (series_directory.SeriesDirectory, "begin", 0),
    }[where]
    text = "saved"
    with mock.patch.object(*failing[:2], broken if rank == failing[2] else getattr(*failing[:2])):
        try:
            series.save()
        except CheckpointError as error:
            text = str(error)
    after_failure = sorted(entry.name for entry in Path(path).iterdir())
    train_steps(collection, 2, 1)
    last = saved(collection, series)
    series.close()
    return {"text": text, "saves": [first, last], "after": after_failure, "numbers": series.numbers()}


def end_while_saving(rank: int, layout: RankLayout, path: str, where: str) -> None:
    """End the process in the middle of the second save of a rank."""
    blocks.MAX_WINDOW_BYTES = 300
    collection = made(layout, "adam", 1)
    series = CheckpointSeries(collection, path)
    series.save({"step": torch.tensor(0)})
    train_steps(collection, 0, 1)

    def end(*_: object, **__: object) -> None:
        os._exit(3)

    failing = (saved_rows.RowFileWriter, "close") if where == "rows" else (Path, "rename")
    if rank == 0:
        mock.patch.object(*failing, end).start()
    series.save()
