"""Rows and bytes between nodes with rows re-homed and samples dealt by affinity, over the chain's on the same batches.

Four processes as 2 nodes of 2 ranks on an emulated cluster train the same global batches (32 samples per rank)
with the chain, with ``flexd.prefetch`` ("ahead"), and with a loader that deals (``flexd.affinity.NodeSampler``): with
homes where the rule puts them, and with rows moved by chunks to homes learnt on up to 40 global batches before. Every
byte that leaves a node is counted, and losses are compared; ``moving`` are the bytes of the chunks, sent once, over
those of a step of the chain. Step times are those of the slowest rank, the ways one after another. Needs root, ip, tc
and setpriv; says so and goes on without.

A sample of a trace is a bag (array ``sample``), a user's next 32 events (``user``), or 32 events of the stream; none
overlaps another. Made up: 64 groups of 100 rows, 16 rows of a sample of which 95 % are of its group; uniform traffic
over 100,000 rows; large batches of a catalogue of 200 rows.
"""

from __future__ import annotations

import pickle
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.placement import RankLayout
from flexd.planner.affinity.window import SampleRows
from tools.bench.harness import Outcome, at_most
from tools.bench.programs.affinity import WAYS, Job, Work
from tools.bench.ranks import training_ranks

Int64Array = npt.NDArray[np.int64]
WINDOW, LENGTH = 40, 32
PER_RANK = 32
GROUPS, GROUP_ROWS = 64, 100
TARGETS = {"ask_ubuntu": 0.70, "online_retail": 0.95}
LOSS = 0.01
TRAIN_SECONDS = 300.0


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE.npz")
    parser.add_argument("--rate-mbit", type=float, default=50.0, help="of a node's link, each direction")


def trace_samples(path: Path) -> SampleRows:
    """Return the samples of a trace in order of time (of their last event); they do not overlap."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    first = np.concatenate([[0], np.cumsum(arrays["table_rows"].astype(np.int64))])
    keys = arrays["row"].astype(np.int64) + first[arrays.get("table", 0)]
    if "sample" in arrays:
        return SampleRows.of(np.unique(arrays["sample"], return_inverse=True)[1].reshape(-1), keys)
    user = arrays["user"] if "user" in arrays else np.zeros(len(keys), dtype=np.int64)
    order = np.argsort(user, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(user[order]) != 0]))
    sizes = np.diff(np.concatenate([starts, [len(keys)]]))
    position = np.arange(len(keys)) - np.repeat(starts, sizes)
    full = position < np.repeat(sizes // LENGTH * LENGTH, sizes)
    pieces = order[full].reshape(-1, LENGTH)
    pieces = pieces[np.argsort(pieces[:, -1], kind="stable")]
    return SampleRows.of(np.repeat(np.arange(len(pieces)), LENGTH), keys[pieces.reshape(-1)])


def planted(samples: int) -> SampleRows:
    """Return samples of groups."""
    rng = np.random.default_rng(0)
    group, rows = rng.integers(0, GROUPS, samples), GROUPS * GROUP_ROWS
    mixed = rng.permutation(rows)
    own = group[:, None] * GROUP_ROWS + rng.integers(0, GROUP_ROWS, (samples, 16))
    drawn = np.where(rng.random(own.shape) < 0.95, own, rng.integers(0, rows, own.shape))
    return SampleRows.of(np.repeat(np.arange(samples), 16), mixed[drawn].reshape(-1))


def uniform_samples(rows: int, samples: int, length: int) -> SampleRows:
    keys = np.random.default_rng(1).integers(0, rows, samples * length)
    return SampleRows.of(np.repeat(np.arange(samples), length), keys)


def workloads(options: Namespace) -> dict[str, SampleRows]:
    made = {path.stem: trace_samples(path) for path in options.trace}
    return made | {
        "planted": planted(60_000),
        "uniform": uniform_samples(100_000, 60_000, 16),
        "catalogue": uniform_samples(200, 60_000, 32),
    }


def exchanged(options: Namespace) -> Outcome:
    few, layout = 8 if options.quick else 24, RankLayout(2, 2)
    works = {
        name: Work.of(samples, layout, PER_RANK, 24 if name == "catalogue" else few, WINDOW)
        for name, samples in workloads(options).items()
    }
    figures: dict[str, Any] = {}
    checks: list[dict[str, Any]] = []
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(pickle.dumps(works))
        with training_ranks("tools.bench.programs.affinity", Job(file.name)) as (cluster, ranks):
            cluster.limit(options.rate_mbit)
            for name, work in works.items():
                found = {
                    way: ranks.ask(TRAIN_SECONDS, "train", work=name, way=way)
                    for way in WAYS
                    if way != "moved_loader" or len(work.moved)
                }
                # Where no row moves it is the training without moves.
                found.setdefault("moved_loader", found["loader"])
                figures[name] = of = figures_of(work, found)
                limit = TARGETS.get(name, 1 + LOSS)
                checks += [
                    at_most(f"{name}, exchanged: loader", of["loader"], limit),
                    at_most(f"{name}, exchanged: moved, loader", of["moved_loader"], limit),
                    at_most(f"{name}, exchanged: losses", of["loss_difference"], 1e-5),
                ]
    return Outcome(figures, checks)


def figures_of(work: Work, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return bytes between nodes over the chain's, step times, and the largest difference of a global loss.

    ``moving_bytes`` are sent once, when rows move, and counted in no way.
    """
    sent = {way: sum(rank["bytes"] for rank in by_rank) for way, by_rank in found.items()}
    losses = {way: np.mean([rank["losses"] for rank in by_rank], axis=0) for way, by_rank in found.items()}
    moving = sum(rank["moving"] for rank in found["moved_loader"])
    return {
        "batches": work.batches, "chain_bytes": sent["chain"], "rehomed_rows": len(work.moved), "moving_bytes": moving,
        **{way: sent[way] / max(1, sent["chain"]) for way in WAYS[1:]},
        "moving_over_a_step": moving / max(1.0, sent["chain"] / work.batches),
        "loss_difference": max(float(np.abs(losses[way] / losses["chain"] - 1).max()) for way in WAYS[1:]),
        "step_ms": {way: 1e3 * max(rank["step_seconds"] for rank in by_rank) for way, by_rank in found.items()},
    }  # fmt: skip


SECTIONS = {"exchanged": exchanged}
