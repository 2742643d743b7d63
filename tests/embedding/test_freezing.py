"""Tables that are frozen and unfrozen between two steps."""

from pathlib import Path
from typing import Any

import torch

import flexd
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.store.slow.tiered_storage import slow_memory_report
from tests.embedding.test_read_only import LAYOUT, ROWS, batch, copy_every_row_of_a_third, made, sent
from tests.support.rank_pool import Ranks, error_of


def step(collection: EmbeddingCollection, rank: int, number: int) -> int:
    """Train one step; return the bytes that this rank sends after its look-up."""
    rows = collection(batch(rank, number))
    before = sent(collection)
    sum((part.values.square().sum() for part in rows.values()), torch.zeros((), requires_grad=True)).backward()
    collection.optimizer.step()
    return sent(collection) - before


def states(collection: EmbeddingCollection) -> dict[str, int]:
    """Return the bytes of optimizer state of each table's dim-group."""
    return {
        collection.tables[table].name: store.state.shape[0] * store.state.shape[1]
        for store in collection.engine.stores
        for table in store.group.tables
    }


def memory(rank: int) -> dict[str, Any]:
    collection, as_made = made(), made("items", "texts")
    copy_every_row_of_a_third(collection)
    copy_every_row_of_a_third(as_made)
    for number in range(3):
        step(collection, rank, number)
    before = {name: collection.gather_table(name) for name in ROWS}
    held = collection.memory()
    collection.freeze("items", "texts")
    frozen = collection.memory()
    for name in ROWS:
        as_made.load_rows(name, 0, before[name])
    bytes_sent = [step(each, rank, 3) for each in (collection, as_made)]
    found = {
        "state": [states(each) for each in (collection, as_made)],
        "freed": held.home_bytes - frozen.home_bytes,
        "home_bytes": [frozen.home_bytes, as_made.memory().home_bytes],
        "sent": bytes_sent,
        "equal": {name: torch.equal(collection.gather_table(name), before[name]) for name in ROWS},
        "copies": collection.replicas_bit_equal(),
        "trainable": [table.trainable for table in collection.tables],
    }
    collection.unfreeze("items", "texts")
    fresh = [bool((store.state[: store.home_rows] == 0).all()) for store in collection.engine.stores]
    return found | {"one_group": len(collection.engine.stores), "fresh": fresh, "after": states(collection)}


def test_state_is_freed_and_made_anew_and_nothing_of_a_frozen_table_is_sent(ranks: Ranks) -> None:
    for found in ranks(2).run(memory):
        assert found["state"][0] == found["state"][1]
        assert (found["state"][0]["items"], found["state"][0]["texts"]) == (0, 0)
        assert found["freed"] > 0
        assert found["home_bytes"][0] == found["home_bytes"][1]
        assert found["sent"][0] == found["sent"][1]
        assert found["equal"] == {"items": True, "texts": True, "users": False}
        assert found["copies"]
        assert found["trainable"] == [False, False, True]
        assert (found["one_group"], found["fresh"]) == (1, [False])
        assert len(set(found["after"].values())) == 1
        assert found["after"]["items"] > 0


def quantized() -> EmbeddingCollection:
    tables = [
        EmbeddingTable(name, rows, 4, **({"dtype": "int8", "trainable": False} if name == "items" else {}))
        for name, rows in ROWS.items()
    ]
    return EmbeddingCollection(tables, layout=LAYOUT, exchange="chain")


def misuse(rank: int, what: str) -> tuple[str, list[str]]:
    collection = quantized() if what == "int8" else made()
    copy_every_row_of_a_third(collection)
    step(collection, rank, 0)  # the next look-up applies the chunk
    if what == "names":
        error = error_of(collection.freeze, *(["items"] if rank else ["items", "users"]))
    elif what == "one rank":
        error = error_of(collection.freeze, "texts") if rank else error_of(collection, batch(rank, 1))
    elif what == "unknown":
        error = error_of(collection.unfreeze, "item")
    elif what == "int8":
        error = error_of(collection.unfreeze, "items", "texts")
    elif what == "waits":
        rows = collection(batch(rank, 1))
        rows["users"].values.sum().backward()
        error = error_of(collection.freeze, "users")
        collection.optimizer.step()
    elif what == "memory":
        made_rows = type(collection.engine.rows).regrouped

        def fails(self: Any, *arguments: Any) -> Any:
            if rank:
                raise torch.OutOfMemoryError("no room")
            return made_rows(self, *arguments)

        type(collection.engine.rows).regrouped = fails  # type: ignore[method-assign]
        try:
            error = error_of(collection.freeze, "texts")
        finally:
            type(collection.engine.rows).regrouped = made_rows  # type: ignore[method-assign]
    trained = [table.name for table in collection.tables if table.trainable]
    step(collection, rank, 2)  # goes on
    assert collection.replicas_bit_equal()
    collection.close()
    return error, trained


def test_what_ranks_do_differently_is_refused_on_every_rank_and_changes_nothing(ranks: Ranks) -> None:
    expected = {
        "names": ("users", "same tables on every rank"),
        "one rank": ("'texts'", "same tables on every rank"),
        "unknown": ("no table item", "one of items"),
        "int8": ("int8 cannot be trained: items", "another dtype"),
        "waits": ("'users'", "optimizer.step()"),
        "memory": ("'texts'", "memory"),
    }
    for what, texts in expected.items():
        for error, trained in ranks(2).run(misuse, what):
            assert all(text in error for text in texts), (what, error)
            assert trained == [name for name in ROWS if what != "int8" or name != "items"]


def embedding(rank: int) -> list[bool]:
    found, items = [], flexd.Embedding(30, 4, name="items", layout=LAYOUT)
    for trains in (True, False, True):
        items.requires_grad_(trains)
        found.append(items(torch.arange(3)).requires_grad)
        items.optimizer.step()
    return found


def test_an_embedding_is_frozen_by_requires_grad(ranks: Ranks) -> None:
    assert ranks(2).run(embedding) == [[True, False, True]] * 2


def slow(rank: int) -> tuple[int, bool, list[bool]]:
    """Freeze all tables of a collection in tiered storage: no cold row is written any more."""
    collection = made(fast_memory_bytes=900)
    for number in range(3):
        step(collection, rank, number)
    before = {name: collection.gather_table(name) for name in ROWS}
    collection.freeze(*ROWS)
    slow_memory_report(collection.engine.stores)
    for number in range(3, 9):
        collection(batch(rank, number))
    written = slow_memory_report(collection.engine.stores).bytes_written
    is_slow = collection.engine.stores[0].tier is not None
    return written, is_slow, [torch.equal(collection.gather_table(name), table) for name, table in before.items()]


def test_cold_rows_of_frozen_tables_are_not_written(ranks: Ranks) -> None:
    assert ranks(2).run(slow) == [(0, True, [True] * 3)] * 2


def series(rank: int, path: str) -> dict[str, Any]:
    """Save before and after a freeze and an unfreeze; load each checkpoint with other read-only tables."""
    collection, found = made(), {}
    saving = flexd.CheckpointSeries(collection, path)
    for number, change in enumerate((None, collection.freeze, collection.unfreeze)):
        if change is not None:
            change("texts")
        step(collection, rank, number)
        saving.save()
        tables = {name: collection.gather_table(name) for name in ROWS}
        for read_only in ((), ("texts",)):
            loaded = made(*read_only, seed=5)
            flexd.CheckpointSeries(loaded, path).load()
            equal = all(torch.equal(loaded.gather_table(name), table) for name, table in tables.items())
            store = loaded.engine.stores[int(loaded.keyspace.group_of_table[1])]
            run = loaded.engine.homes.run(1, rank)
            found[number, bool(read_only)] = equal, bool(store.state[run.slots].any())
    return found


def test_a_checkpoint_with_other_read_only_tables_loads_with_fresh_state(ranks: Ranks, tmp_path: Path) -> None:
    trained = {0: True, 1: False, 2: True}
    for found in ranks(2).run(series, str(tmp_path)):
        assert found == {
            (number, read_only): (True, trained[number] and not read_only)
            for number in trained
            for read_only in (False, True)
        }


def whole_tables(rank: int) -> list[tuple[bool, bool, bool]]:
    """Load the whole tables of a collection where other tables are read only, both ways."""
    trained, frozen, found = made(full_state_dict=True), made("texts", full_state_dict=True), []
    for source, target in ((trained, frozen), (frozen, trained)):
        step(source, rank, 0)
        step(target, rank, 1)
        shared = [source.state_dict()]
        torch.distributed.broadcast_object_list(shared, 0)
        missing = target.load_state_dict(dict(shared[0])).missing_keys
        equal = all(torch.equal(source.gather_table(name), target.gather_table(name)) for name in ROWS)
        store = target.engine.stores[-1] if target is frozen else target.engine.stores[0]
        texts = target.engine.homes.run(1, rank).slots
        fresh = target is frozen or not bool(store.state[texts].any())
        found.append((not missing, equal, fresh))
    return found


def test_whole_tables_load_where_other_tables_are_read_only(ranks: Ranks) -> None:
    assert ranks(2).run(whole_tables) == [[(True, True, True)] * 2] * 2
