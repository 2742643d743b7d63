"""A fault at each stage of counting a message: all of it is counted or none, whatever is raised and wherever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flexd.core.errors import SketchError
from flexd.core.supervision import UnsafeStateError
from flexd.sketch import ingestor as ingestor_module
from flexd.sketch import sketch_set
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.ingestor import DeadLetterFile, MessageCounter
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_sketch import AccessSample, TableSketch
from flexd.stream.types import AccessBatch
from tests.support.ingest_fakes import T0, FakeSource, make_ingestor, run_to_the_end

ROWS, MESSAGES = np.arange(-1, 9, dtype=np.int64), 6
"""Each message has three batches of them, so nine accepted accesses and one negative row in each batch."""
ERRORS = {"memory": MemoryError("no memory"), "sketch": SketchError("malformed")}

STAGES: list[tuple[Any, str]] = [
    (sketch_set.SketchSet, "ingest"),
    (ForwardDecay, "admit"),
    (TableSketch, "fit_unit"),
    (TableSketch, "add"),
    (AccessSample, "add"),
    (sketch_set, "_access_counts"),
    (ingestor_module, "_ingest"),
    (MessageCounter, "_reject"),
    (MessageCounter, "_arrival"),
    (DeadLetterFile, "_append"),
]


def batches(payload: Any, _: int) -> list[AccessBatch]:
    """Decode message i: two batches of one table around one of another."""
    number = int(bytes(payload))
    lengths = np.array([4, 6], dtype=np.int32)
    return [AccessBatch(table, ROWS, 0, T0 + number, lengths) for table in ("small", "large", "small")]


class FaultAt:
    """Raises ``error`` instead of the n-th call of a function, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, n: int, error: Exception) -> None:
        original, calls = getattr(owner, name), [0]

        def call(*args: Any, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] == n:
                raise error
            return original(*args, **more)

        monkeypatch.setattr(owner, name, call)
        self.calls = calls


def run_all(tmp_path: Any) -> tuple[Any, bool]:
    """Run an ingest to the end of the stream or of itself; return it, and whether it ended because it had to."""
    source = FakeSource({"p": [str(number).encode() for number in range(MESSAGES)]})
    ingestor = make_ingestor(
        source, SnapshotStore(tmp_path / "state", 2), snapshot_interval_seconds=0.0,
        dead_letters=DeadLetterFile(tmp_path / "dead.jsonl", 100_000, 64),
    )  # fmt: skip
    try:
        run_to_the_end(ingestor, source)
    except UnsafeStateError:
        return ingestor, True
    return ingestor, False


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("owner", "name"), STAGES, ids=[f"{name}" for _, name in STAGES])
def test_a_fault_at_any_stage_counts_each_message_wholly_or_not_at_all(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, n: int, error: Exception
) -> None:
    monkeypatch.setattr(ingestor_module, "decode_message", batches)
    with monkeypatch.context() as patch:
        fault = FaultAt(patch, owner, name, n, error)
        ingestor, ended = run_all(tmp_path)
        reached = fault.calls[0] >= n
    if ended:
        ingestor, again = run_all(tmp_path)
        assert not again
    samples = ingestor.sketches.samples_by_table()
    counter = ingestor.counter
    skipped = sum(counter.rejected.values())
    assert samples == ((MESSAGES - skipped) * 2 * 9, (MESSAGES - skipped) * 9)
    assert skipped <= (1 if reached and not ended else 0)
    if not ended:
        assert counter.messages == MESSAGES
        assert counter.accesses.accepted == sum(samples)
        assert counter.accesses.negative_row == (MESSAGES - skipped) * 3
