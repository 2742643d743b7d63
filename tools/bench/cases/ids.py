"""Tables of unbounded ids in training: each id is looked up, must choose among eight contexts, and is trained on then.

The id of an event has 16 numbers that must rank the event's context above seven of events near in time (sampled
softmax, row-wise Adagrad, 256 events a step). *Gap* is the way from one row for all ids to a row for every id, in the
mean loss of the second half of the events: 0 and 1 are those two. Every table has a share of a row per distinct id, and
begins with zeros: ids modulo its rows, rows for ids looked up five times while there are any, and the unbounded ids of
flexd, admitted at the first and at the second look-up. All train in one process with the same batches.

``--trace`` reads an npz file of int arrays ``sample``, ``table``, ``row`` and ``ts``, one element per look-up,
ascending by time: table 0 has the tags of each sample, table 1 the person. Without it events are made up, of people
whose interest is one of 64 topics and of whom most come a few times. ``--quick`` trains on a few of these.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import flexd
from flexd.embedding.ids.slot_table import COUNTS
from flexd.embedding.row_hashes import splitmix64
from tools.bench.harness import Outcome, at_least, of_runs
from tools.bench.sections import ids_cost

DIM, CANDIDATES, BATCH = 16, 8, 256
SHARES = (8, 32)
"""Distinct ids per row of the tables."""
POLICIES = ("modulo hash", "threshold 5", "unbounded, admit_after 1", "unbounded, admit_after 2")
LEAST_OVER_HASH = 0.0

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Events:
    """Events in the order of time.

    Attributes:
        ids: int64 [n] in 0..distinct - 1.
        contexts: int64 [n, 8] contexts to rank, the right one first.
        starts, tokens: tokens of context c are ``tokens[starts[c] : starts[c + 1]]``.
        kinds: number of different tokens.
    """

    ids: Ints
    distinct: int
    contexts: Ints
    starts: Ints
    tokens: Ints
    kinds: int


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="NPZ", help="events of people and tags")
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs with other contexts to choose from and initial values"
    )
    parser.add_argument("--events", type=int, default=200_000, help="of made-up ones")


def with_contexts(ids: Ints, context: Ints, starts: Ints, tokens: Ints, rng: np.random.Generator) -> Events:
    """Add contexts of events at most 2,000 away to choose from."""
    at = np.arange(len(ids))[:, None]
    away = rng.integers(1, 2000, (len(ids), CANDIDATES - 1)) * rng.choice([-1, 1], (len(ids), CANDIDATES - 1))
    near = np.where((at + away < 0) | (at + away >= len(ids)), at - away, at + away).clip(0, len(ids) - 1)
    distinct, dense = np.unique(ids, return_inverse=True)
    contexts = np.concatenate([context[:, None], context[near]], axis=1)
    return Events(dense, len(distinct), contexts, starts, tokens, int(tokens.max()) + 1)


def of_trace(path: Path, rng: np.random.Generator) -> Events:
    """Read events of people and the tags of what they turn to."""
    trace = np.load(path)
    sample, table, row, ts = (trace[name].astype(np.int64) for name in ("sample", "table", "row", "ts"))
    people = ts[table == 1]
    used = (ts >= people.min()) & (ts <= people.max())
    sample, table, row = np.unique(sample[used], return_inverse=True)[1], table[used], row[used]
    tags = np.unique(row[table == 0], return_inverse=True)[1]
    order = np.argsort(sample[table == 0], kind="stable")
    starts = np.concatenate([[0], np.bincount(sample[table == 0], minlength=int(sample.max()) + 1).cumsum()])
    known = (table == 1) & (starts[sample + 1] > starts[sample])
    return with_contexts(row[known], sample[known], starts, tags[order], rng)


def made_up(events: int, rng: np.random.Generator) -> Events:
    """Make events of people who come at any time and then more often for a while."""
    people = events // 8
    popular = rng.zipf(1.6, events).clip(max=people) + (np.arange(events) // 4)
    topic = rng.integers(0, 64, int(popular.max()) + 1)[popular]
    topic = np.where(rng.random(events) < 0.7, topic, rng.integers(0, 64, events))
    tokens = rng.integers(0, 16, (events, 3)) + topic[:, None] * 16
    return with_contexts(popular, np.arange(events), np.arange(events + 1) * 3, tokens.ravel(), rng)


def mixed(ids: Ints) -> Ints:
    """Hash ids, to numbers that are not negative."""
    return splitmix64(torch.from_numpy(ids.copy())).bitwise_and_(2**63 - 1).numpy()


def admitted_after(ids: Ints, rows: int, look_ups: int) -> Ints:
    """Return rows of ids: the last one until an id was looked up so often, and for ever where there is no other."""
    order = np.argsort(ids, kind="stable")
    first = np.searchsorted(ids[order], ids[order])
    count = np.empty_like(ids)
    count[order] = np.arange(len(ids)) - first + 1
    came = np.flatnonzero(count == look_ups)[: rows - 1]
    row_of = np.full(int(ids.max()) + 1, rows - 1)
    row_of[ids[came]] = np.arange(len(came))
    return np.where(count >= look_ups, row_of[ids], rows - 1)


def train(events: Events, ids: Ints, table: flexd.EmbeddingTable, seed: int) -> dict[str, float]:
    """Train on all events once. Returns the loss of the second half, evictions and seconds."""
    bags = {"dim": DIM, "pooling": "mean"}
    tokens = flexd.EmbeddingBagTable("tokens", events.kinds, **bags, init_scale=0.17)
    bias = flexd.EmbeddingBagTable("bias", events.kinds, **bags | {"dim": 1}, init_scale=0.0)
    collection = flexd.EmbeddingBagCollection(
        [table, tokens, bias], optimizer=flexd.RowWiseAdagrad(lr=0.2), layout=flexd.RankLayout(1, 1), seed=seed
    )
    losses, began = [], time.perf_counter()
    for start in range(0, len(ids) - BATCH + 1, BATCH):
        contexts = events.contexts[start : start + BATCH].ravel()
        lengths = events.starts[contexts + 1] - events.starts[contexts]
        shifts = np.repeat(events.starts[contexts] - np.cumsum(lengths) + lengths, lengths)
        words = torch.from_numpy(events.tokens[np.arange(int(lengths.sum())) + shifts])
        bag = flexd.Jagged(words, torch.from_numpy(lengths))
        one = torch.ones(BATCH, dtype=torch.int64)
        found = collection(
            {"ids": flexd.Jagged(torch.from_numpy(ids[start : start + BATCH]), one), "tokens": bag, "bias": bag}
        )
        scores = found["tokens"].view(BATCH, CANDIDATES, DIM) @ found["ids"].values.unsqueeze(2)
        scores = scores.squeeze(2) + found["bias"].view(BATCH, CANDIDATES)
        loss = torch.nn.functional.cross_entropy(scores, torch.zeros_like(one), reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        collection.optimizer.step()
        losses.append(loss.detach() / BATCH)
    known = collection.engine.ids
    evicted = 0 if known is None else int(known.slots.counts[0, COUNTS.index("evicted")])
    return {
        "loss": float(torch.stack(losses[len(losses) // 2 :]).mean()),
        "evictions_per_1000": 1000 * evicted / len(ids),
        "seconds": time.perf_counter() - began,
    }


def table_of(rows: int, admit_after: int = 0) -> flexd.EmbeddingTable:
    more: dict[str, Any] = {"ids": "unbounded", "admit_after": admit_after} if admit_after else {}
    return flexd.EmbeddingTable("ids", rows, DIM, init_scale=0.0, **more)


def compared(events: Events, seed: int) -> dict[str, Any]:
    """Train all tables. Returns their gaps by share of rows."""
    hashed = mixed(events.ids)
    none = train(events, np.zeros_like(events.ids), table_of(1), seed)["loss"]
    every = min(
        train(events, events.ids, table_of(events.distinct), seed)["loss"],
        train(events, hashed, table_of(4 * events.distinct, admit_after=1), seed)["loss"],
    )
    rows: dict[str, Any] = {"look_ups": len(events.ids), "ids": events.distinct, "loss": {"none": none, "every": every}}
    for share in SHARES:
        count = events.distinct // share
        ways = (
            (hashed % count, table_of(count)),
            (admitted_after(events.ids, count, 5), table_of(count)),
            (hashed, table_of(count, admit_after=1)),
            (hashed, table_of(count, admit_after=2)),
        )
        for name, (ids, table) in zip(POLICIES, ways, strict=True):
            found = train(events, ids, table, seed)
            rows.setdefault(f"1/{share}", {})[name] = {"gap": (none - found["loss"]) / (none - every), **found}
            print(f"seed {seed}, rows 1/{share}, {name}: gap {rows[f'1/{share}'][name]['gap']:.3f}")
    return rows


def run(options: Namespace) -> Outcome:
    torch.set_num_threads(1)
    answers = []
    for seed in range(1 if options.quick else options.seeds):
        rng = np.random.default_rng(seed)
        if options.quick or options.trace is None:
            events = made_up(30_000 if options.quick else options.events, rng)
        else:
            events = of_trace(options.trace, rng)
        answers.append(compared(events, seed))
    figures = of_runs(answers)
    checks = []
    for share in SHARES:
        gaps = {name: figures[f"1/{share}"][name]["gap"] for name in POLICIES}
        over = gaps["unbounded, admit_after 1"] - gaps["modulo hash"]
        checks.append(at_least(f"rows 1/{share}: gap of admit_after 1 over the hash's", over, LEAST_OVER_HASH))
    return Outcome(figures, checks)


SECTIONS = {"policies": run, "cost": ids_cost.section}
