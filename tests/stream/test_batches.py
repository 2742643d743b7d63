"""Samples and batches of a trace: what is in them, and what is left out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import StreamError
from flexd.stream.batches import MAX_WAIT_BATCHES, Batch, Batches, group_by_user
from flexd.stream.sample_kinds import BatchOptions, SampleKind, SampleLengths
from flexd.stream.trace import Trace


def _trace(seed: int, events: int, tables: int, users: int | None) -> Trace:
    """Make a trace whose row ids are the numbers of its events."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, tables, events)
    user = None if users is None else rng.integers(0, users, events) ** 2 // users * 7
    return Trace(
        table, np.arange(events), np.cumsum(rng.random(events)), user, np.full(tables, events),
        tuple(f"t{i}" for i in range(tables)),
    )  # fmt: skip


def _events_of(batch: Batch) -> list[list[int]]:
    """Return the events of each sample."""
    events = np.concatenate(batch.ids)[batch.order]
    return [part.tolist() for part in np.split(events, np.cumsum(batch.sequence_lengths)[:-1])]


def _naive(trace: Trace, world: int, size: int, steps: int, history: int, least: int) -> list[list[list[list[int]]]]:
    """Return [step][rank][sample] -> the events of its sequence, in time order."""
    past: dict[int, list[int]] = {}
    sequences = []
    for event in range(len(trace)):
        earlier = past.setdefault(0 if trace.user is None else int(trace.user[event]), [])
        if len(earlier) >= least:
            sequences.append([*earlier[max(0, len(earlier) - history) :], event])
        earlier.append(event)
    wanted = steps * size * world
    picks = [sequences[int(i)] for i in np.linspace(0, len(sequences) - 1, wanted)]
    return [[picks[step * size * world + rank :: world][:size] for rank in range(world)] for step in range(steps)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), with_users=st.booleans(), world=st.integers(1, 3), size=st.integers(1, 4),
    steps=st.integers(1, 4), history=st.integers(1, 5), real=st.booleans(), tables=st.integers(1, 3),
)  # fmt: skip
def test_impressions_are_those_of_a_naive_loader(
    seed: int, with_users: bool, world: int, size: int, steps: int, history: int, real: bool, tables: int
) -> None:
    trace = _trace(seed, 60, tables, 5 if with_users else None)
    lengths = SampleLengths.REAL if real and with_users else SampleLengths.FIXED
    batches = Batches(trace, world, BatchOptions(history, size, steps, SampleKind.IMPRESSIONS, lengths))
    expected = _naive(trace, world, size, steps, history, 1 if real and with_users else history)
    for step in range(steps):
        for rank in range(world):
            batch = batches.batch(step, rank)
            samples = expected[step][rank]
            assert batch.sequence_lengths.tolist() == [len(sample) for sample in samples]
            flat = [event for sample in samples for event in sample]
            assert np.concatenate(batch.ids)[batch.order].tolist() == trace.row[flat].tolist()
            for number in range(tables):
                of_table = [[int(trace.row[e]) for e in sample if trace.table[e] == number] for sample in samples]
                assert batch.ids[number].tolist() == [row for rows in of_table for row in rows]
                assert batch.lengths[number].tolist() == [len(rows) for rows in of_table]
            # Which table an element is looked up in, not only which row id it has.
            bounds = np.cumsum([len(ids) for ids in batch.ids])
            assert np.searchsorted(bounds, batch.order, side="right").tolist() == trace.table[flat].tolist()
            assert batch.seconds == max(trace.seconds[sample[-1]] for shard in expected[step] for sample in shard)
    last = [sample[-1] for rank in expected[-1] for sample in rank]
    first = [sample[-1] for rank in expected[0] for sample in rank]
    assert batches.span_seconds == trace.seconds[max(last)] - trace.seconds[min(first)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), users=st.none() | st.integers(2, 30), world=st.integers(1, 3),
    size=st.none() | st.integers(1, 3), micro=st.integers(1, 2), steps=st.none() | st.integers(1, 4),
    history=st.integers(1, 5), real=st.booleans(),
)  # fmt: skip
def test_sequences_share_no_event_and_no_batch_has_two_of_a_user(
    seed: int, users: int | None, world: int, size: int | None, micro: int, steps: int | None, history: int, real: bool
) -> None:
    trace = _trace(seed, 300, 2, users)
    lengths = SampleLengths.REAL if real and users is not None else SampleLengths.FIXED
    try:
        batches = Batches(trace, world, BatchOptions(history, size, steps, lengths=lengths, micro_batches=micro))
    except StreamError:
        return  # too few samples for the job
    assert batches.steps == (steps or batches.steps)
    seen: list[int] = []
    last = -1.0
    for step in range(batches.steps):
        trained: list[int] = []
        for passed in range(micro):
            for rank in range(world):
                samples = _events_of(batches.batch(step, rank, passed))
                assert len(samples) == (size or batches.batch_size)
                for sample in samples:
                    assert sample == sorted(sample)
                    allowed = range(2, history + 2) if lengths is SampleLengths.REAL else [history + 1]
                    assert len(sample) in allowed
                    seen += sample
                    if trace.user is not None:
                        (owner,) = set(trace.user[sample].tolist())
                        between = trace.user[sample[0] : sample[-1] + 1]
                        assert np.count_nonzero(between == owner) == len(sample), "an event of the history is missing"
                        trained.append(owner)
        assert len(trained) == len(set(trained)), "two samples of a user in a global batch"
        assert batches.seconds[step] >= last
        last = batches.seconds[step]
    assert len(seen) == len(set(seen)), "an event in two samples"
    counted = batches.events
    assert counted.used == len(seen)
    assert counted.used + counted.too_short + counted.user_in_batch + counted.other_steps == len(trace)
    assert min(counted.too_short, counted.user_in_batch, counted.other_steps) >= 0


def test_a_sample_waits_for_the_next_batch_and_not_for_ever() -> None:
    """User 0 has every other sample; batches of three hold one of them, and the others wait."""
    user = np.where(np.arange(200) % 2 == 0, 0, np.arange(200))
    samples, waited_too_long = group_by_user(user, 3)
    assert samples[0].tolist() == [0, 1, 3]
    assert samples[1].tolist() == [2, 5, 7], "sample 2 goes before samples that come after it"
    assert len(waited_too_long)
    assert not set(waited_too_long.tolist()) & set(samples.reshape(-1).tolist())
    taken = [(at, int(sample)) for at, batch in enumerate(samples) for sample in batch if user[sample] == 0]
    # A batch has two samples of other users, so four samples of the trace come in each.
    assert max(at - sample // 4 for at, sample in taken) <= MAX_WAIT_BATCHES


def test_a_trace_without_users_has_no_real_lengths() -> None:
    with pytest.raises(StreamError, match="without users"):
        Batches(_trace(1, 60, 1, None), 1, BatchOptions(2, 1, 1, lengths=SampleLengths.REAL))
