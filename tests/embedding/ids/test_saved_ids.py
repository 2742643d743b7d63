"""Checkpoints of tables of unbounded ids, on real gloo ranks: loaded by another number of ranks, training goes on as if
it had not ended; in tables of other sizes the ids keep their rows that were used most and latest."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import flexd
from flexd.core.placement import Placement, RankLayout
from flexd.embedding.checkpoint import table_rows
from tests.support.collection_jobs import OPTIMIZERS, loss_of, offer, random_placement
from tests.support.rank_pool import Ranks, error_of

USERS, ITEMS, SHOPS = ("users", 140, 1), ("items", 200, 2), ("shops", 30, 0)
"""(Name, rows, look-ups after which an id has a row; 0: ids are rows.)"""
FOUR_RANKS = RankLayout(2, 2)
STEPS = 9


def made(layout: RankLayout, tables: Any, seed: int, **more: Any) -> flexd.EmbeddingCollection:
    table_rows.MAX_WINDOW_BYTES = 3_000
    listed = [
        flexd.EmbeddingTable(name, rows, 4, dtype="float64", ids="unbounded", admit_after=after)
        if after
        else flexd.EmbeddingTable(name, rows, 4, dtype="float64")
        for name, rows, after in tables
    ]
    return flexd.EmbeddingCollection(
        listed,
        optimizer=OPTIMIZERS["adam"],
        layout=layout,
        replica_slots=[20],
        average_gradients=False,
        seed=seed,
        **more,
    )


def train(collection: flexd.EmbeddingCollection, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        rng = np.random.default_rng(step)
        # Some ids come often, most once or twice.
        ids = {
            "users": rng.zipf(1.3, 60) * 1_000_003 % 400 - 200, "items": rng.zipf(1.2, 90) * 998_244_353 % 600,
            "shops": rng.integers(0, 30, 20), "new": rng.integers(0, 30, 20),
        }  # fmt: skip
        features = {}
        for name in (table.name for table in collection.tables):
            mine = torch.from_numpy(ids[name][collection.rank :: collection.layout.world_size].astype(np.int64))
            features[name] = flexd.Jagged(mine, torch.tensor([len(mine)]))
        loss = loss_of(collection(features))
        loss.backward()
        collection.optimizer.step()
        total = loss.detach().clone()
        collection.engine.groups.world.all_reduce(total)
        losses.append(float(total))
    return losses


def state_of(collection: flexd.EmbeddingCollection) -> dict[str, dict[int, list[float]]]:
    """Return of each table by id its row; the shared row as that of None, rows without ids left out."""
    found = {}
    for table in collection.tables:
        values = collection.gather_table(table.name).tolist()
        if table.ids == "rows":
            found[table.name] = dict(enumerate(values))
            continue
        ids, has = collection.ids_of(table.name, torch.arange(table.rows))
        assert not has[-1]
        found[table.name] = {int(ids[row]): values[row] for row in has.nonzero().view(-1).tolist()}
        found[table.name][None] = values[-1]
    return found


def rows_of(collection: flexd.EmbeddingCollection, name: str, ids: list[int]) -> list[int]:
    return collection.rows_of(name, torch.tensor(ids)).tolist()


def save(rank: int, layout: RankLayout, path: str) -> tuple[list[Any], list[float], Any]:
    """Save a checkpoint with all rows and two with what changed, the last one also as whole tables, and go on."""
    collection = made(layout, (USERS, ITEMS, SHOPS), 1, full_state_dict=True)
    offer(collection, Placement.empty().delta_to(random_placement(1, 30)))
    series, states = flexd.CheckpointSeries(collection, path, keep=9), []
    for number in range(3):
        train(collection, number * 2, 2)
        series.save(background=number == 1)
        states.append((state_of(collection), rows_of(collection, "users", list(range(-200, 200)))))
    assert series.numbers() == [1, 2, 3]
    dcp.save({"tables": flexd.ShardedState(collection)}, checkpoint_id=f"{path}/dcp")
    whole = collection.state_dict()
    if rank == 0:
        torch.save(whole, f"{path}/whole.pt")
    series.close()
    return states, train(collection, 6, STEPS - 6), state_of(collection)


def load(rank: int, layout: RankLayout, path: str, kind: str, number: int) -> tuple[Any, list[float], Any, list[bool]]:
    collection = made(layout, (SHOPS, ITEMS, USERS), 2, full_state_dict=kind == "whole")
    train(collection, 50, 2)
    series = flexd.CheckpointSeries(collection, path, keep=9)
    if kind == "series":
        series.load(number)
    elif kind == "dcp":
        dcp.load({"tables": flexd.ShardedState(collection)}, checkpoint_id=f"{path}/dcp")
    else:
        collection.load_state_dict(torch.load(f"{path}/whole.pt"))
    at_load = state_of(collection), rows_of(collection, "users", list(range(-200, 200)))
    losses = train(collection, 2 * number, STEPS - 2 * number)
    # What follows builds on what was loaded.
    saved, end = series.save(), state_of(collection)
    train(collection, 70, 1)
    series.load()
    series.close()
    return at_load, losses, end, [kind != "series" or saved.base == number, state_of(collection) == end]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("saved")
    return path, ranks(4).run(save, FOUR_RANKS, str(path))[0]


def close(one: dict[str, dict[int, list[float]]], other: dict[str, dict[int, list[float]]]) -> None:
    """Compare ids exactly and rows to rounding."""
    assert {name: rows.keys() for name, rows in one.items()} == {name: rows.keys() for name, rows in other.items()}
    for name, rows in one.items():
        for id_, row in rows.items():
            np.testing.assert_allclose(row, other[name][id_], rtol=0, atol=1e-9, err_msg=f"{name} {id_}")


@pytest.mark.parametrize(
    ("kind", "number", "layout"),
    [
        ("series", 1, RankLayout(2, 2)),
        ("series", 3, RankLayout(1, 1)),
        ("series", 3, RankLayout(3, 1)),
        ("dcp", 3, RankLayout(3, 1)),
        ("whole", 3, RankLayout(3, 1)),
    ],
)
def test_any_ranks_go_on_as_if_training_had_not_ended(
    ranks: Ranks, saved: tuple[Path, Any], layout: RankLayout, kind: str, number: int, tmp_path: Path
) -> None:
    path, (states, losses, end) = saved
    for one in path.iterdir():
        (tmp_path / one.name).symlink_to(one)
    for at_load, further, at_end, following in ranks(layout.world_size).run(load, layout, str(tmp_path), kind, number):
        assert at_load == states[number - 1]
        np.testing.assert_allclose(further[-len(losses) :], losses, rtol=1e-9)
        close(at_end, end)
        assert following == [True, True]


def load_changed(rank: int, layout: RankLayout, path: str) -> Any:
    """Load tables of fewer, and more, rows, of which one has other filters and one is new."""
    tables = (("users", 66, 2), ("items", 500, 1), ("new", 70, 1))
    collection = made(layout, tables, 3)
    train_of = [table.name for table in collection.tables]
    series = flexd.CheckpointSeries(collection, path)
    text = error_of(series.load)
    with (
        mock.patch("flexd.embedding.checkpoint.saved_ids.logger") as logger,
        mock.patch("flexd.embedding.checkpoint.series.logger") as of_series,
    ):
        series.load(changed_tables="init")
    warnings = [call.args[0] % call.args[1:] for log in (logger, of_series) for call in log.warning.call_args_list]
    series.close()
    return text, warnings, state_of(collection), train_of


def test_ids_keep_their_rows_in_tables_of_other_sizes(ranks: Ranks, saved: tuple[Path, Any]) -> None:
    path, (states, _, _) = saved
    before, _ = states[2]
    for rank, (text, warnings, now, _) in enumerate(ranks(3).run(load_changed, RankLayout(3, 1), str(path))):
        assert "140 x 4 float64 with adam, unbounded ids with admit_after 1 in the checkpoint and 66 x 4" in text
        assert now["items"] == before["items"], "more rows than before"
        assert now["new"].keys() == {None}
        assert len(now["users"]) == 66
        assert all(before["users"][id_] == row for id_, row in now["users"].items())
        if not rank:
            known = len(before["users"]) - 1
            assert f"table 'users': {known - 65} of {known} ids have no row any more" in warnings[0]


def unbounded_in_one(rank: int, layout: RankLayout, path: str) -> str:
    collection = made(layout, (("users", 140, 0), ITEMS, SHOPS), 3)
    series = flexd.CheckpointSeries(collection, path)
    return error_of(series.load, changed_tables="init")


def test_a_table_whose_ids_were_rows_is_refused(ranks: Ranks, saved: tuple[Path, Any]) -> None:
    for text in ranks(2).run(unbounded_in_one, RankLayout(2, 1), str(saved[0])):
        assert "table 'users' is 140 x 4 float64 with adam, unbounded ids" in text


def alone(rows: int, admit_after: int) -> flexd.EmbeddingCollection:
    table = flexd.EmbeddingTable("users", rows, 4, ids="unbounded", admit_after=admit_after)
    return flexd.EmbeddingCollection([table], layout=RankLayout(1, 1))


def look_up(collection: flexd.EmbeddingCollection, *ids: int) -> None:
    collection({"users": torch.tensor(ids)})["users"].values.sum().backward()
    collection.optimizer.step()


def test_an_increment_has_the_sets_that_changed_and_filters_are_among_them(tmp_path: Path) -> None:
    first, second = alone(100_000, 2), alone(100_000, 2)
    series = flexd.CheckpointSeries(first, tmp_path)
    whole = series.save()
    look_up(first, 1, 2, 2, 3)
    changed = series.save()
    assert whole.files[0].windows[1] == changed.files[0].windows[1] == 1
    assert changed.nbytes < 8_000 < whole.nbytes
    assert series.save().nbytes == 0
    flexd.CheckpointSeries(second, tmp_path).load()
    for name, column in first.engine.ids.slots.columns().items():
        if name != "counts":
            assert torch.equal(column[:-1], second.engine.ids.slots.columns()[name][:-1]), name
    look_up(second, 1, 4)
    assert second.rows_of("users", torch.tensor([1, 2, 4])).ge(0).tolist() == [True, True, False]


def test_in_fewer_rows_those_ids_stay_that_were_used_most_and_latest(tmp_path: Path) -> None:
    first, second = alone(65, 1), alone(9, 1)
    look_up(first, *[1] * 10_000)
    for step in range(1, 8):
        look_up(first, *range(step * 8, step * 8 + 8))
    flexd.CheckpointSeries(first, tmp_path).save()
    flexd.CheckpointSeries(second, tmp_path).load(changed_tables="init")
    kept, has = second.ids_of("users", torch.arange(9))
    assert has.tolist() == [True] * 8 + [False]
    assert len({1, *range(56, 64)} & set(kept[:8].tolist())) == 8
    assert 1 in kept.tolist()


def load_from_elsewhere(rank: int, layout: RankLayout) -> Any:
    """Load rows of ids beside those that were trained, and train some of them on."""
    collection = made(layout, (USERS, ITEMS, SHOPS), 4)
    train(collection, 0, 2)
    before = state_of(collection)
    ids = torch.arange(10_000, 10_024)[rank :: layout.world_size]
    values = ids.double().unsqueeze(1) + torch.arange(4).double()
    wrong = ""
    if layout.world_size > 1:
        wrong = error_of(collection.load_ids, "items", ids, values[:, : 3 + (rank != 1)])
    assert state_of(collection) == before
    rows = collection.load_ids("items", ids, values)
    assert torch.equal(rows, collection.rows_of("items", ids))
    found = collection({"items": flexd.Jagged(ids, torch.tensor([len(ids)]))})["items"].values
    found.sum().backward()
    collection.optimizer.step()
    return wrong, before, state_of(collection), torch.equal(found, values)


@pytest.mark.parametrize("layout", [RankLayout(1, 1), RankLayout(3, 1)])
def test_ids_from_elsewhere_have_their_rows_at_once(ranks: Ranks, layout: RankLayout) -> None:
    for wrong, before, after, at_once in ranks(layout.world_size).run(load_from_elsewhere, layout):
        if layout.world_size > 1:
            assert "load_ids of table 'items': ids of rank 1 are no int64 [n], or its values are no [n, 4]" in wrong
        assert at_once
        assert after["items"].keys() == before["items"].keys() | set(range(10_000, 10_024))
        for id_, row in before["items"].items():
            assert id_ is None or after["items"][id_] == row
        assert after["users"] == before["users"]


def load_others_by_dcp(rank: int, layout: RankLayout, path: str) -> Any:
    def load(tables: Any, planner: Any = None, trained: int = 0) -> Any:
        collection = made(layout, tables, 3)
        train(collection, 50, trained)
        dcp.load({"tables": flexd.ShardedState(collection)}, checkpoint_id=f"{path}/dcp", planner=planner)
        return state_of(collection)

    with pytest.raises(CheckpointException) as rows_then:
        load((("users", 140, 0), ITEMS, SHOPS))
    enlarged = error_of(load, (("users", 300, 1), ITEMS, SHOPS), flexd.ChangedTables())
    tables = (USERS, ITEMS, SHOPS, ("new", 70, 1))
    return str(rows_then.value), enlarged, [load(tables, flexd.ChangedTables(), trained) for trained in (0, 2)]


def test_whole_tables_of_other_sizes_are_refused_and_new_ones_begin(ranks: Ranks, saved: tuple[Path, Any]) -> None:
    path, (states, _, _) = saved
    for rows_then, enlarged, found in ranks(2).run(load_others_by_dcp, RankLayout(2, 1), str(path)):
        assert "fingerprint.users" in rows_then
        assert "table 'users' of unbounded ids has 140 rows in the checkpoint and 300 here" in enlarged
        assert "CheckpointSeries can load" in enlarged
        for loaded in found:
            assert loaded.pop("new").keys() == {None}, "also in a collection that was trained"
            assert loaded == states[2][0]
