"""Checkpoints that are written while training goes on: exact, one at a time, and never half."""

import os
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import flexd
from flexd.core.placement import Placement, RankLayout
from flexd.embedding.checkpoint import saved_rows, table_rows
from flexd.embedding.collection import EmbeddingCollection
from tests.support.collection_jobs import OPTIMIZERS, offer, random_placement, tables, train_steps, whole
from tests.support.forked import Forked
from tests.support.rank_pool import Ranks, error_of
from tests.support.until import until

FOUR_RANKS = RankLayout(2, 2)
Tables = dict[str, np.ndarray]


def make(layout: RankLayout, seed: int, fast_memory_bytes: int | None = None) -> EmbeddingCollection:
    table_rows.MAX_WINDOW_BYTES = 1_000
    return EmbeddingCollection(
        tables(), optimizer=OPTIMIZERS["adam"], layout=layout, average_gradients=False, replica_slots=[61, 23, 3],
        seed=seed, fast_memory_bytes=fast_memory_bytes,
    )  # fmt: skip


class Held:
    """Lets writing threads wait, until ``release``, before their file is on the disk."""

    def __init__(self) -> None:
        self._event, sync = threading.Event(), os.fsync

        def fsync(file: int) -> None:
            assert self._event.wait(60)
            sync(file)

        self._patch = mock.patch.object(saved_rows.os, "fsync", fsync)

    def __enter__(self) -> "Held":
        self._patch.start()
        return self

    def release(self) -> None:
        self._event.set()

    def __exit__(self, *_: object) -> None:
        self.release()
        self._patch.stop()


def run(rank: int, layout: RankLayout, path: str, fast_memory_bytes: int | None) -> list[Tables]:
    """Save in the background, each time with training during the save; return the tables at the calls."""
    collection = make(layout, 1, fast_memory_bytes)
    offer(collection, Placement.empty().delta_to(random_placement(2, 40, layout)))
    series, saved = flexd.CheckpointSeries(collection, path, whole_every=2), []
    assert series.wait() is None
    for step in range(4):
        train_steps(collection, 2 * step, 1)
        saved.append(whole(collection))
        # Held would hold what is left of the one before, for which the save waits.
        until(lambda number=step: not number or number in series.numbers(), 45, series.numbers)
        with Held() as held:
            assert series.save({"step": torch.tensor(step)}, background=True) is None
            train_steps(collection, 2 * step + 1, 1)
            assert not np.array_equal(whole(collection)["embeddings.item.weight"], saved[-1]["embeddings.item.weight"])
            text = error_of(series.wait, timeout_seconds=0.05)
            assert "is still being written after 0 s" in text or "refused the checkpoint" in text
            assert series.numbers() == list(range(max(1, step - 2), step + 1)), "no half of it can be loaded"
            held.release()
            if step % 2:  # else the next save waits for it
                assert series.wait().steps == 2 * step + 1
    series.close()
    return saved


def load(rank: int, layout: RankLayout, path: str, number: int) -> tuple[Tables, int]:
    collection = make(layout, 2)
    series = flexd.CheckpointSeries(collection, path)
    loaded = series.load(number)
    series.close()
    return whole(collection), int(loaded.state["step"])


@pytest.mark.parametrize("fast_memory_bytes", [None, 2_000])
def test_it_has_the_rows_of_the_call_while_training_goes_on(
    ranks: Ranks, tmp_path: Path, fast_memory_bytes: int | None
) -> None:
    saved = ranks(4).run(run, FOUR_RANKS, str(tmp_path), fast_memory_bytes)[0]
    assert sorted(path.name for path in (tmp_path / "save-00000004").iterdir()) == [
        "manifest.json", *(f"rank{rank}.rows" for rank in range(4)), "state.pt",
    ]  # fmt: skip
    for step in (1, 2, 3):
        (loaded, state), *_ = ranks(2).run(load, RankLayout(1, 2), str(tmp_path), step + 1)
        assert state == step
        assert all(np.array_equal(loaded[key], value) for key, value in saved[step].items())


def failing(rank: int, layout: RankLayout, path: str, way: str) -> tuple[str, list[int], Tables]:
    """Let a rank fail in the background; return the error of the next call, and what is saved after it."""
    collection = make(layout, 1)
    series = flexd.CheckpointSeries(collection, path)
    train_steps(collection, 0, 1)
    series.save({"step": torch.tensor(0)})
    train_steps(collection, 1, 1)
    broken = mock.Mock(side_effect=OSError(28, "No space left on device"))
    target, name = (saved_rows, "write_window") if way == "rows" else (saved_rows.SeriesDirectory, "complete")
    with mock.patch.object(target, name, broken if rank == (2 if way == "rows" else 0) else getattr(target, name)):
        series.save({"step": torch.tensor(1)}, background=True)
        text = error_of(series.save if way == "rows" else series.wait)
    assert series.wait() is None
    series.save({"step": torch.tensor(1)}, background=True)
    series.wait()
    series.close()
    return text, series.numbers(), whole(collection)


@pytest.mark.parametrize("way", ["rows", "complete"])
def test_a_rank_that_cannot_write_is_named_at_the_next_call_and_no_row_is_lost(
    ranks: Ranks, tmp_path: Path, way: str
) -> None:
    results = ranks(4).run(failing, FOUR_RANKS, str(tmp_path), way)
    odd = 2 if way == "rows" else 0
    assert "was not written: cannot write" in results[odd][0]
    assert "No space left on device - make room" in results[odd][0]
    assert all(text for text, *_ in results)
    (loaded, state), *_ = ranks(1).run(load, RankLayout(1, 1), str(tmp_path), results[0][1][-1])
    assert state == 1
    assert all(np.array_equal(loaded[key], value) for key, value in results[0][2].items())


def end_while_saving(rank: int, layout: RankLayout, path: str) -> None:
    collection = make(layout, 1)
    series = flexd.CheckpointSeries(collection, path)
    series.save({"step": torch.tensor(0)})
    train_steps(collection, 0, 1)
    mock.patch.object(saved_rows.os, "fsync", lambda _: os._exit(3)).start()  # noqa: PT008 - it does not return
    series.save({"step": torch.tensor(1)}, background=True)
    threading.Event().wait(60)


def test_a_crash_in_the_middle_leaves_the_one_before(tmp_path: Path) -> None:
    path = str(tmp_path / "series")
    ended = Forked(end_while_saving, 0, RankLayout(1, 1), path, directory=tmp_path).wait()
    assert ended.returncode == 3, ended.stderr
    collection = make(RankLayout(1, 1), 7)
    series = flexd.CheckpointSeries(collection, path)
    loaded = series.load()
    assert (loaded.number, loaded.steps, loaded.interrupted) == (1, 0, (2,))
    series.close()
