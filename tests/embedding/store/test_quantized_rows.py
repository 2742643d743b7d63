"""Read-only rows of int8: as they are stored on every rank, a quarter of the bytes, and never anything that is not
finite."""

from pathlib import Path

import numpy as np
import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import Delta, RankLayout
from flexd.embedding.bag_collection import EmbeddingBagCollection, EmbeddingBagTable
from flexd.embedding.checkpoint.sharded_state import ShardedState
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.features import Jagged
from flexd.embedding.store.quantized_rows import looked_up
from tests.support.rank_pool import Ranks, error_of

ROWS, DIM = 64, 10
LAYOUT = RankLayout(2, 1)


def as_numpy(values: np.ndarray) -> np.ndarray:
    """Return what is looked up of values: the nearest multiples of the largest of each row / 127."""
    scale = np.abs(values).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127)
    whole = np.round(np.divide(values, scale, out=np.zeros_like(values), where=scale > 0))
    return whole.astype(np.float32) * scale


@pytest.mark.parametrize("dim", [3, 4])
@pytest.mark.parametrize("rows", [0, 1, 7, 300_000])
def test_a_row_is_multiples_of_its_scale(rows: int, dim: int) -> None:
    values = np.random.default_rng(rows).normal(size=(rows, dim)).astype(np.float32)
    values[::3] *= 1e-6
    values[::5] = 0
    stored = flexd.int8_rows(torch.from_numpy(values))
    assert (stored.dtype, stored.shape) == (torch.int8, (rows, dim + 4))
    np.testing.assert_array_equal(looked_up(stored, torch.int8).numpy(), as_numpy(values))
    # Wherever rows begin: a scale need not lie where a float32 may.
    for width, first in ((16, 0), (16, 1), (16, 2), (16, 3), (dim + 5, 0)):
        part = stored.new_zeros((rows, width))[::2, first : first + dim + 4]
        part.copy_(stored[::2])
        assert torch.equal(looked_up(part, torch.int8), looked_up(stored, torch.int8)[::2])
    assert torch.equal(flexd.int8_rows(torch.from_numpy(values).double()), stored)


def made(dtype: str = "int8", output_dtype: str | None = None, seed: int = 0) -> EmbeddingCollection:
    items = EmbeddingTable("items", ROWS, DIM, dtype=dtype, trainable=False, output_dtype=output_dtype)
    users = EmbeddingTable("users", ROWS, DIM)
    return EmbeddingCollection(
        [items, users], layout=LAYOUT, replica_slots=(ROWS,) * (1 + (dtype != "float32")), exchange="chain", seed=seed
    )


def values_of(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed))


def jobs(rank: int, directory: str) -> dict[str, object]:
    collection, sent = made(), {}
    initial = torch.equal(collection.gather_table("items"), collection.initial_table("items"))
    everything = Jagged(torch.arange(ROWS), torch.tensor([ROWS]))
    first, second = values_of(1), values_of(2)
    collection.load_rows("items", 0, first)
    keys = np.arange(0, ROWS, 2, dtype=np.int64)
    copies = Delta(keys, np.zeros(len(keys), np.uint8), np.full(len(keys), 2, np.uint8))
    found = []
    for step in range(4):
        if step == 1:
            collection.engine.inbox.offer(1, copies)
        if step == 3:
            collection.load_rows("items", 4, second[4:9] if rank == 1 else None, source=1)
        rows = collection({"items": everything, "users": everything})
        rows["users"].values.sum().backward()
        collection.optimizer.step()
        found.append(rows["items"].values)
    state = ShardedState(collection).state_dict()
    again = made(seed=5)
    ShardedState(again).load_state_dict(state)
    before = collection.gather_table("items")
    bad = torch.full((1, DIM), float("nan")) if rank else torch.zeros(1, DIM)
    error = error_of(collection.load_rows, "items", 3, bad)
    for dtype in ("float32", "float16", "int8"):
        other = made(dtype)
        before_look_up = other.traffic.all_to_all_inter_bytes
        with torch.no_grad():
            other({"items": everything})
        sent[dtype] = other.traffic.all_to_all_inter_bytes - before_look_up
    return {
        "initial": initial, "found": [part.numpy() for part in found], "equal": collection.replicas_bit_equal(),
        "version": collection.placement_version, "again": again.gather_table("items").numpy(), "error": error,
        "unchanged": torch.equal(before, collection.gather_table("items")), "sent": sent,
        "half": made(output_dtype="float16")({"items": everything})["items"].values.dtype,
        "bytes": [store.row_bytes for store in collection.engine.stores],
    }  # fmt: skip


def test_every_rank_looks_up_what_is_stored_with_copies_new_values_and_after_a_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, last = as_numpy(values_of(1).numpy()), as_numpy(values_of(1).numpy())
    last[4:9] = as_numpy(values_of(2).numpy())[4:9]
    for result in ranks(2).run(jobs, str(tmp_path)):
        assert (result["initial"], result["version"], result["equal"]) == (True, 1, True)
        for rows in result["found"][:3]:
            np.testing.assert_array_equal(rows, first)
        np.testing.assert_array_equal(result["found"][3], last)
        np.testing.assert_array_equal(result["again"], last)
        assert "not finite" in result["error"] or "do not fit" in result["error"]
        assert (result["unchanged"], result["half"], result["bytes"][0]) == (True, torch.float16, DIM + 4)
        wide, half, narrow = (result["sent"][dtype] for dtype in ("float32", "float16", "int8"))
        away = (wide - half) // (2 * DIM)
        assert away == ROWS // 2, "rows of the other node, which each of the two ranks asks for"
        assert wide - narrow == away * (4 * DIM - (DIM + 4))


def test_bags_of_int8_rows_are_pooled_in_float32() -> None:
    tables = [
        EmbeddingBagTable("items", ROWS, DIM, dtype="int8", trainable=False, pooling_at=place, features=(place,))
        if place == "requester"
        else EmbeddingBagTable("others", ROWS, DIM, dtype="int8", trainable=False, pooling_at=place, features=(place,))
        for place in ("requester", "owner")
    ]
    collection = EmbeddingBagCollection(tables)
    for name in ("items", "others"):
        collection.load_rows(name, 0, values_of(3))
    bags = Jagged(torch.tensor([1, 2, 3, 3]), torch.tensor([3, 0, 1]))
    expected = torch.from_numpy(as_numpy(values_of(3).numpy()))
    for pooled in collection({"requester": bags, "owner": bags}).values():
        assert pooled.dtype == torch.float32
        torch.testing.assert_close(pooled[[0, 2]], torch.stack([expected[[1, 2, 3]].sum(0), expected[3]]))
        assert not pooled[1].any()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "int8"}, "cannot be trained - trainable=False"),
        ({"output_dtype": "int8"}, "output_dtype 'int8' - one of float64"),
        ({"output_dtype": "single"}, "output_dtype 'single'"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, str], text: str) -> None:
    with pytest.raises(EmbeddingError, match=text):
        EmbeddingTable("items", ROWS, DIM, **settings)
