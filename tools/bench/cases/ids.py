"""Tables of unbounded ids in training: each id is looked up, helps to choose or to foretell, and is trained on then.

The id of an event has 16 numbers that must rank the event's context above seven of events near in time (sampled
softmax, row-wise Adagrad, 256 events a step); or it is a user x item that adds a weight to a factorization machine of
both, which must tell what was bought from what was not. *Gap* is the way from one row for all ids to a row for every
id, in the mean loss of the second half of the events: 0 and 1 are those two. Every table has a share of a row per
distinct id, and begins with zeros: ids modulo its rows, rows for ids looked up five times while there are any,
least-recently-used rows, TorchRec's DistanceLFU, decided 200 times, and the unbounded ids of flexd, admitted at the
first and at the second look-up. All train in one process with the same batches.

Of a *flood* half of the events in the third quarter are of ids that come once, with contexts drawn at random; the gap
is that of the other events.

``--trace`` reads an npz file of int arrays ``sample``, ``table``, ``row`` and ``ts``, one element per look-up,
ascending by time: table 0 has the tags of each sample, table 1 the person; or of ``user`` and ``row``, what was bought,
without a flood. Without it events are made up, of people
whose interest is one of 64 topics and of whom most come a few times. ``--quick`` trains on a few of these. cost: a step
and a start (``sections.ids_cost``). stream: rows that a stream says are worth having (``sections.ids_stream``).
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flexd
from flexd.embedding.ids.slot_table import COUNTS
from flexd.embedding.row_hashes import splitmix64
from tools.bench.harness import Outcome, at_least, at_most, of_runs
from tools.bench.sections import id_policies, ids_cost, ids_stream
from tools.bench.sections.id_events import Events, Ints, Purchases, made_up, of_trace

SHARES = (8, 32)
"""Distinct ids per row of the tables."""
ONCE, TWICE = "unbounded, admit_after 1", "unbounded, admit_after 2"
POLICIES = ("modulo hash", "threshold 5", "least recently used", "DistanceLFU", ONCE, TWICE)
LEAST_OVER_OTHERS, MOST_LOST_IN_FLOOD = 0.0, 0.04


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="NPZ", help="events of people and tags")
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs with other contexts to choose from and initial values"
    )
    parser.add_argument("--events", type=int, default=200_000, help="of made-up ones")


def mixed(ids: Ints) -> Ints:
    """Hash ids, to numbers that are not negative."""
    return splitmix64(torch.from_numpy(ids.copy())).bitwise_and_(2**63 - 1).numpy()


def train(events: Events, ids: Ints, table: flexd.EmbeddingTable, seed: int) -> dict[str, float]:
    """Train on all events once. Returns the loss of the look-ups of the second half that count, evictions and
    seconds."""
    collection = flexd.EmbeddingBagCollection(
        [table, *events.tables()], optimizer=flexd.RowWiseAdagrad(lr=0.2), layout=flexd.RankLayout(1, 1), seed=seed
    )
    losses, began, count = [], time.perf_counter(), events.look_ups_per_step
    one = torch.ones(count, dtype=torch.int64)
    for start in range(0, len(ids) - count + 1, count):
        some = slice(start, start + count)
        found = collection({"ids": flexd.Jagged(torch.from_numpy(ids[some]), one), **events.features(some)})
        loss = events.losses(found, some)
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


def table_of(events: Events, rows: int, admit_after: int = 0) -> flexd.EmbeddingTable:
    more: dict[str, Any] = {"ids": "unbounded", "admit_after": admit_after} if admit_after else {}
    return flexd.EmbeddingTable("ids", rows, events.dim, init_scale=0.0, **more)


def scale_of(events: Events, seed: int) -> tuple[float, float]:
    """Return the losses of one row for all ids and of a row for every id."""
    none = train(events, np.zeros_like(events.ids), table_of(events, 1), seed)["loss"]
    every = min(
        train(events, events.ids, table_of(events, events.distinct), seed)["loss"],
        train(events, mixed(events.ids), table_of(events, 4 * events.distinct, admit_after=1), seed)["loss"],
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
                one = train(events, ids, table_of(events, table_rows), seed)
                one["evictions_per_1000"] = 1000 * evicted / len(ids)
            else:
                one = train(events, hashed, table_of(events, rows, admit_after=1 + (name == TWICE)), seed)
            found.setdefault(f"1/{share}", {})[name] = {"gap": (none - one["loss"]) / (none - every), **one}
            print(f"seed {seed}, rows 1/{share}, {name}: gap {found[f'1/{share}'][name]['gap']:.3f}")
    if isinstance(events, Purchases):
        return found
    flooded = events.flooded(np.random.default_rng(seed))
    none, every = scale_of(flooded, seed)
    rows, of_flood = events.distinct // SHARES[0], mixed(flooded.ids)
    found["flood"] = {}
    for name, ids, table in (
        ("modulo hash", of_flood % rows, table_of(events, rows)),
        (ONCE, of_flood, table_of(events, rows, admit_after=1)),
        (TWICE, of_flood, table_of(events, rows, admit_after=2)),
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
    if "flood" in figures:
        lost = figures["flood"][TWICE]["lost"]
        checks.append(at_most("flood: gap that admit_after 2 loses", lost, MOST_LOST_IN_FLOOD))
    return Outcome(figures, checks)


SECTIONS = {"policies": run, "cost": ids_cost.section, "stream": ids_stream.section}
