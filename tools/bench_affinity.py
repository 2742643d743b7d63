"""Rows and bytes between nodes with homes and dealing by affinity, over the chain's on the same global batches.

    python tools/bench_affinity.py [--trace ask_ubuntu.npz] [--trace online_retail.npz] [--quick] [--no-exchange]
        [--rate-mbit 50]

By real exchange: four gloo processes as 2 nodes of 2 ranks train the same global batches (32 samples a rank) with the
chain, and with a loader that deals (``flexd.affinity.NodeSampler``) and ``flexd.prefetch``: with homes where the rule
puts them, and with rows moved by chunks to homes learnt on up to 40 global batches before. Every byte that leaves a
node is counted, and losses are compared; "moving" are the bytes of the chunks, sent once, over those of a step of the
chain. With ``--rate-mbit`` the nodes are network namespaces with links of that rate (root, ip, tc): the median step of
each way stands beside, of the slowest rank, the ways one after another.

By simulation: what crosses is counted, nothing is exchanged, homes are moved. Homes are learnt on up to 40 global
batches before the middle of the samples and judged on up to 8 after it. A sample of a trace is a bag (array
``sample``), a user's next 32 events (``user``), or 32 events of the stream; none overlaps another. Made up: 64 groups
of 100 rows, 16 rows of a sample of which 95 % are of its group; uniform traffic over 100,000 rows; large batches of a
catalogue of 200 rows. A row that crosses is 64 float32, its gradient and ids: 520 bytes. ``simple rule``: bytes by
greedy dealing and alternating assignment. ``by user``: rows that cross with all samples of a user in her node, with
homes by rule and with rows moved. Where the choice says "not here" the chain goes on as it is. ``planted`` beside the
planted groups is what the planted homes send.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import affinity_ranks
import numpy as np
import numpy.typing as npt
from bench_report import check, ending
from cluster import SKIPPED, ClusterError

from flexd.core.layout import RankLayout
from flexd.core.node_map import NodeMap
from flexd.planner.affinity.dealing import deal
from flexd.planner.affinity.partition import NodeHomes, learn_homes
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.planner.affinity.traffic import MIN_SAVING, WireBytes, crossing_rows, rule_nodes, traffic
from flexd.planner.affinity.users import assign_users

Int64Array = npt.NDArray[np.int64]
LOCAL_RANKS, WINDOW, JUDGED, LENGTH = 8, 40, 8, 32
PER_RANK = 32
GROUPS, GROUP_ROWS = 64, 100
WIRE = WireBytes(row=520.0)
TARGETS = {"ask_ubuntu": 0.70, "online_retail": 0.95}
PLANTED_TOLERANCE, LOSS = 0.05, 0.01


def trace_samples(path: Path) -> SampleRows:
    """Return the samples of a trace in order of time (of their last event); they do not overlap."""
    return _pieces(path)[0]


def trace_users(path: Path) -> Int64Array | None:
    """Return the user of each of ``trace_samples``; None of a trace without users, or of bags."""
    return _pieces(path)[1]


def _pieces(path: Path) -> tuple[SampleRows, Int64Array | None]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    first = np.concatenate([[0], np.cumsum(arrays["table_rows"].astype(np.int64))])
    keys = arrays["row"].astype(np.int64) + first[arrays.get("table", 0)]
    if "sample" in arrays:
        return SampleRows.of(np.unique(arrays["sample"], return_inverse=True)[1].reshape(-1), keys), None
    user = arrays["user"] if "user" in arrays else np.zeros(len(keys), dtype=np.int64)
    order = np.argsort(user, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(user[order]) != 0]))
    sizes = np.diff(np.concatenate([starts, [len(keys)]]))
    position = np.arange(len(keys)) - np.repeat(starts, sizes)
    full = position < np.repeat(sizes // LENGTH * LENGTH, sizes)
    pieces = order[full].reshape(-1, LENGTH)
    pieces = pieces[np.argsort(pieces[:, -1], kind="stable")]
    samples = SampleRows.of(np.repeat(np.arange(len(pieces)), LENGTH), keys[pieces.reshape(-1)])
    return samples, user[pieces[:, 0]] if "user" in arrays else None


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


def by_user(
    window: SampleRows, known: Int64Array, judged: SampleRows, user: Int64Array, batch: Int64Array, homes: NodeHomes,
    layout: RankLayout,
) -> float:  # fmt: skip
    """Return rows that cross with each user's samples in the node that the window says, over the chain's."""
    nodes = layout.nodes
    users = NodeMap(*assign_users(window, known, homes, rule_nodes(window.keys, layout)), nodes)
    rule = rule_nodes(judged.keys, layout)
    sent = crossing_rows(judged, batch, users.node_of(user), homes.home_of(judged.keys, rule), nodes)
    return sent / max(1.0, crossing_rows(judged, batch, np.arange(len(judged)) % nodes, rule, nodes))


def simple_rule(
    window: SampleRows, known: Int64Array, judged: SampleRows, batch: Int64Array, layout: RankLayout
) -> float:
    """Return rows over the chain's by the simplest rule, alternating eight times: samples go to the node with most of
    their rows, in equal numbers, and rows to the node that uses them most. No row counts as shared with other samples.
    """
    nodes, current = layout.nodes, rule_nodes(window.keys, layout)
    home, uses, rng = current, window.matrix(), np.random.default_rng(0)
    for turn in range(8):
        there = np.eye(nodes, dtype=np.float32)[home]
        if turn == 0:
            there += 0.3 * rng.random(there.shape, dtype=np.float32)
        to = deal((-(uses @ there)).astype(np.float32), known, 0)
        home = (uses.T @ np.eye(nodes, dtype=np.float32)[to] + 1e-3 * rng.random(there.shape)).argmax(axis=1)
    rule = rule_nodes(judged.keys, layout)
    homes = NodeHomes(window.keys, home, np.ones((len(home), nodes), dtype=np.float32), 0.0, 0)
    at = homes.home_of(judged.keys, rule)
    read_in = np.arange(len(judged)) % layout.world_size // layout.local_ranks
    costs = -(judged.matrix() @ np.eye(nodes, dtype=np.float32)[at])
    to = deal(costs.astype(np.float32), batch, 0)
    return crossing_rows(judged, batch, to, at, nodes) / crossing_rows(judged, batch, read_in, rule, nodes)


def measure(
    samples: SampleRows, nodes: int, per_node: int, group_of_key: Int64Array | None = None,
    user: Int64Array | None = None,
) -> dict[str, Any]:  # fmt: skip
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
    clock = time.process_time()
    sent = traffic(judged, after // size - half, learnt_homes, layout, WIRE)
    dealt = time.process_time() - clock
    own = learn_homes(judged, after // size - half, rule_nodes(judged.keys, layout), nodes)
    ours = traffic(judged, after // size - half, own, layout, WIRE)
    figures = {
        "loader": sent.loader_ratio, "pays": sent.loader_ratio <= 1 - MIN_SAVING,
        "own_window_loader": ours.loader_ratio,
        "simple_rule": simple_rule(window, before // size - begin, judged, after // size - half, layout),
        "learn_us_a_sample": learnt / len(before) * 1e6, "deal_and_count_us_a_sample": dealt / len(after) * 1e6,
        "home_bytes_a_row": (learnt_homes.home.nbytes + learnt_homes.absent.nbytes + learnt_homes.keys.nbytes)
        / len(window.keys),
        "rows_learnt": len(window.keys), "rows_moved": learnt_homes.moved,
    }  # fmt: skip
    if user is not None:
        at_rule = replace(learnt_homes, home=rule_nodes(window.keys, layout))
        figures["by_user_moved"], figures["by_user"] = (
            by_user(window, user[before], judged, user[after], after // size - half, homes, layout)
            for homes in (learnt_homes, at_rule)
        )
    if group_of_key is not None:
        best = planted_homes(samples, batches, group_of_key, nodes)
        figures["planted_rows"] = traffic(judged, after // size - half, best, layout, WIRE).loader_ratio
    return figures


def exchanged(works: dict[str, tuple[SampleRows, int]], rate_mbit: float | None = None) -> dict[str, dict[str, Any]]:
    """Return the figures of the real exchange, of samples in so many global batches, by name.

    Raises:
        ClusterError: no link can be limited here.
    """
    made = [
        affinity_ranks.Work.of(samples, RankLayout(2, 2), PER_RANK, batches, WINDOW)
        for samples, batches in works.values()
    ]
    return dict(zip(works, affinity_ranks.run(made, rate_mbit), strict=True))


def by_users_words(of: dict[str, Any]) -> str:
    if "by_user" not in of:
        return ""
    return f"; by user {of['by_user']:.3f}, rows moved {of['by_user_moved']:.3f}"


def checks_of_exchange(workload: str, of: dict[str, Any]) -> list[dict[str, Any]]:
    loader = TARGETS.get(workload, 1 + LOSS)
    return [
        check(f"{workload}, exchanged: loader", of["loader"], f"<= {loader}", of["loader"] <= loader),
        check(
            f"{workload}, exchanged: moved, loader", of["moved_loader"], f"<= {loader}", of["moved_loader"] <= loader
        ),
        check(f"{workload}, exchanged: losses", of["loss_difference"], "<= 1e-5", of["loss_difference"] <= 1e-5),
    ]


def checks_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    checks = []
    for name, of in figures.items():
        workload = name.split(",")[0]
        if workload in TARGETS:
            loader = TARGETS[workload]
            checks.append(check(f"{name}: loader", of["loader"], f"<= {loader}", of["loader"] <= loader))
        else:
            checks.append(check(f"{name}: loss", of["loader"] - 1, "<= 0.01", of["loader"] <= 1 + LOSS))
        if "planted_rows" in of:
            over = of["loader"] / of["planted_rows"] - 1
            checks.append(check(f"{name}: over the planted", over, "<= 0.05", over <= PLANTED_TOLERANCE))
        if workload == "catalogue":
            checks.append(check(f"{name}: pays", of["pays"], "0: not here", not of["pays"]))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE.npz")
    parser.add_argument("--quick", action="store_true", help="2 nodes, 64 samples each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-exchange", action="store_true", help="simulate alone")
    parser.add_argument("--rate-mbit", type=float, help="limit the link of each node, and time steps")
    options = parser.parse_args()
    settings = [(2, 64)] if options.quick else [(nodes, each) for nodes in (2, 4, 8) for each in (64, 512)]
    groups, group_of_key = planted(60_000)
    found = {path.stem: trace_users(path) for path in options.trace}
    users = {name: user for name, user in found.items() if user is not None}
    made: dict[str, tuple[SampleRows, Int64Array | None]] = {
        path.stem: (trace_samples(path), None) for path in options.trace
    }
    made |= {
        "planted": (groups, group_of_key),
        "uniform": (uniform_samples(100_000, 60_000, 16), None),
        "catalogue": (uniform_samples(200, 60_000, 32), None),
    }
    figures: dict[str, Any] = {}
    real, checks = {}, []
    if not options.no_exchange:
        few = 8 if options.quick else 24
        try:
            real = exchanged(
                {name: (samples, 24 if name == "catalogue" else few) for name, (samples, _) in made.items()},
                options.rate_mbit,
            )
        except ClusterError as error:
            print(f"no links are limited: {error}", file=sys.stderr)
            return SKIPPED
        print(f"{'2 nodes x 2 ranks, exchanged':36s} loader  moved moving")
        for workload, of in real.items():
            checks += checks_of_exchange(workload, of)
            print(
                f"{workload:36s}{of['loader']:7.3f}{of['moved_loader']:7.3f}"
                f"{of['moving_bytes'] / (of['chain_bytes'] / of['batches']):7.2f}"
                + "".join(f" {way} {milliseconds:.0f} ms" for way, milliseconds in of["step_ms"].items()),
                flush=True,
            )
    print(f"{'':36s}{'loader':>7s}{'planted':>8s}{'learn us':>9s}{'deal us':>8s}  says")
    for workload, (samples, groups_of) in made.items():
        for nodes, per_node in settings:
            of = measure(samples, nodes, per_node, groups_of, users.get(workload))
            if of:
                name = f"{workload}, {nodes} nodes of {per_node}"
                figures[name] = of
                print(
                    f"{name:36s}{of['loader']:7.3f}"
                    f"{of.get('planted_rows', np.nan):8.3f}{of['learn_us_a_sample']:9.1f}"
                    f"{of['deal_and_count_us_a_sample']:8.1f}  {'pays' if of['pays'] else 'not here'}"
                    f"; simple rule {of['simple_rule']:.3f}{by_users_words(of)}",
                    flush=True,
                )
    checks += checks_of(figures)
    return ending({"exchanged": real, **figures}, checks, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
