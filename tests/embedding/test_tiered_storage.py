"""Rows in tiered storage: training, migrations, checkpoints and errors are those of rows that are all fast."""

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import flexd
from flexd.core.placement import RankLayout
from flexd.embedding.checkpoint.sharded_state import ShardedState
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.exchange.arms import Arm
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import SGD, Adam
from flexd.embedding.store.slow.file_rows import FileRows
from flexd.embedding.store.slow.log_rows import LogRows
from tests.support.collection_jobs import tables, train_steps, whole
from tests.support.exactness import Scenario
from tests.support.prefetch_pipeline_jobs import Loop, train
from tests.support.rank_pool import RankPool, Ranks, error_of

CACHE_SLOTS_OF_A_FEW = 2_000
"""Bytes of cache slots for a few rows of each dim-group."""


def made(
    layout: RankLayout, directory: str | None, fast_memory_bytes: int | None, seed: int = 3, dtype: str = "float32"
) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables(dtype), optimizer=Adam(0.05), layout=layout, average_gradients=False, seed=seed,
        fast_memory_bytes=fast_memory_bytes, slow_memory_dir=directory,
    )  # fmt: skip


def both(rank: int, layout: RankLayout, path: str, dtype: str) -> dict[str, Any]:
    """Train, save and load with rows in tiered storage and with all rows fast; return what differs."""
    with tempfile.TemporaryDirectory() as directory:
        slow, fast = (made(layout, *where, dtype=dtype) for where in ((directory, CACHE_SLOTS_OF_A_FEW), (None, None)))
        cache_slots = [
            (store.tier.cache_slots, store.home_rows) for store in slow.engine.stores if store.tier is not None
        ]
        for collection in (slow, fast):
            train_steps(collection, 0, 5)
        after = [whole(each) for each in (slow, fast)]
        dcp.save({"tables": ShardedState(slow)}, checkpoint_id=path)
        collections = [
            made(layout, None, None, 8, dtype), made(layout, directory + "/again", CACHE_SLOTS_OF_A_FEW, 9, dtype)
        ]  # fmt: skip
        loaded = []
        for collection in collections:
            dcp.load({"tables": ShardedState(collection)}, checkpoint_id=path)
            loaded.append(whole(collection))
        local = {key: value.clone() for key, value in slow.state_dict().items()}
        slow.load_rows(slow.tables[0].name, 10, torch.full((4, slow.tables[0].dim), 2.5))
        slow.load_state_dict(local)
        again = whole(slow)
        memory = slow.memory().home_bytes, fast.memory().home_bytes
        slow.reset_parameters()
        initial = [(slow.gather_table(t.name), slow.initial_table(t.name)) for t in slow.tables]
        for each in (slow, fast, *collections):
            each.close()
        left = [file.name for file in Path(directory).rglob("*") if file.is_file()]
    return {
        "cache_slots": cache_slots, "after": _differ(*after), "loaded": [_differ(after[0], each) for each in loaded],
        "again": _differ(after[0], again), "memory": memory,
        "initial": not all(torch.equal(*each) for each in initial), "left": left,
    }  # fmt: skip


def _differ(some: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> list[str]:
    return [key for key in some if some[key].tobytes() != others[key].tobytes()]


def damage_the_disk(rank: int, layout: RankLayout, failing: int) -> str:
    """Train until the disk of one rank fails; return the error."""

    def break_it() -> None:
        with tempfile.TemporaryDirectory() as directory, made(layout, directory, CACHE_SLOTS_OF_A_FEW) as collection:
            train_steps(collection, 0, 4)
            for file in Path(directory).iterdir() if rank == failing else ():
                file.write_bytes(b"\1" * file.stat().st_size)
            train_steps(collection, 4, 20)

    return error_of(break_it)


@pytest.mark.parametrize(
    ("more", "loop"),
    [
        ({"optimizer": "adam", "passes": 3}, Loop(ahead=False, max_norm=0.5, evaluate_every=2, read_every=3)),
        ({"comm_dtype": "float16", "slow_file": True}, Loop(depth=4, max_norm=0.5, save_every=3, evaluate_every=3)),
        ({"slow_file": True, "optimizer": "adagrad", "two_dims": True}, Loop(depth=2, loops=3, restarts=True)),
        (
            {"pooling_at": ("owner", "requester"), "slow_file": True},
            Loop(depth=3, loops=2, restarts=True, save_every=2),
        ),
    ],
)
def test_float32_is_bit_equal_to_rows_that_are_all_fast(ranks: Ranks, more: dict[str, Any], loop: Loop) -> None:
    """Clipping, accumulation, a narrower wire, evaluation, reading, saves, loads, kills."""
    both = [
        ranks(2).run(
            train,
            Scenario(nodes=1, local_ranks=2, dtype="float32", seed=3, fast_memory_bytes=fast_memory_bytes, **more),
            loop,
        )
        for fast_memory_bytes in (1_500, None)
    ]
    for slow, fast in zip(*both, strict=True):
        assert slow["losses"] == fast["losses"]
        assert slow["errors"] == fast["errors"] == []
        for name, table in fast["tables"].items():
            np.testing.assert_array_equal(slow["tables"][name], table)


def test_slow_rows_are_a_log_where_its_index_fits_and_its_bytes_are_of_the_budget(tmp_path: Path) -> None:
    table = EmbeddingTable("item", 1_000, 32)
    for fast_memory_bytes, kind in ((4 * 5_000, LogRows), (4 * 5_000 - 1, FileRows)):
        collection = EmbeddingCollection(
            [table], optimizer=SGD(0.1), fast_memory_bytes=fast_memory_bytes, slow_memory_dir=tmp_path
        )
        tier = collection.engine.stores[0].tier
        assert isinstance(tier.cold, kind)
        assert tier.cache_slots == (fast_memory_bytes - (5_000 if kind is LogRows else 0)) // (128 + 64)
        collection.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_loads_and_resets_are_those_of_fast_rows(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    """Of rows that are rounded at random by their keys too."""
    for result in ranks(4).run(both, RankLayout(2, 2), str(tmp_path / "saved"), dtype):
        assert result["cache_slots"]
        assert all(cache_slots < rows for cache_slots, rows in result["cache_slots"])
        # Bit for bit, and files go with the collection.
        expected = {"after": [], "loaded": [[], []], "again": [], "initial": False, "left": []}
        assert {name: result[name] for name in expected} == expected
        assert result["memory"][0] != result["memory"][1]


def test_a_disk_that_fails_is_an_error_on_every_rank_that_names_the_file() -> None:
    """Other faults of disks: store/slow/test_cold_rows.py."""
    with closing(RankPool(3)) as pool:
        results = pool.run(damage_the_disk, RankLayout(1, 3), 2, timeout=60)
    for rank, said in enumerate(results):
        assert said.startswith("SlowMemoryError" if rank == 2 else "CollectiveError"), said
        assert "rank2.group" in said
        assert "blocks are not what" in said


def test_homes_know_the_batches_ahead_by_default_however_often_the_pipeline_is_switched() -> None:
    collection = EmbeddingCollection([EmbeddingTable("item", 400, 4)], optimizer=SGD(0.1), fast_memory_bytes=6_000)
    (store,) = collection.engine.stores
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 400, (12,), generator=generator) for _ in range(20)]
    batches = ({"item": Jagged(each, torch.tensor([12]))} for each in ids)
    known = []
    for step, batch in enumerate(flexd.prefetch(batches, collection)):
        collection.engine.arm.propose(Arm("chain", (4, 4, 4, 0, 4, 1)[step % 6]))
        collection(batch)["item"].values.sum().backward()
        collection.optimizer.step()
        present = None if step + 1 == len(ids) else store.tier._ahead.use_of(ids[step + 1].unique())
        is_known = present is not None and bool((present > 0).all())
        known.append((collection.engine.arm.prefetches, store.tier._ahead.known, is_known))
    assert {*known[:-4]} == {(4, 3, True), (0, 0, False), (1, 0, False)}, known
