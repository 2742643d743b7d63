"""Series of checkpoints on real gloo ranks: rows that changed since the last one, rotation, crashes and damage."""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flexd.core.errors import CheckpointError
from flexd.core.placement import Placement, RankLayout
from flexd.embedding.checkpoint import saved_rows, table_rows
from flexd.embedding.checkpoint.series import CheckpointSeries
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.prefetch.loop import prefetch
from flexd.embedding.row_optimizers import RowOptimizer
from tests.support.collection_jobs import (
    OPTIMIZERS,
    offer,
    random_placement,
    share,
    tables,
    train_step,
    train_steps,
    whole,
)
from tests.support.forked import Forked
from tests.support.rank_pool import Ranks, error_of

Events = list[tuple[str, Any]]
"""Events of a job: ("train", steps), ("move", seed), ("ahead", steps), ("rows", (table, first, count)),
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
    table_rows.MAX_WINDOW_BYTES = 1_000
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
        "number": made.number, "base": made.base, "rows": made.rows, "nbytes": made.nbytes,
        "tables": whole(collection), "steps": collection.steps,
    }  # fmt: skip


def load(
    rank: int, layout: RankLayout, path: str, optimizer: str, numbers: list[int | None], more: dict[str, Any]
) -> list[dict[str, Any]]:
    """Load checkpoints over other values; return what was loaded, and the tables after more training."""
    table_rows.MAX_WINDOW_BYTES = 700
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
    text = error_of(series.load, number)
    after = whole(collection)
    series.close()
    return text, all(np.array_equal(before[key], after[key]) for key in before) and collection.steps == 0


def failing_save(rank: int, layout: RankLayout, path: str, where: str) -> dict[str, Any]:
    """Save, and again while one rank cannot write; then train on and save a third time."""
    table_rows.MAX_WINDOW_BYTES = 1_000
    collection = made(layout, "adam", 1)
    series = CheckpointSeries(collection, path)
    train_steps(collection, 0, 1)
    first = saved(collection, series)
    train_steps(collection, 1, 1)

    def broken(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    failing = {
        "rows": (saved_rows, "write_window", 2),
        "complete": (saved_rows.SeriesDirectory, "complete", 0),
        "begin": (saved_rows.SeriesDirectory, "begin", 0),
    }[where]
    with mock.patch.object(*failing[:2], broken if rank == failing[2] else getattr(*failing[:2])):
        text = error_of(series.save)
    after_failure = sorted(entry.name for entry in Path(path).iterdir())
    train_steps(collection, 2, 1)
    last = saved(collection, series)
    series.close()
    return {"text": text, "saves": [first, last], "after": after_failure, "numbers": series.numbers()}


def end_while_saving(rank: int, layout: RankLayout, path: str, where: str) -> None:
    """End the process in the middle of the second save of a rank."""
    table_rows.MAX_WINDOW_BYTES = 1_000
    collection = made(layout, "adam", 1)
    series = CheckpointSeries(collection, path)
    series.save({"step": torch.tensor(0)})
    train_steps(collection, 0, 1)

    def end(*_: object, **__: object) -> None:
        os._exit(3)

    failing = (saved_rows.os, "fsync") if where == "rows" else (Path, "rename")
    if rank == 0:
        mock.patch.object(*failing, end).start()
    series.save()


FOUR_RANKS = RankLayout(2, 2)


def check(loaded: list[dict[str, Any]], saves: list[dict[str, Any]]) -> None:
    for of_load, of_save in zip(loaded, saves, strict=True):
        assert (of_load["number"], of_load["steps"]) == (of_save["number"], of_save["steps"])
        assert of_load["state"] == of_save["steps"], "the state of rank 0"
        assert of_load["equal"], "a replica differed from its home copy"
        assert set(of_load["tables"]) == set(of_save["tables"])
        for key, expected in of_save["tables"].items():
            np.testing.assert_array_equal(of_load["tables"][key], expected, err_msg=key)


EVENTS = [
    ("train", 2), ("save", None), ("move", 1), ("train", 1), ("save", None), ("move", 2), ("rows", ("item", 3, 9)),
    ("save", None), ("save", None), ("move", 3), ("train", 2),
]  # fmt: skip


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("train"), st.integers(1, 2)),
            st.tuples(st.just("move"), st.integers(0, 50)),
            st.tuples(st.just("ahead"), st.integers(2, 4)),
            st.tuples(st.just("rows"), st.tuples(st.sampled_from(["item", "odd"]), st.integers(0, 9), st.just(5))),
            st.tuples(st.just("reset"), st.none()),
            st.tuples(st.just("save"), st.none()),
        ),
        min_size=3,
        max_size=9,
    ),
    st.sampled_from(["adam", "sgd", "rowwise_adagrad"]),
    st.sampled_from([None, 2_000]),
    st.integers(1, 4),
    st.sampled_from([RankLayout(1, 1), RankLayout(2, 1), RankLayout(2, 2)]),
    st.sampled_from(["chain", "direct"]),
)
@example(EVENTS, "adam", 2_000, 4, RankLayout(1, 2), "chain")
@example(EVENTS, "rowwise_adagrad", None, 4, RankLayout(3, 1), "direct")
def test_any_series_is_exact(
    ranks: Ranks, events: Any, optimizer: str, fast_memory_bytes: int | None, whole_every: int, layout: RankLayout,
    exchange: str,
) -> None:  # fmt: skip
    """It is loaded by any ranks, with tables in another order, and with rows in tiered storage on either side."""
    more = {"fast_memory_bytes": fast_memory_bytes, "exchange": exchange}
    loading = {"fast_memory_bytes": 2_000 if exchange == "direct" else None, "names": ("tiny", "item", "odd")}
    with tempfile.TemporaryDirectory() as path:
        saves = ranks(4).run(
            run, FOUR_RANKS, path, optimizer, [*events, ("save", None)], more,
            {"keep": 20, "whole_every": whole_every},
        )[0]  # fmt: skip
        numbers = [save["number"] for save in saves]
        for result in ranks(layout.world_size).run(load, layout, path, optimizer, numbers, loading):
            check(result, saves)


def test_the_newest_are_kept_with_what_they_build_on(ranks: Ranks, tmp_path: Path) -> None:
    events = [*(8 * [("train", 1), ("save", None)]), ("rows", ("item", 3, 9)), ("save", None)]
    saves = ranks(4).run(run, FOUR_RANKS, str(tmp_path), "adam", events, {}, {"keep": 2, "whole_every": 3})[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"save-{number:08}" for number in (7, 8, 9)]
    assert [save["base"] for save in saves] == [None, 1, 2, None, 4, 5, None, 7, 8]
    assert 0 < saves[1]["rows"] < saves[0]["rows"] == saves[3]["rows"] == 87
    assert saves[8]["rows"] == 9, "nothing but what load_rows set"
    assert "ids" not in json.loads((tmp_path / "save-00000009" / "manifest.json").read_text()), (
        "older releases refuse it"
    )
    for result in ranks(1).run(load, RankLayout(1, 1), str(tmp_path), "adam", [8, None], {}):
        check(result, saves[7:])


@pytest.fixture
def three(ranks: Ranks, tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A series of one checkpoint with all rows and two with changes."""
    events = [event for _ in range(3) for event in (("train", 1), ("save", None))]
    return tmp_path, ranks(4).run(run, FOUR_RANKS, str(tmp_path), "adam", events, {}, {})[0]


NAMES = ("item", "odd", "tiny")


FILE, MANIFEST, STATE = "save-00000002/rank1.rows", "save-00000003/manifest.json", "save-00000003/state.pt"


def one_bit(content: bytes) -> bytes:
    at = len(content) * 2 // 3
    return content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]


def first_window(content: bytes) -> bytes:
    return content[: saved_rows._read_window(Path("of a file"), io.BytesIO(content), len(content))[1]]


@pytest.mark.parametrize(
    ("file", "damaged", "cause"),
    [
        ("save-00000001", None, "save-00000003 needs save-00000001, which is not there: it was rotated away or"),
        (
            "save-00000002/manifest.json", lambda content: content.replace(b'"identity": "', b'"identity": "f'),
            "save-00000003 needs save-00000002, and the one that is there is another",
        ),
        (FILE, None, f"{FILE}: cannot be read"),
        (FILE, lambda content: content[: len(content) // 2], f"{FILE} ends too early"),
        (FILE, first_window, f"{FILE} has "),
        (FILE, one_bit, f"{FILE} has rows that differ from the saved ones (checksum)"),
        (MANIFEST, lambda content: content[:-30], f"{MANIFEST} cannot be read (JSONDecodeError"),
        (STATE, lambda content: b"no state", f"{STATE} cannot be read"),
    ],
)  # fmt: skip
def test_damage_is_named_and_nothing_is_loaded(
    ranks: Ranks, three: tuple[Path, list[dict[str, Any]]], file: str, damaged: Callable[[bytes], bytes] | None,
    cause: str,
) -> None:  # fmt: skip
    path, saves = three
    if damaged is None:
        (shutil.rmtree if (path / file).is_dir() else os.unlink)(path / file)
    else:
        (path / file).write_bytes(damaged((path / file).read_bytes()))
    texts = ranks(2).run(refused, RankLayout(2, 1), str(path), None, NAMES)
    assert any(cause in text for text, _ in texts), texts
    for text, unchanged in texts:
        assert cause in text or "refused the checkpoint" in text
        assert unchanged
    if file in (MANIFEST, STATE):
        check(ranks(1).run(load, RankLayout(1, 1), str(path), "adam", [2], {})[0], saves[1:2])
    if file == MANIFEST:
        assert "load one of save-00000001, save-00000002" in texts[0][0]


def test_other_tables_and_missing_checkpoints_are_named(
    ranks: Ranks, three: tuple[Path, list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, empty = str(three[0]), str(tmp_path_factory.mktemp("empty"))
    for where, number, names, cause in (
        (path, None, ("item", "odd"), "table 'tiny' is unknown to the collection"),
        (path, 7, NAMES, "has no complete save-00000007 - load one of save-00000001, save-00000002, save-00000003"),
        (empty, None, NAMES, "has no complete checkpoint - load a checkpoint of another directory"),
    ):
        texts = ranks(2).run(refused, RankLayout(2, 1), where, number, names)
        assert cause in texts[0][0]
        assert all(unchanged for _, unchanged in texts)


@pytest.mark.parametrize(("where", "failing"), [("rows", 2), ("complete", 0), ("begin", 0)])
def test_a_save_that_fails_on_a_rank_loses_no_rows(ranks: Ranks, tmp_path: Path, where: str, failing: int) -> None:
    results = ranks(4).run(failing_save, FOUR_RANKS, str(tmp_path), where)
    for rank, result in enumerate(results):
        if rank == failing:
            assert "No space left on device - make room" in result["text"]
        else:
            assert f"rank {failing} refused" in result["text"]
    assert "save-00000002" not in results[0]["after"]
    saves = results[0]["saves"]
    assert [save["base"] for save in saves] == [None, 1]
    check(
        ranks(1).run(load, RankLayout(1, 1), str(tmp_path), "adam", [save["number"] for save in saves], {})[0],
        saves,
    )


@pytest.mark.parametrize("where", ["rows", "rename"])
def test_a_job_that_ends_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path, where: str) -> None:
    """A process of its own, because it ends."""
    path = str(tmp_path / "series")
    ended = Forked(end_while_saving, 0, RankLayout(1, 1), path, where, directory=tmp_path).wait()
    assert ended.returncode == 3, ended.stderr
    collection = made(RankLayout(1, 1), "adam", 7)
    series = CheckpointSeries(collection, path)
    loaded = series.load()
    assert (loaded.number, loaded.steps, loaded.interrupted) == (1, 0, (2,))
    expected = made(RankLayout(1, 1), "adam", 1)
    assert all(torch.equal(collection.gather_table(name), expected.gather_table(name)) for name in NAMES)
    with pytest.raises(CheckpointError, match=r"has no complete save-00000002; save-00000002 was being written"):
        series.load(2)
    assert series.save().number == 3
    assert sorted(entry.name for entry in Path(path).iterdir()) == ["save-00000001", "save-00000003"]
    series.close()
