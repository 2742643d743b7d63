"""Traces: files, the synthetic one, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.core.errors import StreamError
from flexd.stream.trace import ZipfSampler, load_trace, scatter, scatter_multiplier, synthetic_trace

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
    assert (trace.table.tolist(), trace.row.tolist()) == ([0, 1, 1, 0], [0, 1, 4, 2])
    assert trace.seconds.tolist() == [5.0, 5.0, 6.0, 9.0]
    assert (trace.user.tolist(), trace.table_names) == ([3, 3, 4, 3], ("shop", "item"))
    assert trace.table_rows.tolist() == [3, 5]


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


def test_the_synthetic_trace_drifts_and_repeats_with_its_seed() -> None:
    trace, again = synthetic_trace(30_000, 7), synthetic_trace(30_000, 7)
    assert np.array_equal(trace.row, again.row)
    assert not np.array_equal(trace.row, synthetic_trace(30_000, 8).row)
    assert trace.row.max() < trace.table_rows[0]

    def hottest(rows: np.ndarray) -> set[int]:
        return set(np.argsort(np.bincount(rows, minlength=12_000))[-50:].tolist())

    first, last = hottest(trace.row[:5_000]), hottest(trace.row[-5_000:])
    assert 0 < len(first & last) < 40


@pytest.mark.parametrize(
    ("ranks", "exponent"), [(1, 1.2), (2, 1.0), (10, 1.0), (50, 0.5), (1000, 1.05), (7, 3.0), (300, 1.0 + 1e-9)]
)
def test_zipf_has_its_distribution(ranks, exponent):
    count = 200_000
    sampled = ZipfSampler(ranks, exponent).sample(count, np.random.default_rng(7))
    weights = np.arange(1, ranks + 1) ** -exponent
    expected = count * weights / weights.sum()
    observed = np.bincount(sampled, minlength=ranks)
    assert len(observed) == ranks
    statistic = float(((observed - expected) ** 2 / expected).sum())
    # Chi-square with ranks - 1 degrees of freedom: mean plus six standard deviations.
    assert statistic < (ranks - 1) + 6 * np.sqrt(2 * max(ranks - 1, 1))


def test_zipf_of_a_billion_ranks():
    sampled = ZipfSampler(10**9, 1.05).sample(100_000, np.random.default_rng(0))
    assert sampled.min() == 0
    assert 10**7 < sampled.max() < 10**9
    # P(rank 0) = 1 / H(1e9, 1.05); the sum by Euler-Maclaurin.
    assert abs((sampled == 0).mean() - 1 / ((1 - 1e9**-0.05) / 0.05 + 0.5 + 1.05 / 12)) < 0.005


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 97, 1000, 2**16])
def test_scatter_is_a_bijection(rows):
    assert np.array_equal(np.sort(scatter(np.arange(rows), rows, scatter_multiplier(rows))), np.arange(rows))
