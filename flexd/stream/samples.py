"""Samples of a trace: which events each training sample looks up, and which samples are trained together.

How samples are made decides how many rows of a batch are distinct, and so what every exchange is worth. Two kinds:

- *Sequences*: a history is cut into pieces that do not overlap, and a global batch holds at most one piece of a user.
- *Impressions*: every event is a sample with the events before it as its history, so that samples of a user overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.errors import StreamError
from flexd.stream.sample_kinds import SampleKind, SampleLengths
from flexd.stream.trace import Trace

Int64Array = npt.NDArray[np.int64]

LEAST_EVENTS = 2
"""Events of the shortest sample: one to look up and one to predict."""
MAX_WAIT_BATCHES = 8
"""Global batches that a sample waits while others of its user are trained; then it is left out, so that batches stay
in order of time."""


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


def make_samples(trace: Trace, kind: SampleKind, lengths: SampleLengths, history: int) -> Samples:
    """Return all samples of the trace.

    Args:
        history: events that a sample looks up besides the one that it predicts; with real lengths, the most.

    Raises:
        StreamError: no user has a history that long, or the trace has no users where the lengths need them.
    """
    if trace.user is None and lengths is SampleLengths.REAL:
        raise StreamError(
            "a trace without users has no samples of real lengths", remedy="use a trace with users, or fixed lengths"
        )
    events, start, user = _histories(trace)
    at = np.arange(len(events))
    end = np.append(np.flatnonzero(np.diff(user)) + 1, len(user))[user]  # of the history
    least = LEAST_EVENTS if lengths is SampleLengths.REAL else history + 1
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
    of_user = trace.user[events]
    starts = np.concatenate([[True], of_user[1:] != of_user[:-1]])
    user = np.cumsum(starts) - 1
    return events, np.flatnonzero(starts)[user], user


@dataclass(frozen=True)
class Grouping:
    """Samples in global batches.

    Attributes:
        samples: int64 [batches, batch size], indices of samples.
        waited_too_long: int64 [n], samples left out because their user had a sample in every batch that they could
            have been in.
    """

    samples: Int64Array
    waited_too_long: Int64Array


def group_by_user(user: Int64Array, size: int) -> Grouping:
    """Fill batches of ``size`` in order of time with at most one sample of a user each.

    A sample of a user who is already in the batch waits for the next one. Those at the end that fill no batch are left.
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
            found = np.array(batches, dtype=np.int64).reshape(len(batches), size)
            return Grouping(found, np.concatenate(dropped))
        batches.append(waiting[chosen[:size]])
        kept = np.ones(len(waiting), dtype=bool)
        kept[chosen[:size]] = False
        recent = since >= len(batches) - MAX_WAIT_BATCHES
        dropped.append(waiting[kept & ~recent])
        waiting, since = waiting[kept & recent], since[kept & recent]


def _first_of_each_user(user: Int64Array, samples: Int64Array) -> Int64Array:
    """Return the places in ``samples`` of each user's first, ascending."""
    return np.sort(np.unique(user[samples], return_index=True)[1])
