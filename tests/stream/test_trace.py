"""Traces: invalid files, and batches compared with those of a naive implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import StreamError
from flexd.stream.trace import Batches, Trace, load_trace, synthetic_trace

GOOD: dict[str, Any] = {
    "row": np.array([0, 1, 4, 2], np.int32),
    "ts": np.array([5, 5, 6, 9]),
    "table": np.array([0, 1, 1, 0], np.uint8),
    "user": np.array([3, 3, 4, 3], np.int32),
    "table_rows": np.array([3, 5], np.int32),
    "table_names": np.array(["shop", "item"]),
}


def _saved(path: Path, **changes: Any) -> Path:
    arrays = {name: array for name, array in {**GOOD, **changes}.items() if array is not None}
    np.savez(path / "trace.npz", **arrays)
    return path / "trace.npz"


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = load_trace(_saved(tmp_path))
    assert trace.table.tolist() == [0, 1, 1, 0]
    assert trace.row.tolist() == [0, 1, 4, 2]
    assert trace.seconds.tolist() == [5.0, 5.0, 6.0, 9.0]
    assert trace.user is not None
    assert trace.user.tolist() == [3, 3, 4, 3]
    assert trace.table_names == ("shop", "item")
    assert trace.table_rows.tolist() == [3, 5]


def test_table_and_user_may_be_left_out(tmp_path: Path) -> None:
    trace = load_trace(_saved(tmp_path, table=None, user=None, table_rows=np.array([5]), table_names=np.array(["x"])))
    assert trace.table.tolist() == [0, 0, 0, 0]
    assert trace.user is None


@pytest.mark.parametrize(
    "changes",
    [
        {"row": None},
        {"ts": None},
        {"table_rows": None},
        {"table_names": None},
        {"row": np.array([0, 1, 5, 2])},
        {"row": np.array([3, 1, 4, 2])},
        {"row": np.array([-1, 1, 4, 2])},
        {"row": np.array([0.5, 1, 4, 2])},
        {"row": np.array(["a", "b", "c", "d"])},
        {"row": np.array([[0, 1, 4, 2]])},
        {"row": np.array([None, 1, 2, 3], dtype=object)},
        {"row": np.array([0, 1, 4])},
        {"table": np.array([0, 2, 1, 0])},
        {"table": np.array([0, -1, 1, 0])},
        {"table": np.array([0, 1, 1])},
        {"user": np.array([1, 2])},
        {"user": np.array(["a", "b", "c", "d"])},
        {"ts": np.array([5.0, np.nan, 6.0, 9.0])},
        {"ts": np.array([5.0, 5.0, 6.0, np.inf])},
        {"ts": np.array([5, 4, 6, 9])},
        {"ts": np.array([-1, 4, 6, 9])},
        {"table_rows": np.array(3)},
        {"table_rows": np.array([3, 5, 7])},
        {"table_names": np.array(["same", "same"])},
        {"row": np.array([], np.int64), "ts": np.array([]), "table": None, "user": None},
    ],
    ids=str,
)
def test_an_invalid_trace_is_refused_with_the_file_s_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = _saved(tmp_path, **changes)
    with pytest.raises(StreamError, match=r"trace\.npz"):
        load_trace(path)


def test_files_that_are_no_npz_are_refused(tmp_path: Path) -> None:
    whole = _saved(tmp_path).read_bytes()
    np.save(tmp_path / "array.npy", np.arange(4))
    contents = {
        "empty": b"",
        "text": b"row,ts\n1,2\n",
        "cut": whole[: len(whole) // 2],
        "damaged": whole[:300] + bytes(40) + whole[340:],
        "array": (tmp_path / "array.npy").read_bytes(),
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        with pytest.raises(StreamError, match=f"{name}.npz"):
            load_trace(path)
    with pytest.raises(StreamError, match=r"nothing\.npz"):
        load_trace(tmp_path / "nothing.npz")


def _naive(trace: Trace, world: int, size: int, steps: int, history: int, least: int) -> list[list[list[list[int]]]]:
    """Return [step][rank][sample] -> the events of its sequence, in time order."""
    past: dict[int, list[int]] = {}
    sequences = []
    for event in range(len(trace)):
        user = 0 if trace.user is None else int(trace.user[event])
        earlier = past.setdefault(user, [])
        if len(earlier) >= least:
            sequences.append([*earlier[max(0, len(earlier) - history) :], event])
        earlier.append(event)
    wanted = steps * size * world
    picks = [sequences[int(i)] for i in np.linspace(0, len(sequences) - 1, wanted)]
    return [[picks[step * size * world + rank :: world][:size] for rank in range(world)] for step in range(steps)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), with_users=st.booleans(), world=st.integers(1, 3), size=st.integers(1, 4),
    steps=st.integers(1, 4), history=st.integers(1, 5), least=st.integers(1, 3), tables=st.integers(1, 3),
)  # fmt: skip
def test_batches_are_those_of_a_naive_loader(
    seed: int, with_users: bool, world: int, size: int, steps: int, history: int, least: int, tables: int
) -> None:
    rng = np.random.default_rng(seed)
    events = 60
    table = rng.integers(0, tables, events)
    table_rows = rng.integers(1, 9, tables)
    user = rng.integers(0, 5, events) if with_users else None
    trace = Trace(
        table, rng.integers(0, table_rows[table]), np.cumsum(rng.random(events)), user, table_rows,
        tuple(f"t{i}" for i in range(tables)),
    )  # fmt: skip
    batches = Batches(trace, world_size=world, batch_size=size, steps=steps, history=history, min_history=least)
    expected = _naive(trace, world, size, steps, history, least)
    for step in range(steps):
        for rank in range(world):
            batch = batches.batch(step, rank)
            samples = expected[step][rank]
            assert batch.sequence_lengths.tolist() == [len(sample) for sample in samples]
            flat = [event for sample in samples for event in sample]
            laid_out = np.concatenate(batch.ids)
            assert laid_out[batch.order].tolist() == trace.row[flat].tolist()
            for number in range(tables):
                of_table = [[int(trace.row[e]) for e in sample if trace.table[e] == number] for sample in samples]
                assert batch.ids[number].tolist() == [row for rows in of_table for row in rows]
                assert batch.lengths[number].tolist() == [len(rows) for rows in of_table]
            # Which table an element is looked up in, not only which row id it has.
            bounds = np.cumsum([len(ids) for ids in batch.ids])
            assert np.searchsorted(bounds, batch.order, side="right").tolist() == trace.table[flat].tolist()
            assert batch.seconds == trace.seconds[samples[-1][-1]]
    last = [sample[-1] for rank in expected[-1] for sample in rank]
    first = [sample[-1] for rank in expected[0] for sample in rank]
    assert batches.span_seconds == trace.seconds[max(last)] - trace.seconds[min(first)]


def test_a_trace_without_histories_is_refused() -> None:
    trace = Trace(np.zeros(3, np.int64), np.arange(3), np.arange(3.0), np.arange(3), np.array([3]), ("item",))
    with pytest.raises(StreamError, match="1 earlier events"):
        Batches(trace, world_size=1, batch_size=1, steps=1, history=1, min_history=1)


def test_the_synthetic_trace_drifts_and_repeats_with_its_seed() -> None:
    trace, again = synthetic_trace(30_000, 7), synthetic_trace(30_000, 7)
    assert np.array_equal(trace.row, again.row)
    assert not np.array_equal(trace.row, synthetic_trace(30_000, 8).row)
    assert trace.row.max() < trace.table_rows[0]

    def hottest(rows: np.ndarray) -> set[int]:
        return set(np.argsort(np.bincount(rows, minlength=12_000))[-50:].tolist())

    first, last = hottest(trace.row[:5_000]), hottest(trace.row[-5_000:])
    assert 0 < len(first & last) < 40
