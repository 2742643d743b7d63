"""Batches of a next-item sequence model, by step, rank and micro-batch, from the samples of a trace.

How samples are made decides how many rows of a batch are distinct, and so what every exchange is worth. Two kinds:

- *Sequences*: a history is cut into pieces that do not overlap, and a global batch holds at most one piece of a user.
- *Impressions*: every event is a sample with the events before it as its history, so that samples of a user overlap.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array, first_of_run, places_of_runs
from flexd.core.errors import StreamError
from flexd.stream.sample_kinds import BatchOptions, SampleKind, SampleLengths
from flexd.stream.trace import Trace

# Global batches that a sample waits while others of its user are trained; then it is left out, so that batches stay in
# order of time.
MAX_WAIT_BATCHES = 8
# Samples of a rank and micro-batch where none is given, at most.
MAX_BATCH_SIZE = 512


_WORDS = {
    SampleKind.SEQUENCES: "pieces of histories that do not overlap, at most one of a user in a step",
    SampleKind.IMPRESSIONS: "a sample for every event, given to the ranks in turn: samples of a user overlap",
}


@dataclass(frozen=True)
class Batch:
    """One rank's samples of one micro-batch: for each a history and, as its last element, the item to predict.

    Attributes:
        ids: by table, int64 row ids, sample by sample.
        lengths: by table, int64 [samples].
        order: int64 [elements], the index of each element of each sequence (sample by sample, in time order) in the
            concatenated ids of the tables.
        sequence_lengths: int64 [samples], length of history and target.
        seconds: event time of the newest sample of the step.
    """

    ids: tuple[Int64Array, ...]
    lengths: tuple[Int64Array, ...]
    order: Int64Array
    sequence_lengths: Int64Array
    seconds: float


@dataclass(frozen=True)
class UsedEvents:
    """Events of the trace, by what became of them. They add up to all.

    Attributes:
        used: in a sample that is trained.
        too_short: in no sample: the rest of a history, or a history, is shorter than a sample.
        user_in_batch: in samples left out because their user was in every batch that they could have been in.
        other_steps: in samples of batches that no step trains, or too few at the end to fill one.
    """

    used: int
    too_short: int
    user_in_batch: int
    other_steps: int

    def describe(self) -> str:
        """Return the counts in words."""
        left = {
            "of histories too short": self.too_short,
            "of users already in every batch": self.user_in_batch,
            "in no step's batch": self.other_steps,
        }
        parts = [f"{count:,} {why}" for why, count in left.items() if count]
        message = f"{self.used:,} events used"
        return message if not parts else f"{message}, left out: {', '.join(parts)}"


class Batches:
    """Batches for every step, rank and micro-batch, in order of time and spread evenly over the whole trace.

    A global batch is what all ranks train in all micro-batches of one optimizer step.

    Raises:
        StreamError: the trace has too few samples, or none of that kind.
    """

    def __init__(self, trace: Trace, world_size: int, options: BatchOptions) -> None:
        self.trace, self.world_size, self.options = trace, world_size, options
        batch_size, steps, micro_batches = options.batch_size, options.steps, options.micro_batches
        made = make_samples(trace, options)
        each = world_size * micro_batches
        user_in_batch = 0
        if options.kind is SampleKind.SEQUENCES:
            groups, user_in_batch = _sequences(made, each, batch_size, steps)
        else:
            # Where there are too few samples, some are repeated.
            in_step = each * (batch_size or MAX_BATCH_SIZE)
            count = steps or max(1, len(made) // in_step)
            groups = _spread(len(made), count * in_step).reshape(count, -1)
        self.steps, self.batch_size = len(groups), groups.shape[1] // each
        self._samples = made.select(groups.reshape(-1))
        shape = (self.steps, micro_batches, self.batch_size, world_size)
        self._first, self._length = self._samples.first.reshape(shape), self._samples.length.reshape(shape)
        newest = trace.seconds[made.events[self._samples.first + self._samples.length - 1]].reshape(self.steps, -1)
        # [steps]: event time of the newest sample up to each step.
        self.seconds: Float64Array = np.maximum.accumulate(newest.max(axis=1))
        # Event time between the first and the last sample.
        self.span_seconds = float(self.seconds[-1] - newest[0].min())
        used, in_samples = self._samples.events_in(), made.events_in()
        self.events = UsedEvents(
            used=used,
            too_short=len(trace) - in_samples,
            user_in_batch=user_in_batch,
            other_steps=in_samples - used - user_in_batch,
        )

    @property
    def samples_per_step(self) -> int:
        """Samples of a global batch, of all ranks and micro-batches."""
        return int(self.options.micro_batches * self.batch_size * self.world_size)

    def samples_of(self, first_step: int, end_step: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return (sample, table, row) of each look-up of these steps, each int64; samples are numbered from 0, step by
        step."""
        steps = slice(first_step, end_step)
        first, lengths = self._first[steps].reshape(-1), self._length[steps].reshape(-1)
        events = self._samples.events[places_of_runs(first, lengths)]
        numbers = np.repeat(np.arange(len(lengths)), lengths)
        return numbers, self.trace.table[events].astype(np.int64), self.trace.row[events].astype(np.int64)

    def batch(self, step: int, rank: int, micro_batch: int = 0) -> Batch:
        first, lengths = self._first[step, micro_batch, :, rank], self._length[step, micro_batch, :, rank]
        events = self._samples.events[places_of_runs(first, lengths)]
        table, row = self.trace.table[events], self.trace.row[events]
        sample = np.repeat(np.arange(len(lengths)), lengths)
        by_table = np.argsort(table, kind="stable")
        order = np.empty(len(table), dtype=np.int64)
        order[by_table] = np.arange(len(table))
        ids, counts = [], []
        bounds = np.searchsorted(table[by_table], np.arange(len(self.trace.table_rows) + 1))
        for low, high in itertools.pairwise(bounds):
            chosen = by_table[low:high]
            ids.append(row[chosen])
            counts.append(np.bincount(sample[chosen], minlength=len(lengths)))
        return Batch(tuple(ids), tuple(counts), order, lengths, float(self.seconds[step]))

    def describe(self) -> str:
        """Return what the batches are made of, in words."""
        options = self.options
        sizes = f"{self.batch_size:,} samples per rank" + (
            f" and micro-batch, {options.micro_batches} micro-batches per step"
            if options.micro_batches > 1
            else " and step"
        )
        of = f"{options.history + 1} events"
        if options.lengths is SampleLengths.REAL:
            of = f"2 to {of}, {self._samples.length.mean():.1f} on average"
        return f"{_WORDS[options.kind]}; {sizes}, of {of}; {self.events.describe()}"


def _sequences(made: Samples, each: int, batch_size: int | None, steps: int | None) -> tuple[Int64Array, int]:
    """Return int64 [steps, global batch] indices, and the number of events in samples that waited too long.

    ``each``: samples of a global batch over ``batch_size``.
    """
    size = batch_size
    if size is None:
        size = min(MAX_BATCH_SIZE, max(1, len(made) // (each * (steps or 1))), max(1, made.users // each))
    while True:
        samples, waited_too_long = group_by_user(made.user, size * each)
        found = len(samples)
        if found >= (steps or 1):
            break
        if batch_size is not None or size == 1:
            raise StreamError(
                f"the trace has {len(made):,} samples that do not overlap, of {made.users:,} users: {found:,} batches "
                f"of {size * each:,}, at most one of a user in each",
                remedy="fewer steps, smaller batches or shorter histories, or samples that overlap (impressions)",
            )
        size = max(1, min(size - 1, size * found // (steps or 1)))
    return samples[_spread(found, steps or found)], int(made.length[waited_too_long].sum())


def _spread(available: int, wanted: int) -> Int64Array:
    return np.linspace(0, available - 1, wanted).astype(np.int64)


@dataclass(frozen=True)
class Samples:
    """Samples in the order of their last event.

    Attributes:
        events: int64 [events of the trace], indices of the events, user by user, in order of time.
        first, length: int64 [samples], each sample's part of ``events``.
        user: int64 [samples], whose history it is, numbered from 0. In a trace without users every sequence counts as
            that of another user, and all impressions are of one.
        users: how many there are.
    """

    events: Int64Array
    first: Int64Array
    length: Int64Array
    user: Int64Array
    users: int

    def __len__(self) -> int:
        return len(self.first)

    def select(self, which: Int64Array) -> Samples:
        return Samples(self.events, self.first[which], self.length[which], self.user[which], self.users)

    def events_in(self) -> int:
        """Return the number of distinct events that the samples hold."""
        edges = np.zeros(len(self.events) + 1, dtype=np.int64)
        np.add.at(edges, self.first, 1)
        np.add.at(edges, self.first + self.length, -1)
        return int(np.count_nonzero(np.cumsum(edges)))


def make_samples(trace: Trace, options: BatchOptions) -> Samples:
    """Return all samples of the trace.

    Raises:
        StreamError: no user has a history that long, or the trace has no users where the lengths need them.
    """
    kind, lengths, history = options.kind, options.lengths, options.history
    if trace.user is None and lengths is SampleLengths.REAL:
        raise StreamError(
            "a trace without users has no samples of real lengths", remedy="use a trace with users, or fixed lengths"
        )
    events, start, user = _histories(trace)
    at = np.arange(len(events))
    end = np.append(np.flatnonzero(np.diff(user)) + 1, len(user))[user]  # of the history
    # Events of the shortest sample: one to look up and one to predict.
    least = 2 if lengths is SampleLengths.REAL else history + 1
    if kind is SampleKind.SEQUENCES:
        first = at[(at - start) % (history + 1) == 0]
        length = np.minimum(history + 1, end[first] - first)
    else:
        first = np.maximum(start, at - history)
        length = at - first + 1
    long_enough = length >= least
    first, length = first[long_enough], length[long_enough]
    if not len(first):
        raise StreamError(
            f"the trace has no event with {least - 1} earlier events of its user",
            remedy="use a trace with longer histories",
        )
    by_time = np.argsort(events[first + length - 1], kind="stable")
    first, length = first[by_time], length[by_time]
    if trace.user is None and kind is SampleKind.SEQUENCES:
        return Samples(events, first, length, np.arange(len(first)), len(first))
    return Samples(events, first, length, user[first], int(user[-1]) + 1)


def _histories(trace: Trace) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the events user by user in order of time, where each one's history starts, and whose it is."""
    if trace.user is None:
        nothing = np.zeros(len(trace), dtype=np.int64)
        return np.arange(len(trace)), nothing, nothing
    events = np.argsort(trace.user, kind="stable")
    starts = first_of_run(trace.user[events])
    user = np.cumsum(starts) - 1
    return events, np.flatnonzero(starts)[user], user


def group_by_user(user: Int64Array, size: int) -> tuple[Int64Array, Int64Array]:
    """Fill batches of ``size`` in order of time with at most one sample of a user each.

    A sample of a user who is already in the batch waits for the next one. Those at the end that fill no batch are left.

    Returns:
        (int64 [batches, size] indices of samples, int64 [n] samples left out because their user had a sample in every
        batch that they could have been in).
    """
    batches: list[Int64Array] = []
    waiting, since = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    dropped: list[Int64Array] = [waiting]
    next_sample = 0
    while True:
        chosen = _first_of_each_user(user, waiting)
        while len(chosen) < size and next_sample < len(user):
            come = np.arange(next_sample, min(len(user), next_sample + size - len(chosen)))
            next_sample += len(come)
            waiting = np.concatenate([waiting, come])
            since = np.concatenate([since, np.full(len(come), len(batches))])
            chosen = _first_of_each_user(user, waiting)
        if len(chosen) < size:
            return np.array(batches, dtype=np.int64).reshape(len(batches), size), np.concatenate(dropped)
        batches.append(waiting[chosen[:size]])
        kept = np.ones(len(waiting), dtype=bool)
        kept[chosen[:size]] = False
        recent = since >= len(batches) - MAX_WAIT_BATCHES
        dropped.append(waiting[kept & ~recent])
        waiting, since = waiting[kept & recent], since[kept & recent]


def _first_of_each_user(user: Int64Array, samples: Int64Array) -> Int64Array:
    return np.sort(np.unique(user[samples], return_index=True)[1])
