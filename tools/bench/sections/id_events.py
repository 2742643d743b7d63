"""Events of ids that nobody can number beforehand, and what a model must learn of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import flexd

DIM, CANDIDATES, NOT_BOUGHT, STEP_EVENTS = 16, 8, 2, 256

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Choices:
    """Events in the order of time; the vector of an event's id must rank its context above those of others.

    Attributes:
        ids: int64 [n] in 0..distinct - 1.
        contexts: int64 [n, 8] contexts to rank, the right one first.
        starts, tokens: tokens of context c are ``tokens[starts[c] : starts[c + 1]]``.
        kinds: number of different tokens.
        counts: bool [n]: events whose loss counts, with others in the second half of the time.
        half: the event at which it begins.
    """

    ids: Ints
    distinct: int
    contexts: Ints
    starts: Ints
    tokens: Ints
    kinds: int
    counts: npt.NDArray[np.bool_]
    half: int

    def flooded(self, rng: np.random.Generator) -> Choices:
        """Return the events with as many of ids that come once among those of the third quarter."""
        count = len(self.ids)
        number = 3 * count // 4 - self.half
        when = np.concatenate([np.arange(count), self.half + np.arange(number) + 0.5])
        order = np.argsort(when, kind="stable")
        contexts = rng.permuted(self.contexts[rng.integers(0, count, number)], axis=1)
        ids = np.concatenate([self.ids, self.distinct + np.arange(number)])[order]
        return replace(
            self, ids=ids, distinct=self.distinct + number, contexts=np.concatenate([self.contexts, contexts])[order],
            counts=order < count,
        )  # fmt: skip

    dim, look_ups_per_step = DIM, STEP_EVENTS

    def tables(self) -> list[flexd.EmbeddingTable]:
        bags = {"dim": DIM, "pooling": "mean"}
        return [
            flexd.EmbeddingBagTable("tokens", self.kinds, **bags, init_scale=0.17),
            flexd.EmbeddingBagTable("bias", self.kinds, **bags | {"dim": 1}, init_scale=0.0),
        ]

    def features(self, some: slice) -> dict[str, flexd.Jagged]:
        contexts = self.contexts[some].ravel()
        lengths = self.starts[contexts + 1] - self.starts[contexts]
        shifts = np.repeat(self.starts[contexts] - np.cumsum(lengths) + lengths, lengths)
        words = torch.from_numpy(self.tokens[np.arange(int(lengths.sum())) + shifts])
        bag = flexd.Jagged(words, torch.from_numpy(lengths))
        return {"tokens": bag, "bias": bag}

    def losses(self, found: Mapping[str, Any], some: slice) -> torch.Tensor:
        count = len(self.contexts[some])
        scores = found["tokens"].view(count, CANDIDATES, DIM) @ found["ids"].values.unsqueeze(2)
        scores = scores.squeeze(2) + found["bias"].view(count, CANDIDATES)
        return torch.nn.functional.cross_entropy(scores, torch.zeros(count, dtype=torch.int64), reduction="none")


@dataclass(frozen=True)
class Purchases:
    """Purchases, each followed by two items that others bought near in time, in the order of time. A
    factorization machine of user and item must tell which was bought; the id is the pair of both, which adds a weight
    (H. Cheng et al., Wide & Deep Learning for Recommender Systems, arXiv 1606.07792).

    Attributes:
        ids, distinct, counts, half: as of ``Choices``, by look-up.
        pairs: int64 [n, 2] tokens of user and item.
        kinds: number of different tokens.
    """

    ids: Ints
    distinct: int
    pairs: Ints
    kinds: int
    counts: npt.NDArray[np.bool_]
    half: int

    dim, look_ups_per_step = 1, STEP_EVENTS * (1 + NOT_BOUGHT)

    def tables(self) -> list[flexd.EmbeddingTable]:
        return [
            flexd.EmbeddingTable("tokens", self.kinds, DIM, init_scale=0.17),
            flexd.EmbeddingBagTable("bias", self.kinds + 1, 1, pooling="sum", init_scale=0.0),
        ]

    def features(self, some: slice) -> dict[str, flexd.Jagged]:
        pairs = torch.from_numpy(self.pairs[some])
        count = len(pairs)
        with_all = torch.cat([pairs, torch.full((count, 1), self.kinds)], dim=1)
        return {
            name: flexd.Jagged(tokens.view(-1), torch.full((count,), tokens.shape[1]))
            for name, tokens in (("tokens", pairs), ("bias", with_all))
        }

    def losses(self, found: Mapping[str, Any], some: slice) -> torch.Tensor:
        count = len(self.pairs[some])
        user, item = found["tokens"].values.view(count, 2, DIM).unbind(1)
        scores = (user * item).sum(1) + found["bias"].view(-1) + found["ids"].values.view(-1)
        bought = torch.arange(count).remainder(1 + NOT_BOUGHT).eq(0).to(scores.dtype)
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, bought, reduction="none")


Events = Choices | Purchases


def nearby(count: int, others: int, window: int, rng: np.random.Generator) -> Ints:
    """Draw for each of so many events as many others that are less than ``window`` away: int64 [count, others]."""
    at = np.arange(count)[:, None]
    away = rng.integers(1, window, (count, others)) * rng.choice([-1, 1], (count, others))
    return np.where((at + away < 0) | (at + away >= count), at - away, at + away).clip(0, count - 1)


def purchases(users: Ints, items: Ints, rng: np.random.Generator) -> Purchases:
    """Add items that were not bought."""
    every = np.concatenate([items[:, None], items[nearby(len(items), NOT_BOUGHT, 5000, rng)]], axis=1).ravel()
    users, first_item = np.repeat(users, 1 + NOT_BOUGHT), int(users.max()) + 1
    distinct, dense = np.unique(users * (int(items.max()) + 1) + every, return_inverse=True)
    pairs = np.stack([users, first_item + every], axis=1)
    counts, kinds = np.ones(len(dense), dtype=bool), first_item + int(items.max()) + 1
    return Purchases(dense, len(distinct), pairs, kinds, counts, len(items) // 2 * (1 + NOT_BOUGHT))


def with_contexts(ids: Ints, context: Ints, starts: Ints, tokens: Ints, rng: np.random.Generator) -> Choices:
    """Add contexts of events at most 2,000 away to choose from."""
    near = nearby(len(ids), CANDIDATES - 1, 2000, rng)
    distinct, dense = np.unique(ids, return_inverse=True)
    contexts = np.concatenate([context[:, None], context[near]], axis=1)
    every = np.ones(len(ids), dtype=bool)
    return Choices(dense, len(distinct), contexts, starts, tokens, int(tokens.max()) + 1, every, len(ids) // 2)


def of_trace(path: Path, rng: np.random.Generator) -> Events:
    """Read events of people and the tags of what they turn to, or, without ``table``, of users and what they buy."""
    trace = np.load(path)
    if "table" not in trace:
        return purchases(trace["user"].astype(np.int64), trace["row"].astype(np.int64), rng)
    sample, table, row, ts = (trace[name].astype(np.int64) for name in ("sample", "table", "row", "ts"))
    people = ts[table == 1]
    used = (ts >= people.min()) & (ts <= people.max())
    sample, table, row = np.unique(sample[used], return_inverse=True)[1], table[used], row[used]
    tags = np.unique(row[table == 0], return_inverse=True)[1]
    order = np.argsort(sample[table == 0], kind="stable")
    starts = np.concatenate([[0], np.bincount(sample[table == 0], minlength=int(sample.max()) + 1).cumsum()])
    known = (table == 1) & (starts[sample + 1] > starts[sample])
    return with_contexts(row[known], sample[known], starts, tags[order], rng)


def made_up(events: int, rng: np.random.Generator) -> Choices:
    """Make events of people who come at any time and then more often for a while."""
    people = events // 8
    popular = rng.zipf(1.6, events).clip(max=people) + (np.arange(events) // 4)
    topic = rng.integers(0, 64, int(popular.max()) + 1)[popular]
    topic = np.where(rng.random(events) < 0.7, topic, rng.integers(0, 64, events))
    tokens = rng.integers(0, 16, (events, 3)) + topic[:, None] * 16
    return with_contexts(popular, np.arange(events), np.arange(events + 1) * 3, tokens.ravel(), rng)
