"""Rows and bytes between nodes with rows re-homed and samples dealt by affinity, over the chain's on the same batches.

exchanged: four processes as 2 nodes of 2 ranks on an emulated cluster train the same global batches (32 samples a rank)
with the chain, with ``flexd.prefetch`` ("ahead"), and with a loader that deals (``flexd.affinity.NodeSampler``): with
homes where the rule puts them, and with rows moved by chunks to homes learnt on up to 40 global batches before. Every
byte that leaves a node is counted, and losses are compared; ``moving`` are the bytes of the chunks, sent once, over
those of a step of the chain. Step times are those of the slowest rank, the ways one after another. Needs root, ip, tc
and setpriv; says so and goes on without.

simulated: what crosses is counted, nothing is exchanged. Homes are learnt on up to 40 global batches before the middle
of the samples and judged on up to 8 after it. A sample of a trace is a bag (array ``sample``), a user's next 32 events
(``user``), or 32 events of the stream; none overlaps another. Made up: 64 groups of 100 rows, 16 rows of a sample of
which 95 % are of its group; uniform traffic over 100,000 rows; large batches of a catalogue of 200 rows. A row that
crosses is 64 float32, its gradient and ids: 520 bytes. Where affinity does not pay (below
``MIN_SAVING``) the chain goes on as it is.
``planted_rows`` are what the planted homes send.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout
from flexd.planner.affinity.partition import NodeHomes, learn_homes
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.planner.affinity.traffic import MIN_SAVING, WireBytes, rule_nodes, traffic
from tools.bench.harness import Outcome, at_most, check
from tools.bench.programs.affinity import WAYS, Job, Work
from tools.bench.ranks import training_ranks

Int64Array = npt.NDArray[np.int64]
Made = dict[str, tuple[SampleRows, Int64Array | None]]
"""Samples, and the group of each key, by workload."""
LOCAL_RANKS, WINDOW, JUDGED, LENGTH = 8, 40, 8, 32
PER_RANK = 32
GROUPS, GROUP_ROWS = 64, 100
WIRE = WireBytes(row=520.0)
TARGETS = {"ask_ubuntu": 0.70, "online_retail": 0.95}
PLANTED_TOLERANCE, LOSS = 0.05, 0.01
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


def planted(samples: int) -> tuple[SampleRows, Int64Array]:
    """Return samples of groups, and the group of each key."""
    rng = np.random.default_rng(0)
    group, rows = rng.integers(0, GROUPS, samples), GROUPS * GROUP_ROWS
    mixed = rng.permutation(rows)
    own = group[:, None] * GROUP_ROWS + rng.integers(0, GROUP_ROWS, (samples, 16))
    drawn = np.where(rng.random(own.shape) < 0.95, own, rng.integers(0, rows, own.shape))
    made = SampleRows.of(np.repeat(np.arange(samples), 16), mixed[drawn].reshape(-1))
    return made, np.argsort(mixed)[made.keys] // GROUP_ROWS


def uniform_samples(rows: int, samples: int, length: int) -> SampleRows:
    keys = np.random.default_rng(1).integers(0, rows, samples * length)
    return SampleRows.of(np.repeat(np.arange(samples), length), keys)


def planted_homes(window: SampleRows, batches: int, group_of_key: Int64Array, nodes: int) -> NodeHomes:
    """Return the planted groups' homes, with the touches that samples of whole groups give their nodes."""
    home = group_of_key % nodes
    uses = np.bincount(window.rows, minlength=len(window.keys)) / batches
    here = np.arange(nodes)[None, :] == home[:, None]
    # 5 % of the uses are by samples of any group.
    each = uses[:, None] * np.where(here, 0.95 + 0.05 / nodes, 0.05 / nodes)
    return NodeHomes(window.keys, home, np.exp(-each).astype(np.float32), 0.0, 0)


def measure(samples: SampleRows, nodes: int, per_node: int, group_of_key: Int64Array | None = None) -> dict[str, Any]:
    """Return the figures of one setting, or nothing if there are fewer than eight global batches."""
    size, layout = nodes * per_node, RankLayout(nodes, LOCAL_RANKS)
    batches = len(samples) // size
    if batches < 8:
        return {}
    half = batches // 2
    begin, end = max(0, half - WINDOW), min(batches, half + JUDGED)
    before, after = np.arange(begin * size, half * size), np.arange(half * size, end * size)
    window, judged = samples.select(before).compact(), samples.select(after).compact()
    clock = time.process_time()
    learnt_homes = learn_homes(window, before // size - begin, rule_nodes(window.keys, layout), nodes)
    learnt = time.process_time() - clock
    sent = traffic(judged, after // size - half, learnt_homes, layout, WIRE)
    own = learn_homes(judged, after // size - half, rule_nodes(judged.keys, layout), nodes)
    figures = {
        "loader": sent.loader_ratio, "pays": sent.loader_ratio <= 1 - MIN_SAVING,
        "own_window_loader": traffic(judged, after // size - half, own, layout, WIRE).loader_ratio,
        "learn_us_a_sample": learnt / len(before) * 1e6, "rows_learnt": len(window.keys),
        "rows_moved": learnt_homes.moved,
    }  # fmt: skip
    if group_of_key is not None:
        best = planted_homes(samples, batches, group_of_key, nodes)
        figures["planted_rows"] = traffic(judged, after // size - half, best, layout, WIRE).loader_ratio
    return figures


def workloads(options: Namespace) -> Made:
    groups, group_of_key = planted(60_000)
    made: Made = {path.stem: (trace_samples(path), None) for path in options.trace}
    return made | {
        "planted": (groups, group_of_key),
        "uniform": (uniform_samples(100_000, 60_000, 16), None),
        "catalogue": (uniform_samples(200, 60_000, 32), None),
    }


def checks_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    checks = []
    for name, of in figures.items():
        workload = name.split(",")[0]
        if workload in TARGETS:
            checks.append(at_most(f"{name}: loader", of["loader"], TARGETS[workload]))
        else:
            checks.append(at_most(f"{name}: loss", of["loader"] - 1, LOSS))
        if "planted_rows" in of:
            checks.append(
                at_most(f"{name}: over the planted", of["loader"] / of["planted_rows"] - 1, PLANTED_TOLERANCE)
            )
        if workload == "catalogue":
            checks.append(check(f"{name}: pays", of["pays"], "0: not here", not of["pays"]))
    return checks


def simulated(options: Namespace) -> Outcome:
    settings = [(2, 512)] if options.quick else [(nodes, each) for nodes in (2, 4, 8) for each in (64, 512)]
    figures = {
        f"{workload}, {nodes} nodes of {each}": found
        for workload, (samples, groups) in workloads(options).items()
        for nodes, each in settings
        if (found := measure(samples, nodes, each, groups))
    }
    return Outcome(figures, checks_of(figures))


def exchanged(options: Namespace) -> Outcome:
    few, layout = 8 if options.quick else 24, RankLayout(2, 2)
    works = {
        name: Work.of(samples, layout, PER_RANK, 24 if name == "catalogue" else few, WINDOW)
        for name, (samples, _) in workloads(options).items()
    }
    figures: dict[str, Any] = {}
    checks: list[dict[str, Any]] = []
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(pickle.dumps(works))
        with training_ranks("tools.bench.programs.affinity", Job(file.name)) as (cluster, ranks):
            cluster.limit(options.rate_mbit)
            for name, work in works.items():
                found = {
                    way: ranks.ask({"ask": "train", "work": name, "way": way}, TRAIN_SECONDS)
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
        "batches": work.batches, "chain_bytes": sent["chain"], "moved_rows": len(work.moved), "moving_bytes": moving,
        **{way: sent[way] / max(1, sent["chain"]) for way in WAYS[1:]},
        "moving_over_a_step": moving / max(1.0, sent["chain"] / work.batches),
        "loss_difference": max(float(np.abs(losses[way] / losses["chain"] - 1).max()) for way in WAYS[1:]),
        "step_ms": {way: 1e3 * max(rank["step_seconds"] for rank in by_rank) for way, by_rank in found.items()},
    }  # fmt: skip


SECTIONS = {"exchanged": exchanged, "simulated": simulated}
