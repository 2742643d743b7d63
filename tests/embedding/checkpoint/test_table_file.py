"""Tables from files of other programs: every row where it belongs, read in windows; others are refused by all ranks."""

import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from flexd.core.errors import CheckpointError
from flexd.core.placement import RankLayout
from flexd.embedding.checkpoint import table_rows
from flexd.embedding.checkpoint.dcp_table import DcpTable
from flexd.embedding.checkpoint.table_file import TableFile
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.store.quantized_rows import int8_rows, looked_up
from tests.support.rank_pool import Ranks, error_of

ROWS, DIM = 101, 6
VALUES = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)


def save_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the format as its description says: length of the header, header, the tensors one after another."""
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.int8: "I8"}
    header: dict[str, Any] = {"__metadata__": {"made_by": "a test"}}
    data = b""
    for name, value in tensors.items():
        part = value.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(part)]
        }  # fmt: skip
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def loaded(rank: int, layout: RankLayout, npy: str, safetensors: str, sharding: str) -> list[np.ndarray]:
    """Load a table with copies of all rows from both kinds of files, in windows of a few rows."""
    tables = [
        EmbeddingTable("items", ROWS, DIM, sharding=sharding, trainable=False),
        EmbeddingTable("halves", ROWS, DIM, dtype="bfloat16", sharding=sharding),
    ]
    collection = EmbeddingCollection(tables, layout=layout)
    with mock.patch.object(table_rows, "MAX_WINDOW_BYTES", 10 * DIM * 4):
        collection.load_file("items", npy)
        collection.load_file("halves", safetensors, tensor="texts")
    ids = {name: torch.arange(ROWS) for name in ("items", "halves")}
    rows = {name: part.values.detach() for name, part in collection(ids).items()}
    assert all(torch.equal(rows[name], collection.gather_table(name)) for name in rows)
    return [rows["items"].numpy(), rows["halves"].float().numpy()]


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise:1", "data_parallel"])
def test_every_rank_has_the_rows_of_the_file(ranks: Ranks, tmp_path: Path, sharding: str) -> None:
    npy, safetensors = tmp_path / "items.npy", tmp_path / "texts.safetensors"
    values = VALUES.copy()
    values[7] = 3e38  # the numbers are finite, their sum is not
    np.save(npy, values)
    halves = torch.from_numpy(values).bfloat16()
    save_safetensors(safetensors, {"other": torch.zeros(3, dtype=torch.int32), "texts": halves})
    for items, texts in ranks(4).run(loaded, RankLayout(2, 2), str(npy), str(safetensors), sharding):
        np.testing.assert_array_equal(items, values)
        np.testing.assert_array_equal(texts, halves.float().numpy())


def loaded_int8(rank: int, *paths: str) -> list[torch.Tensor]:
    items = EmbeddingTable("items", ROWS, DIM, dtype="int8", trainable=False)
    collection, found = EmbeddingCollection([items], layout=RankLayout(1, 2)), []
    with mock.patch.object(table_rows, "MAX_WINDOW_BYTES", 100):
        for path in paths:
            collection.load_file("items", path)
            found.append(collection.gather_table("items"))
    return found


def test_rows_of_int8_come_from_files_of_their_own_kind_and_of_floats(ranks: Ranks, tmp_path: Path) -> None:
    stored, values = int8_rows(torch.from_numpy(VALUES)), torch.from_numpy(VALUES)
    np.save(tmp_path / "stored.npy", stored.numpy())
    np.save(tmp_path / "wide.npy", VALUES.astype(np.float64))
    save_safetensors(tmp_path / "stored.safetensors", {"a": stored.flip(0)})
    save_safetensors(tmp_path / "half.safetensors", {"a": values.half()})
    names = ("stored.npy", "stored.safetensors", "wide.npy", "half.safetensors")
    expected = [stored, stored.flip(0), stored, int8_rows(values.half())]
    for found in ranks(2).run(loaded_int8, *(str(tmp_path / name) for name in names)):
        for table, rows in zip(found, expected, strict=True):
            assert torch.equal(table, looked_up(rows, torch.int8))


def saved_by_dcp(rank: int, path: str, dim: int) -> None:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    whole = distribute_tensor(torch.from_numpy(VALUES), mesh, [Shard(dim)])
    other = {"items.weight": torch.zeros(3, DIM), "items.momentum1": torch.zeros(ROWS)}
    dcp.save({"model": {"sparse.items.weight": whole}, "optimizer": other}, checkpoint_id=path)


def loaded_from_dcp(rank: int, path: str, tensor: str) -> tuple[np.ndarray, int]:
    items = EmbeddingTable("items", ROWS, DIM, trainable=False)
    collection = EmbeddingCollection([items], layout=RankLayout(1, 2))
    read = []

    def counted(self: DcpTable, place: tuple[int, ...]) -> torch.Tensor:
        read.append(place)
        return read_chunk(self, place)

    read_chunk = DcpTable._read_chunk
    with (
        mock.patch.object(table_rows, "MAX_WINDOW_BYTES", 10 * DIM * 4),
        mock.patch.object(DcpTable, "_read_chunk", counted),
    ):
        collection.load_file("items", path, tensor=tensor)
    return collection.gather_table("items").numpy(), len(read)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_checkpoint_of_other_ranks_is_read_by_its_chunks(ranks: Ranks, tmp_path: Path, dim: int) -> None:
    ranks(4).run(saved_by_dcp, str(tmp_path / "save"), dim)
    for values, read in ranks(2).run(loaded_from_dcp, str(tmp_path / "save"), "model.sparse.items.weight"):
        np.testing.assert_array_equal(values, VALUES)
        assert read == 4 - dim, "6 columns are in 3 chunks"


def refused_checkpoints(rank: int, path: str) -> list[str]:
    collection = EmbeddingCollection([EmbeddingTable("items", ROWS, DIM)], layout=RankLayout(1, 2))
    before = collection.gather_table("items")
    whole, cut, empty = (Path(path) / name for name in ("save", "cut", "empty"))
    given = [(whole, ""), (whole, "model.items"), (whole, "optimizer.items.weight"), (empty, ""), (cut, WHOLE)]
    found = [error_of(collection.load_file, "items", directory, tensor=tensor) for directory, tensor in given]
    assert torch.equal(collection.gather_table("items"), before)
    return found


WHOLE = "model.sparse.items.weight"


def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(saved_by_dcp, str(tmp_path / "save"), 0)
    (tmp_path / "empty").mkdir()
    shutil.copytree(tmp_path / "save", tmp_path / "cut")
    (tmp_path / "cut" / "__3_0.distcp").unlink()
    first, second = ranks(2).run(refused_checkpoints, str(tmp_path))
    expected = [
        "has 2 weight of 'items'", "no matrix 'model.items'", "has 3 x 6 float32, the table 101 x 6 float32",
        "is no checkpoint of torch.distributed.checkpoint",
    ]  # fmt: skip
    for text, said in zip(expected, zip(first, second, strict=True), strict=False):
        assert all("table 'items'" in one and text in one for one in said), said
    assert "tensor= one of model.sparse.items.weight, optimizer.items.weight" in first[0]
    assert "cannot be read" in first[-1]
    assert "cannot be read" in second[-1]


def refused(rank: int, path: str, dtype: str = "float32", loaded: bool = False) -> tuple[str, bool]:
    """``loaded``: rows of a read-only table are no longer those that it began with."""
    items = EmbeddingTable("items", ROWS, DIM, dtype=dtype, trainable=dtype != "int8", init_scale=1.0)
    collection = EmbeddingCollection([items], layout=RankLayout(1, 2))
    if loaded:
        collection.load_rows("items", 5, torch.ones(1, DIM))
    before = collection.gather_table("items")
    with mock.patch.object(table_rows, "MAX_WINDOW_BYTES", 100):
        text = error_of(collection.load_file, "items", path if rank else path.replace("missing-", ""))
    return text, torch.equal(collection.gather_table("items"), before)


def one_bad() -> np.ndarray:
    values = VALUES.copy()
    values[ROWS - 2, 3] = np.nan
    return values


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: np.save(path, VALUES[1:]), "has 100 x 6 float32, the table 101 x 6 float32"),
        (lambda path: np.save(path, VALUES.astype(np.float16)), "has 101 x 6 float16"),
        (lambda path: np.save(path, one_bad()), "row 99 has a number that is not finite"),
        (lambda path: np.save(path, np.asfortranarray(VALUES)), "Fortran order"),
        (lambda path: np.save(path, VALUES.astype(object), allow_pickle=True), "neither a npy nor a safetensors"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)), "neither a npy nor a safetensors"),
        (lambda path: path.write_bytes(struct.pack("<Q", 2) + b"[]" + bytes(9)), "neither a npy nor a safetensors"),
        (lambda path: path.write_bytes(b"\x93NUMPY"), "neither a npy nor a safetensors"),
        (lambda path: None, "No such file"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_on_every_rank_and_nothing_is_loaded(
    ranks: Ranks, tmp_path: Path, make: Callable[[Path], None], text: str
) -> None:
    path = tmp_path / "items.npy"
    make(path)
    found = ranks(2).run(refused, str(path))
    assert any("table 'items'" in said and text in said for said, _ in found), found
    assert all("refused" in said or text in said for said, _ in found)
    assert all(unchanged for _, unchanged in found)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.zeros((ROWS, DIM), np.int8), "has 101 x 6 int8, the table 101 x 6 int8: int8 10 wide, with scales, or"),
        (int8_rows(torch.from_numpy(one_bad())).numpy(), "row 99 has a number that is not finite"),
        (one_bad(), "row 99 has a number that is not finite"),
    ],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_rows_of_int8_without_or_with_impossible_scales_are_refused(
    ranks: Ranks, tmp_path: Path, values: np.ndarray, text: str, loaded: bool
) -> None:
    np.save(tmp_path / "items.npy", values)
    found = ranks(2).run(refused, str(tmp_path / "items.npy"), "int8", loaded)
    assert any(text in said for said, _ in found), found
    assert all(unchanged for _, unchanged in found)


def test_a_cut_file_and_a_name_that_is_not_there_are_named(tmp_path: Path) -> None:
    path = tmp_path / "two.safetensors"
    save_safetensors(path, {"a": torch.zeros(2, 3), "b": torch.ones(2, 3)})
    with pytest.raises(CheckpointError, match="no tensor '' - tensor= one of a, b"):
        TableFile.of(path)
    ((rows, part),) = TableFile.of(path, "b").windows(range(2), 1000)
    assert (rows, part.tolist()) == (range(2), [[1.0] * 3] * 2)
    # A part keeps its values while the next one is read.
    save_safetensors(path, {"b": torch.arange(30.0).view(10, 3)})
    for rows, part in TableFile.of(path).windows(range(1, 10, 2), 1):
        time.sleep(0.002)
        assert part.tolist() == [[3.0 * rows[0], 3.0 * rows[0] + 1, 3.0 * rows[0] + 2]]
    save_safetensors(path, {"a": torch.zeros(2, 3), "b": torch.ones(2, 3)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is cut"):
        TableFile.of(path, "b")
