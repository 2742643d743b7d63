"""Checkpoints on real gloo ranks: saved by some, loaded by others, with what a checkpoint can have wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import DimGroup
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.embedding.checkpoint.blocks import TableHomes
from flexd.embedding.checkpoint.fingerprint import fingerprint
from flexd.embedding.collection import EmbeddingTable
from flexd.embedding.store.store import GroupStore
from tests.support.collection_jobs import ROWS, tables
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.slow

Ranks = Callable[[int], RankPool]
TOTAL = sum(ROWS.values())
HERE, THERE = RankLayout(2, 2), RankLayout(1, 1)


def replicate(seed: int) -> Delta:
    rng = np.random.default_rng(seed)
    keys = np.sort(rng.permutation(TOTAL)[:40]).astype(np.int64)
    return Delta(keys, np.zeros(40, np.uint8), rng.integers(1, 3, 40).astype(np.uint8))


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Of 2 x 2 ranks with Adam, and how their training went on."""
    path = tmp_path_factory.mktemp("checkpoint") / "adam"
    results = ranks(4).run("checkpoint_jobs:save", HERE, "adam", str(path), replicate(1), 300)
    return path, results[0]


def check_loaded(results: list[dict], saved: dict, tolerance: float = 1e-9) -> None:
    for result in results:
        assert set(result["loaded"]) == set(saved["saved"])
        for key, expected in saved["saved"].items():
            np.testing.assert_array_equal(result["loaded"][key], expected, err_msg=key)
        assert result["steps"] == saved["steps"] == 8
        assert result["equal"], "a replica differed from its home copy"
        for name, table in saved["end"].items():
            np.testing.assert_allclose(result["end"][name], table, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("nodes", "local_ranks"), [(1, 2), (3, 1), (1, 1), (2, 2), (1, 4)])
def test_any_number_of_ranks_goes_on_with_a_checkpoint(
    ranks: Ranks, saved: tuple[Path, dict], nodes: int, local_ranks: int
) -> None:
    layout = RankLayout(nodes, local_ranks)
    results = ranks(layout.world_size).run("checkpoint_jobs:load", layout, "adam", str(saved[0]), replicate(2), 100)
    check_loaded(results, saved[1])
    if layout.world_size > 1:
        assert all(result["version"] == 1 and result["replicas"] > 10 for result in results)


@pytest.mark.parametrize(("optimizer", "dtype"), [("rowwise_adagrad", "float32"), ("sgd", "bfloat16")])
def test_other_optimizers_and_dtypes(ranks: Ranks, tmp_path: Path, optimizer: str, dtype: str) -> None:
    path, three, two = str(tmp_path / "there"), RankLayout(3, 1), RankLayout(2, 1)
    expected = ranks(3).run("checkpoint_jobs:save", three, optimizer, path, replicate(3), 2**20, dtype)
    results = ranks(2).run("checkpoint_jobs:load", two, optimizer, path, replicate(4), 2**20, dtype)
    check_loaded(results, expected[0], tolerance={"float32": 1e-4, "bfloat16": 0.5}[dtype])


def test_beside_a_model_in_one_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    assert all(ranks(4).run("checkpoint_jobs:beside_a_model", HERE, str(tmp_path / "there")))


ITEM, ODD, TINY = tables()


@pytest.mark.parametrize(
    ("specs", "optimizer", "causes"),
    [
        ([ITEM, ODD], "adam", ["embeddings.tiny.weight is unknown to the collection"]),
        (
            [ITEM, ODD, TINY, EmbeddingTable("new", 5, 2)], "adam",
            ["embeddings.new.weight is missing", "optimizer.adam.new.exp_avg is missing"],
        ),
        (
            [EmbeddingTable("item", 61, 4, dtype="float64"), ODD, TINY], "adam",
            ["embeddings.item.weight is 61 x 8 float64 in the checkpoint and 61 x 4 float64 in the collection"],
        ),
        (
            [EmbeddingTable("item", 62, 8, dtype="float64"), ODD, TINY], "adam",
            ["embeddings.item.weight is 61 x 8 float64 in the checkpoint and 62 x 8 float64 in the collection"],
        ),
        (
            [EmbeddingTable("item", 61, 8), ODD, TINY], "adam",
            ["embeddings.item.weight is 61 x 8 float64 in the checkpoint and 61 x 8 float32 in the collection"],
        ),
        (
            [ITEM, ODD, TINY], "rowwise_adagrad",
            ["optimizer.rowwise_adagrad.item.sum is missing", "and 6 more"],
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_of_other_tables_names_the_difference(
    ranks: Ranks, saved: tuple[Path, dict], specs: list[EmbeddingTable], optimizer: str, causes: list[str]
) -> None:
    for text, unchanged in ranks(2).run(
        "checkpoint_jobs:load_into", RankLayout(1, 2), str(saved[0]), specs, optimizer, timeout=60
    ):
        for cause in causes:
            assert cause in text
        assert unchanged


@pytest.mark.parametrize("change", ["one bit", "two rows", "a table"])
def test_a_state_that_is_not_the_saved_one(ranks: Ranks, change: str) -> None:
    said = ranks(4).run("checkpoint_jobs:load_changed", HERE, change, timeout=60)
    for rank, (text, unchanged) in enumerate(said):
        if change == "a table":
            guilty = "rank 3: embeddings.odd.weight is missing"
            assert (guilty if rank == 3 else "see the error of rank 3") in text
        else:
            assert "tables item differ from the saved ones" in text
        assert unchanged


@pytest.mark.parametrize("damage", ["metadata", "file", "half a file"])
def test_a_torn_checkpoint(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    for text in ranks(2).run("checkpoint_jobs:missing_file", RankLayout(2, 1), str(tmp_path / "x"), damage, timeout=60):
        assert ("no complete checkpoint" if damage == "metadata" else "cannot read") in text


def test_a_directory_with_a_checkpoint_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks(2).run("checkpoint_jobs:save_twice", RankLayout(2, 1), str(tmp_path / "x")):
        assert "holds a checkpoint already - save into a new directory" in text


@pytest.mark.parametrize("layout", [HERE, THERE])
def test_out_to_plain_tables_and_back(ranks: Ranks, layout: RankLayout) -> None:
    for result in ranks(layout.world_size).run("checkpoint_jobs:plain_tables", layout):
        assert result["same"]
        assert result["weights"]
        assert not result["state"], "weights without state start an optimizer anew"
        assert result["steps"] == 0
        assert "optimizer.adam.odd.exp_avg is missing" in result["text"]


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_whole_tables_loaded_over_replicas_train_as_without_replicas(
    ranks: Ranks, optimizer: str, with_state: bool
) -> None:
    for result in ranks(4).run("checkpoint_jobs:load_whole", HERE, optimizer, replicate(5), with_state):
        assert result["replicas"] > 10
        for key, expected in result["expected_at_start"].items():
            np.testing.assert_array_equal(result["at_start"][key], expected, err_msg=key)
            if not with_state and optimizer == "rowwise_adagrad" and key.endswith(".sum"):
                assert (expected == 0.1).all(), "the state is the optimizer's initial value, not 0"
        assert result["equal"], "a replica differed from its home copy"
        for name, table in result["expected_end"].items():
            np.testing.assert_allclose(result["end"][name], table, rtol=0, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 60),
    before=st.integers(0, 9),
    first_key=st.integers(0, 20),
    world=st.integers(1, 7),
    window=st.integers(1, 12),
)
def test_every_row_is_sent_once_from_its_slot(rows: int, before: int, first_key: int, world: int, window: int) -> None:
    group = DimGroup(2, "float32", "sgd", first_key, before + rows, (0, 1))
    layout = RankLayout(1, world)
    sent = np.full(rows, -1)
    for rank in range(world):
        store = GroupStore(group, layout, rank, 0, torch.device("cpu"))
        homes = TableHomes(rows, first_key + before, store.first_home_key, world, rank)
        assert sum(len(homes.block(other)) for other in range(world)) == rows
        for other in range(world):
            taken = range(0)
            for number in range(-(-homes.block_rows // window)):
                stretch = homes.window(other, number, window)
                assert number == 0 or not len(stretch) or stretch.start == taken.stop
                taken = stretch
                mine = homes.homed(rank, stretch)
                assert set(mine) <= set(stretch)
                keys = np.array(mine, dtype=np.int64) + first_key + before
                assert (keys % world == rank).all()
                assert (
                    np.arange(store.home_rows)[homes.slots(mine)].tolist()
                    == store.home_slots(torch.from_numpy(keys)).tolist()
                )
                assert (sent[list(mine)] == -1).all()
                sent[list(mine)] = other
    assert sent.tolist() == [row // homes.block_rows for row in range(rows)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_fingerprint_tells_tables_apart(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    rows, state = torch.from_numpy(rng.normal(size=(9000, 3))).to(dtype), torch.from_numpy(rng.random((9000, 1)))
    given_rows = rows.clone()
    whole = int(fingerprint(0, [rows, state]))
    assert torch.equal(rows, given_rows)
    parts = [
        int(fingerprint(first, [rows[first:end], state[first:end]])) for first, end in ((0, 11), (11, 11), (11, 9000))
    ]
    assert (sum(parts) - whole) % 2**64 == 0
    others = []
    for change in ("swap rows", "swap columns", "negate", "state", "last bit"):
        r, s = rows.clone(), state.clone()
        if change == "swap rows":
            r[[5, 6]], s[[5, 6]] = r[[6, 5]], s[[6, 5]]
        elif change == "swap columns":
            r[7, [0, 1]] = r[7, [1, 0]]
        elif change == "negate":
            r[8999, 2] *= -1
        elif change == "state":
            s[8, 0] += 1
        else:
            r.view(torch.uint8)[0, 0] ^= 1
        others.append(int(fingerprint(0, [r, s])))
    assert len({whole, *others}) == 6
    assert int(fingerprint(1, [rows, state])) != whole
    assert int(fingerprint(0, [rows, state[:, :0]])) != whole
