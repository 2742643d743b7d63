"""Tables of unbounded ids in training: each id is looked up, must choose among eight contexts, and is trained on then.

The id of an event has 16 numbers that must rank the event's context above seven of events near in time (sampled
softmax, row-wise Adagrad, 256 events a step). *Gap* is the way from one row for all ids to a row for every id, in the
mean loss of the second half of the events: 0 and 1 are those two. Every table has a share of a row per distinct id, and
begins with zeros: ids modulo its rows, rows for ids looked up five times while there are any, least-recently-used rows,
TorchRec's DistanceLFU, decided 200 times, and the unbounded ids of flexd, admitted at the first and at the second
look-up. All train in one process with the same batches.

Of a *flood* half of the events in the third quarter are of ids that come once, with contexts drawn at random; the gap
is that of the other events.

``--trace`` reads an npz file of int arrays ``sample``, ``table``, ``row`` and ``ts``, one element per look-up,
ascending by time: table 0 has the tags of each sample, table 1 the person. Without it events are made up, of people
whose interest is one of 64 topics and of whom most come a few times. ``--quick`` trains on a few of these. cost: a step
and a start (``sections.ids_cost``). stream: rows that a stream says are worth having (``sections.ids_stream``).
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import flexd
from flexd.embedding.ids.slot_table import COUNTS
from flexd.embedding.row_hashes import splitmix64
from tools.bench.harness import Outcome, at_least, at_most, of_runs
from tools.bench.sections import id_policies, ids_cost, ids_stream

DIM, CANDIDATES, BATCH = 16, 8, 256
SHARES = (8, 32)
"""Distinct ids per row of the tables."""
ONCE, TWICE = "unbounded, admit_after 1", "unbounded, admit_after 2"
POLICIES = ("modulo hash", "threshold 5", "least recently used", "DistanceLFU", ONCE, TWICE)
LEAST_OVER_OTHERS, MOST_LOST_IN_FLOOD = 0.0, 0.04

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Events:
    """Events in the order of time.

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

    def flooded(self, rng: np.random.Generator) -> Events:
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
    every = np.ones(len(ids), dtype=bool)
    return Events(dense, len(distinct), contexts, starts, tokens, int(tokens.max()) + 1, every, len(ids) // 2)


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


def train(events: Events, ids: Ints, table: flexd.EmbeddingTable, seed: int) -> dict[str, float]:
    """Train on all events once. Returns the loss of the events of the second half that count, evictions and seconds."""
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
        loss = torch.nn.functional.cross_entropy(scores, torch.zeros_like(one), reduction="none")
        loss.sum().backward()  # type: ignore[no-untyped-call]
        collection.optimizer.step()
        losses.append(loss.detach())
    loss_of_all = torch.cat(losses)
    counts = torch.from_numpy(events.counts)[: len(loss_of_all)].clone()
    counts[: events.half] = False
    known = collection.engine.ids
    evicted = 0 if known is None else int(known.slots.counts[0, COUNTS.index("evicted")])
    return {
        "loss": float(loss_of_all[counts].mean()),
        "evictions_per_1000": 1000 * evicted / len(ids),
        "seconds": time.perf_counter() - began,
    }


def table_of(rows: int, admit_after: int = 0) -> flexd.EmbeddingTable:
    more: dict[str, Any] = {"ids": "unbounded", "admit_after": admit_after} if admit_after else {}
    return flexd.EmbeddingTable("ids", rows, DIM, init_scale=0.0, **more)


def scale_of(events: Events, seed: int) -> tuple[float, float]:
    """Return the losses of one row for all ids and of a row for every id."""
    none = train(events, np.zeros_like(events.ids), table_of(1), seed)["loss"]
    every = min(
        train(events, events.ids, table_of(events.distinct), seed)["loss"],
        train(events, mixed(events.ids), table_of(4 * events.distinct, admit_after=1), seed)["loss"],
    )
    return none, every


def compared(events: Events, seed: int) -> dict[str, Any]:
    """Train all tables. Returns their gaps by share of rows, and what a flood takes of them."""
    hashed = mixed(events.ids)
    none, every = scale_of(events, seed)
    found: dict[str, Any] = {
        "look_ups": len(events.ids), "ids": events.distinct, "loss": {"none": none, "every": every}
    }  # fmt: skip
    for share in SHARES:
        rows = events.distinct // share
        others = {
            "modulo hash": id_policies.hashed_rows(hashed, rows),
            "threshold 5": id_policies.rows_after(events.ids, rows, 5),
            "least recently used": id_policies.least_recently_used(events.ids, rows),
            "DistanceLFU": id_policies.distance_lfu(events.ids, rows, max(2048, len(events.ids) // 200)),
        }
        for name in POLICIES:
            if name in others:
                ids, table_rows, evicted = others[name]
                one = train(events, ids, table_of(table_rows), seed)
                one["evictions_per_1000"] = 1000 * evicted / len(ids)
            else:
                one = train(events, hashed, table_of(rows, admit_after=1 + (name == TWICE)), seed)
            found.setdefault(f"1/{share}", {})[name] = {"gap": (none - one["loss"]) / (none - every), **one}
            print(f"seed {seed}, rows 1/{share}, {name}: gap {found[f'1/{share}'][name]['gap']:.3f}")
    flooded = events.flooded(np.random.default_rng(seed))
    none, every = scale_of(flooded, seed)
    rows, of_flood = events.distinct // SHARES[0], mixed(flooded.ids)
    found["flood"] = {}
    for name, ids, table in (
        ("modulo hash", of_flood % rows, table_of(rows)),
        (ONCE, of_flood, table_of(rows, admit_after=1)),
        (TWICE, of_flood, table_of(rows, admit_after=2)),
    ):
        gap = (none - train(flooded, ids, table, seed)["loss"]) / (none - every)
        found["flood"][name] = {"gap": gap, "lost": found[f"1/{SHARES[0]}"][name]["gap"] - gap}
        print(f"seed {seed}, flood, rows 1/{SHARES[0]}, {name}: gap {gap:.3f}")
    return found


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
    # Made-up ids that share a row have nothing in common, so that a row of zeros is the better start.
    others = POLICIES[:-2] if options.trace and not options.quick else POLICIES[:1]
    for share in SHARES:
        gaps = {name: figures[f"1/{share}"][name]["gap"] for name in POLICIES}
        for name in others:
            over = max(gaps[ONCE], gaps[TWICE]) - gaps[name]
            checks.append(at_least(f"rows 1/{share}: the better of the two over {name}", over, LEAST_OVER_OTHERS))
    lost = figures["flood"][TWICE]["lost"]
    checks.append(at_most("flood: gap that admit_after 2 loses", lost, MOST_LOST_IN_FLOOD))
    return Outcome(figures, checks)


SECTIONS = {"policies": run, "cost": ids_cost.section, "stream": ids_stream.section}
