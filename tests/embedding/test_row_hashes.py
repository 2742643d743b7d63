"""Initial rows are a function of seed, table, row and column; rounding at random is one of row, step and column."""

import zlib
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexd
from flexd.core.placement import RankLayout
from flexd.embedding import row_hashes
from flexd.embedding.engine import RowEngine
from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.rank_rows import InitialRows
from flexd.embedding.row_hashes import fill_initial_rows, round_stochastically


def defined(table: str, rows: np.ndarray, dim: int, *, scale: float, seed: int) -> np.ndarray:
    """Compute the definition in unsigned integers: checkpoints of a run are compared with those of another."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    salt = mix(np.array([zlib.crc32(table.encode()) << 32 | (seed & 0xFFFFFFFF)], dtype=np.uint64))
    bits = mix(mix(rows.astype(np.uint64) + salt)[:, None] + np.arange(dim, dtype=np.uint64)[None, :])
    return ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 * 2 - 1) * scale


@settings(max_examples=60, deadline=None)
@given(
    table=st.text(min_size=1, max_size=8),
    first=st.integers(0, 2**40),
    step=st.integers(1, 1024),
    count=st.integers(0, 50),
    dim=st.integers(1, 9),
    scale=st.floats(1e-6, 10.0),
    seed=st.integers(-(2**31), 2**33),
    block=st.integers(1, 64),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
)
def test_initial_rows_are_the_defined_bits_in_any_blocks(
    table: str, first: int, step: int, count: int, dim: int, scale: float, seed: int, block: int, dtype: torch.dtype
) -> None:
    rows = range(first, first + step * count, step)
    expected = defined(table, np.array(rows, np.int64), dim, scale=scale, seed=seed)
    out = torch.empty((count, dim), dtype=dtype)
    with mock.patch.object(row_hashes, "_BLOCK_NUMBERS", block):
        fill_initial_rows(out, table, rows, scale=scale, seed=seed)
    assert torch.equal(out, torch.from_numpy(expected).to(dtype))


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), nodes=st.integers(1, 4), local=st.integers(1, 3))
def test_every_layout_starts_from_the_same_tables(sizes: list[int], nodes: int, local: int) -> None:
    layout = RankLayout(nodes, local)
    tables = [flexd.EmbeddingTable(f"t{i}", rows, (2, 3)[i % 2]) for i, rows in enumerate(sizes)]
    plain = flexd.EmbeddingCollection(tables, seed=5)
    keyspace = plain.keyspace
    for rank in range(layout.world_size):
        groups = mock.Mock(layout=layout, rank=rank)
        for group in (groups.node, groups.rail, groups.world):
            group.size, group.ranks, group.rank = 1, [rank], rank
        engine = RowEngine(
            keyspace, groups, Traffic(), replica_slots=[0] * len(keyspace.groups), exchange="chain",
            gradient_scale=1.0, max_migration_bytes_per_step=1, device=torch.device("cpu"),
        )  # fmt: skip
        engine.rows.initialise(InitialRows([table.scale for table in tables], 5, {"sgd": 0.0, "adagrad": 0.0}))
        for store in engine.stores:
            of_tables, rows = keyspace.table_rows(
                store.first_home_address + store.world_size * np.arange(store.home_rows)
            )
            for slot, (table, row) in enumerate(zip(of_tables, rows, strict=True)):
                assert torch.equal(store.rows[slot], plain.initial_table(tables[table].name)[row])


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF)
def test_every_number_of_the_dtype_stays(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    rounded = round_stochastically(numbers.float()[:, None], dtype, torch.arange(2**16), 1)[:, 0]
    assert torch.equal(rounded.isnan(), numbers.isnan())
    known = ~numbers.isnan()
    assert torch.equal(rounded[known].float(), numbers[known].float())


@pytest.mark.parametrize("dtype", HALF)
@given(
    value=st.floats(2**-26, 60000.0, width=32) | st.floats(2**-26, 2**-13, width=32),
    negative=st.booleans(),
    step=st.integers(0, 2**40),
    first_key=st.integers(0, 2**62),
)
@settings(max_examples=40, deadline=None)
def test_rounding_is_unbiased(dtype: torch.dtype, value: float, negative: bool, step: int, first_key: int) -> None:
    """The mean of 2^15 draws is within 5 standard deviations, and all are one of the two neighbours."""
    value = -value if negative else value
    keys = torch.arange(2**12) + first_key
    rounded = round_stochastically(torch.full((len(keys), 8), value), dtype, keys, step).double().view(-1)
    below, above = rounded.min().item(), rounded.max().item()
    assert below <= value <= above or below == above, "one neighbour alone may be drawn if the other is improbable"
    assert len(torch.unique(rounded)) <= 2
    nearest = torch.tensor(value).to(dtype)
    ulp = max(
        abs(torch.nextafter(nearest, nearest.new_tensor(towards)).double().item() - nearest.double().item())
        for towards in (float("-inf"), float("inf"))
    )
    assert above - below <= ulp
    assert abs(rounded.mean().item() - value) <= 5 * 0.5 * ulp / len(rounded) ** 0.5
