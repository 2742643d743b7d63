"""Tables that are read only: no gradients, no state, no writes, and their copies are those of the rows."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

import flexd
from flexd.core.placement import Delta, RankLayout
from flexd.embedding.checkpoint.sharded_state import ShardedState
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import Adam
from flexd.embedding.store.slow.tiered_storage import slow_memory_report
from tests.support.rank_pool import Ranks, error_of

LAYOUT = RankLayout(2, 1)
ROWS = {"items": 60, "texts": 50, "users": 40}


def made(*read_only: str, names: tuple[str, ...] = tuple(ROWS), **settings: Any) -> EmbeddingCollection:
    tables = [EmbeddingTable(name, ROWS[name], 4, trainable=name not in read_only) for name in names]
    given = {"layout": LAYOUT, "exchange": "chain", "optimizer": Adam(0.1), "seed": 2}
    return EmbeddingCollection(tables, **(given | settings))


def batch(rank: int, step: int, names: tuple[str, ...] = tuple(ROWS)) -> dict[str, Jagged]:
    rng = np.random.default_rng([rank, step])
    every = {name: torch.from_numpy(rng.integers(0, rows, 9)) for name, rows in ROWS.items()}
    return {name: Jagged(every[name], torch.tensor([9])) for name in names}


def copy_every_row_of_a_third(collection: EmbeddingCollection) -> None:
    keys = np.arange(0, collection.keyspace.total_rows, 3, dtype=np.int64)
    collection.engine.inbox.offer(1, Delta(keys, np.zeros(len(keys), np.uint8), np.ones(len(keys), np.uint8)))


def sent(collection: EmbeddingCollection) -> int:
    return sum(value for name, value in collection.traffic.totals().items() if name.endswith("_bytes"))


def bytes_of_steps(rank: int, read_only: tuple[str, ...], names: tuple[str, ...]) -> list[int]:
    """Return the bytes that this rank sends in the backward pass and update of each step, with copies from the third
    on."""
    collection, found = made(*read_only, names=names), []
    for step in range(4):
        if step == 2:
            copy_every_row_of_a_third(collection)
        rows = collection(batch(rank, step, names))
        before = sent(collection)
        sum((part.values.square().sum() for part in rows.values()), torch.zeros((), requires_grad=True)).backward()
        collection.optimizer.step()
        found.append(sent(collection) - before)
    assert collection.placement_version == 1
    collection.close()
    return found


def test_no_byte_of_a_gradient_is_sent_for_read_only_rows(ranks: Ranks) -> None:
    everything, some, of_some, none = (
        ranks(2).run(bytes_of_steps, *given)
        for given in (
            ((), tuple(ROWS)), (("items", "texts"), tuple(ROWS)), ((), ("users",)), (tuple(ROWS), tuple(ROWS)),
        )
    )  # fmt: skip
    assert none == [[0] * 4] * 2
    assert some[0][:2] == of_some[0][:2], "without copies: as if the read-only tables did not exist"
    assert all(0 < few < all_of for few, all_of in zip(some[0], everything[0], strict=True))


def training(rank: int, path: str) -> dict[str, Any]:
    """Train beside two read-only tables, with copies, in tiered storage and with checkpoints of changed rows."""
    collection = made("items", "texts")
    slow = made("items", "texts", fast_memory_bytes=900)
    series = flexd.CheckpointSeries(collection, path)
    before = [{name: each.gather_table(name) for name in ROWS} for each in (collection, slow)]
    saves = [series.save()]
    for step in range(6):
        for each in (collection, slow):
            if step == 1:
                copy_every_row_of_a_third(each)
            rows = each(batch(rank, step))
            assert [rows[name].values.requires_grad for name in ROWS] == [False, False, True]
            sum(part.values.square().sum() for part in rows.values()).backward()
            each.optimizer.step()
            if step == 0:
                slow_memory_report(slow.engine.stores[:1])
    saves.append(series.save())
    return {
        "equal": [
            {name: torch.equal(each.gather_table(name), table) for name, table in tables.items()}
            for each, tables in zip((collection, slow), before, strict=True)
        ],
        "copies": [each.replicas_bit_equal() for each in (collection, slow)],
        "state": [store.state.shape[1] for store in collection.engine.stores],
        "of_tables": [store.group.tables for store in collection.engine.stores],
        "written": slow_memory_report(slow.engine.stores[:1]).bytes_written,
        "saved": [sum(file.rows for file in saved.files) for saved in saves],
        "steps": collection.steps, "tiered": slow.engine.stores[0].tier is not None,
    }  # fmt: skip


def test_rows_stay_as_they_are_without_state_and_without_writes(ranks: Ranks, tmp_path: Path) -> None:
    for result in ranks(2).run(training, str(tmp_path)):
        assert result["equal"] == [{"items": True, "texts": True, "users": False}] * 2
        assert result["copies"] == [True, True]
        assert (result["of_tables"], result["state"]) == ([(0, 1), (2,)], [0, 8])
        assert (result["tiered"], result["written"]) == (True, 0)
        first, second = result["saved"]
        assert (first, 0 < second <= ROWS["users"]) == (sum(ROWS.values()), True)
        assert result["steps"] == 6


def steps_without_training(rank: int) -> tuple[int, int]:
    collection = made(*ROWS)
    batches = [batch(rank, step) for step in range(5)]
    for given in flexd.prefetch(batches, collection, features=lambda features: features):
        assert not any(part.values.requires_grad for part in collection(given).values())
    with torch.no_grad():
        collection(batches[0])
    return collection.steps, len(collection.engine.passes)


def test_look_ups_are_steps_where_nothing_is_trained(ranks: Ranks) -> None:
    assert ranks(2).run(steps_without_training) == [(5, 0)] * 2


def refused(rank: int) -> tuple[str, bool]:
    trained, frozen = made(), made("texts")
    before = frozen.gather_table("texts")
    state = ShardedState(trained).state_dict()
    text = error_of(ShardedState(frozen).load_state_dict, state)
    return text, torch.equal(frozen.gather_table("texts"), before)


def test_whole_tables_with_state_of_a_read_only_table_are_refused_by_name(ranks: Ranks) -> None:
    for text, unchanged in ranks(2).run(refused):
        assert "texts" in text
        assert unchanged
