"""Parts of the collection without processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexd
from flexd.core.errors import EmbeddingError, TopologyError
from flexd.core.keyspace import DimGroup, KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.embedding.features import FeatureMap
from flexd.embedding.jagged import Jagged, as_jagged
from flexd.embedding.row_optimizers import SGD, RowWiseAdagrad
from flexd.embedding.store.initial_values import initial_rows
from flexd.embedding.store.store import TORCH_DTYPES, FreeSlots, GroupStore

CPU = torch.device("cpu")


@settings(max_examples=100, deadline=None)
@given(nodes=st.integers(1, 4), local_ranks=st.integers(1, 5), first_key=st.integers(0, 50), rows=st.integers(1, 60))
def test_every_key_has_one_home_slot(nodes: int, local_ranks: int, first_key: int, rows: int) -> None:
    layout = RankLayout(nodes, local_ranks)
    group = DimGroup(2, "float32", "sgd", first_key, rows, (0,))
    stores = [GroupStore(group, layout, rank, 3, CPU) for rank in range(layout.world_size)]
    assert sum(store.home_rows for store in stores) == rows
    homes = np.concatenate([store.home_keys() for store in stores])
    assert sorted(homes.tolist()) == list(range(first_key, first_key + rows))
    keys = torch.arange(first_key, first_key + rows)
    held_by = torch.zeros(rows, dtype=torch.int64)
    for store in stores:
        held, slots, entry = store.locate(keys)
        held_by += held
        assert slots[held].tolist() == list(range(store.home_rows)), "home rows in slot order, none left out"
        assert (entry == -1).all()
        assert keys[held].tolist() == store.home_keys().tolist()
        assert (layout.home_rank(store.home_keys()) == store.rank).all()
        assert store.rows.shape[0] == store.home_rows + 3
    assert (held_by == 1).all()


@settings(max_examples=100, deadline=None)
@given(actions=st.lists(st.tuples(st.sampled_from(["take", "give", "settle", "try"]), st.integers(0, 4)), max_size=40))
def test_replica_slots_are_never_handed_out_twice(actions: list[tuple[str, int]]) -> None:
    """Whatever is prepared and dropped again, and whenever what was prepared first is settled."""
    store = GroupStore(DimGroup(2, "float32", "sgd", 0, 7, (0,)), RankLayout(1, 2), 1, 9, CPU)
    everything = set(range(store.home_rows, store.home_rows + 9))
    free = store.free
    taken: list[int] = []
    waiting: list[FreeSlots] = []
    for what, count in actions:
        if what == "take" and count <= len(free):
            got, free = free.allocate(count)
            taken += got.tolist()
        elif what == "give":
            back, taken = taken[:count], taken[count:]
            free = free.release(np.array(back, dtype=np.int32))
        elif what == "try":  # prepared, and dropped
            free.release(np.array(taken, dtype=np.int32)).allocate(len(everything))
        elif what == "settle" and waiting:
            waiting[count % len(waiting)].compacted()
            waiting = waiting[count % len(waiting) + 1 :]
        waiting.append(free)
        assert len(set(taken)) == len(taken)
        assert len(free) == 9 - len(taken)
        assert set(free.allocate(len(free))[0].tolist()) == everything - set(taken)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    optimizer=st.sampled_from(["sgd", "rowwise_adagrad"]),
    dim=st.integers(1, 9),
    count=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_packed_rows_come_back_bit_by_bit(dtype: str, optimizer: str, dim: int, count: int, seed: int) -> None:
    group = DimGroup(dim, dtype, optimizer, 0, 12, (0,))
    here, there = (GroupStore(group, RankLayout(1, 1), 0, 4, CPU) for _ in range(2))
    rng = np.random.default_rng(seed)
    for held in (here.rows, here.state):
        raw = held.view(torch.uint8)
        raw.copy_(torch.from_numpy(rng.integers(0, 256, size=tuple(raw.shape), dtype=np.uint8)))
    source = torch.from_numpy(rng.permutation(16)[:count])
    target = torch.from_numpy(rng.permutation(16)[:count])
    packed = here.pack(source)
    assert packed.shape == (count, here.row_bytes)
    spec = TableSpec("t", 12, dim, dtype, optimizer)
    assert here.row_bytes == spec.row_bytes + spec.state_bytes
    there.unpack(packed, target)
    for name in ("rows", "state"):
        got, sent = (getattr(store, name).view(torch.uint8) for store in (there, here))
        assert torch.equal(got[target], sent[source])
        others = torch.ones(16, dtype=torch.bool).index_fill_(0, target, False)
        assert not got[others].any(), "other slots are untouched"


def test_jagged_checks_and_offsets() -> None:
    jagged = Jagged.from_offsets(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 2, 3], dtype=torch.int32))
    assert jagged.lengths.tolist() == [2, 0, 1]
    assert jagged.offsets.tolist() == [0, 2, 2, 3]
    assert jagged.offsets.dtype == torch.int64
    with pytest.raises(EmbeddingError, match="scalar"):
        Jagged(torch.tensor(1), torch.tensor([1]))
    for lengths in (torch.tensor([[1]]), torch.tensor([1.0])):
        with pytest.raises(EmbeddingError, match="lengths"):
            Jagged(torch.tensor([1]), lengths)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), max_size=5), length=st.integers(0, 6), dim=st.integers(1, 3))
def test_padding(lengths: list[int], length: int, dim: int) -> None:
    total = sum(lengths)
    values = torch.arange(total * dim, dtype=torch.float64).view(total, dim) + 1
    padded, mask = Jagged(values, torch.tensor(lengths, dtype=torch.int64)).to_padded(length)
    assert padded.shape == (len(lengths), length, dim)
    for sample, rows in enumerate(torch.split(values, lengths)):
        cut = rows[:length]
        assert torch.equal(padded[sample, : len(cut)], cut)
        assert not padded[sample, len(cut) :].any()
        assert mask[sample].tolist() == [at < len(cut) for at in range(length)]


def test_padding_hides_infinite_rows() -> None:
    padded, _ = Jagged(torch.tensor([[float("inf")], [2.0]]), torch.tensor([1, 1])).to_padded(2)
    assert padded[1].tolist() == [[2.0], [0.0]]


TABLES = KeySpace([TableSpec("a", 10, 4), TableSpec("b", 20, 8), TableSpec("c", 30, 4)])


def feature_map() -> FeatureMap:
    return FeatureMap(TABLES, [("a", "a2"), ("b",), ("c",)], 3, CPU)


def test_features_become_keys_and_rows_become_features() -> None:
    """Groups: (a, c) then b, whatever the order given."""
    features = {
        "b": Jagged(torch.tensor([19, 0], dtype=torch.int32), torch.tensor([2])),
        "c": Jagged(torch.tensor([1]), torch.tensor([0, 1])),
        "a2": Jagged(torch.tensor([9, 9, 2]), torch.tensor([1, 2])),
    }
    order, keys = feature_map().keys(features)
    assert order == ["c", "a2", "b"]
    assert keys.tolist() == [11, 9, 9, 2, 40 + 19, 40]
    assert keys.dtype == torch.int64
    out = feature_map().split(features, order, [torch.arange(16.0).view(4, 4), torch.arange(16.0).view(2, 8)])
    assert set(out) == set(features)
    assert out["c"].values.tolist() == [[0, 1, 2, 3]]
    assert out["a2"].values[:, 0].tolist() == [4, 8, 12]
    assert out["b"].values.shape == (2, 8)
    assert all(out[name].lengths is features[name].lengths for name in features)


def test_no_features_are_no_keys() -> None:
    assert feature_map().keys({})[1].shape == (0,)


@pytest.mark.parametrize(
    ("feature", "values", "cause"),
    [
        ("a", torch.tensor([10]), r"row 10 of table 'a' is outside 0\.\.9"),
        ("a2", torch.tensor([3, -2, 99]), r"row -2 of table 'a'"),
        ("b", torch.tensor([1.0]), "float32"),
        ("b", torch.tensor([[1]]), r"\(1, 1\)"),
        ("b", torch.tensor([1], dtype=torch.int16), "int16"),
        ("d", torch.tensor([1]), "no table reads feature 'd'"),
    ],
)
def test_bad_ids(feature: str, values: torch.Tensor, cause: str) -> None:
    with pytest.raises(EmbeddingError, match=f"rank 3.*{cause}"):
        feature_map().keys({feature: Jagged(values, torch.tensor([1]))})


def test_a_tensor_is_no_jagged() -> None:
    with pytest.raises(EmbeddingError, match="Tensor instead of a Jagged"):
        as_jagged(torch.tensor([1]), "a")


def test_a_feature_has_one_table() -> None:
    with pytest.raises(EmbeddingError, match="'x' is read by tables 'a' and 'b'"):
        FeatureMap(TABLES, [("x",), ("x",), ()], 0, CPU)


def test_initial_rows_depend_on_the_row_alone() -> None:
    whole = initial_rows("item", np.arange(70_000), 3, torch.float32, scale=0.5, seed=7)
    some = np.random.default_rng(1).permutation(70_000)[:500]
    assert torch.equal(initial_rows("item", some, 3, torch.float32, scale=0.5, seed=7), whole[some])
    assert float(whole.min()) >= -0.5
    assert float(whole.max()) < 0.5
    assert abs(float(whole.mean())) < 0.01
    assert abs(float(whole.std()) - 0.5 / 3**0.5) < 0.01


def test_initial_rows_of_other_seeds_and_tables_are_other_rows() -> None:
    """Not the same rows at other places either."""
    drawn = [
        initial_rows(table, np.arange(200), 2, torch.float64, scale=1.0, seed=seed)
        for table, seed in (("item", 0), ("item", 1), ("shop", 0))
    ]
    distinct = torch.unique(torch.cat(drawn), dim=0)
    assert len(distinct) == 600
    assert len(torch.unique(drawn[0])) == 400, "columns differ"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_sgd_is_torch_sgd(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(9, 4).to(dtype)
    index, grads = torch.tensor([7, 0, 3]), torch.randn(3, 4).to(dtype)
    weight = torch.nn.Parameter(rows.clone())
    weight.grad = torch.zeros_like(weight).index_copy_(0, index, grads)
    torch.optim.SGD([weight], lr=0.1).step()
    SGD(0.1).update(rows, torch.zeros(9, 0), index, grads, 1)
    if dtype == torch.float16:  # ours rounds once
        torch.testing.assert_close(rows, weight.detach(), rtol=1e-3, atol=1e-4)
    else:
        assert torch.equal(rows, weight.detach())


def test_half_precision_does_not_depend_on_the_place_of_a_row() -> None:
    torch.manual_seed(0)
    rows, grads = torch.randn(7, 5).half(), torch.randn(7, 5).half()
    for optimizer in (SGD(0.1), RowWiseAdagrad(0.1)):
        together, alone = rows.clone(), rows.clone()
        states = torch.zeros(2, 7, 1)
        optimizer.update(together, states[0], torch.arange(7), grads, 1)
        for row in range(7):
            optimizer.update(alone, states[1], torch.tensor([row]), grads[row : row + 1], 1)
        assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_row_wise_adagrad_is_its_formula(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.from_numpy(rng.normal(size=(6, 5))).to(dtype)
    state = torch.from_numpy(rng.random((6, 1))).to(wide)
    expected, total = rows.double().numpy().copy(), state.double().numpy().copy()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
    for _ in range(3):
        index = rng.permutation(6)[:4]
        grads = torch.from_numpy(rng.normal(size=(4, 5))).to(dtype)
        given_grads = grads.clone()
        RowWiseAdagrad(0.2, eps=1e-3).update(rows, state, torch.from_numpy(index), grads, 1)
        assert torch.equal(grads, given_grads), "gradients belong to the caller"
        g = given_grads.double().numpy()
        total[index] += (g**2).mean(axis=1, keepdims=True)
        expected[index] -= 0.2 * g / (np.sqrt(total[index]) + 1e-3)
        np.testing.assert_allclose(rows.double().numpy(), expected, atol=tolerance, rtol=0)
        np.testing.assert_allclose(state.double().numpy(), total, rtol=tolerance)


def test_wrong_construction() -> None:
    table = flexd.EmbeddingTable("item", 10, 4)
    with pytest.raises(TopologyError, match="layout of 2 nodes x 2 local ranks"):
        flexd.EmbeddingCollection([table], layout=RankLayout(2, 2))
    for budget in (
        {"replica_fraction": 1.5},
        {"replica_fraction": -0.1},
        {"replica_slots": [1, 2]},
        {"replica_slots": [-1]},
    ):
        with pytest.raises(EmbeddingError, match="replica budget"):
            flexd.EmbeddingCollection([table], layout=RankLayout(1, 1), **budget)
    with pytest.raises(EmbeddingError, match="'ring'"):
        flexd.EmbeddingCollection([table], layout=RankLayout(1, 1), exchange="ring")
