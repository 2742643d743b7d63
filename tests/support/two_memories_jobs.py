"""Jobs of ranks whose home rows are in two memories."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from flexd.core.errors import CollectiveError, FlexdError
from flexd.core.layout import RankLayout
from flexd.embedding.checkpoint import checkpoint
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.row_optimizers import Adam
from flexd.embedding.store.slow.block_file import PAGE_BYTES
from flexd.embedding.store.slow.kernel_queue import KernelQueue
from tests.support.checkpoint_jobs import as_numpy, train_steps
from tests.support.collection_jobs import tables

FRAMES_OF_A_FEW = 2_000
"""Bytes of frames for a few rows of each dim-group."""


def made(
    layout: RankLayout, directory: str | None, fast_memory_bytes: int | None, seed: int = 3, dtype: str = "float32"
) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables(dtype), optimizer=Adam(0.05), layout=layout, average_gradients=False, seed=seed,
        fast_memory_bytes=fast_memory_bytes, slow_memory_dir=directory,
    )  # fmt: skip


def both(rank: int, layout: RankLayout, path: str, dtype: str) -> dict[str, Any]:
    """Train, save and load with rows in two memories and with all rows fast; return what differs."""
    with tempfile.TemporaryDirectory() as directory:
        slow, fast = (made(layout, *where, dtype=dtype) for where in ((directory, FRAMES_OF_A_FEW), (None, None)))
        frames = [(store.tier.frames, store.home_rows) for store in slow.engine.stores if store.tier is not None]
        for collection in (slow, fast):
            train_steps(collection, 0, 5)
        after = [as_numpy(checkpoint.whole_state_dict(each)) for each in (slow, fast)]
        checkpoint.save_checkpoint(slow, path)
        collections = [
            made(layout, None, None, 8, dtype), made(layout, directory + "/again", FRAMES_OF_A_FEW, 9, dtype)
        ]  # fmt: skip
        loaded = []
        for collection in collections:
            checkpoint.load_checkpoint(collection, path)
            loaded.append(as_numpy(checkpoint.whole_state_dict(collection)))
        local = {key: value.clone() for key, value in slow.state_dict().items()}
        rows = torch.full((4, slow.tables[0].dim), 2.5)
        for each in (slow, fast):
            each.load_rows(slow.tables[0].name, 10, rows)
        pretrained = [each.gather_table(slow.tables[0].name).double().numpy() for each in (slow, fast)]
        slow.load_state_dict(local)
        again = as_numpy(checkpoint.whole_state_dict(slow))
        memory = slow.memory().home_bytes, fast.memory().home_bytes
        slow.reset_parameters()
        initial = [(slow.gather_table(t.name), slow.initial_table(t.name)) for t in slow.tables]
        for each in (slow, fast, *collections):
            each.close()
        left = [file.name for file in Path(directory).rglob("*") if file.is_file()]
    return {
        "frames": frames, "after": _differ(*after), "loaded": [_differ(after[0], each) for each in loaded],
        "pretrained": not np.array_equal(*pretrained), "again": _differ(after[0], again), "memory": memory,
        "initial": not all(torch.equal(*each) for each in initial), "left": left,
    }  # fmt: skip


def _differ(some: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> list[str]:
    return [key for key in some if some[key].tobytes() != others[key].tobytes()]


def fail_the_disk(rank: int, layout: RankLayout, failing: int, fault: str) -> tuple[str, str]:
    """Train until the disk of one rank fails; return the type and the text of the error."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as patches:
        collection = made(layout, directory, FRAMES_OF_A_FEW)
        try:
            with collection:
                train_steps(collection, 0, 4)
                if rank == failing:
                    _let_fail(list(Path(directory).iterdir()), fault, patches)
                train_steps(collection, 4, 20)
        except (FlexdError, CollectiveError) as error:
            return type(error).__name__, str(error)
    return "", ""


def _let_fail(files: list[Path], fault: str, patches: ExitStack) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def slow(*_: object, **__: object) -> None:
        return None

    for file in files:
        if fault == "removed":
            file.unlink()
        elif fault == "cut":
            os.truncate(file, PAGE_BYTES)
        elif fault == "damaged":
            file.write_bytes(b"\1" * file.stat().st_size)
    if fault == "full":
        refused = np.full(1, -errno.ENOSPC)
        run = KernelQueue.run

        def no_room(queue: KernelQueue, *given: Any, writes: bool, **named: Any) -> Any:
            return refused.repeat(len(given[1])) if writes else run(queue, *given, writes=writes, **named)

        patches.enter_context(mock.patch.object(KernelQueue, "run", no_room))
        patches.enter_context(mock.patch.object(os, "pwritev", full))
    elif fault == "slow":
        patches.enter_context(mock.patch.object(KernelQueue, "run", slow))  # did not end within the deadline
