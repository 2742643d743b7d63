"""Homes and dealing learnt live from the daemon's co-access sample: what crosses between nodes, and what that costs.

    python tools/bench_coaccess.py [--trace ask_ubuntu.npz] [--trace online_retail.npz] [--quick] [--json]

A simulation: what crosses is counted, nothing is exchanged. The whole trace is read in order; every 8 global batches
homes are learnt again and judged on the next 8. ``sketch``: from a co-access sample within its memory (half of what 40
batches take, half-life 40 batches). ``window``: from the last 40 batches whole, likewise. ``hindsight``: from the
judged batches themselves, which no one can know. ``moved`` counts the rows that changed their node as bytes of a step
each, in ``bytes_with_moves``. Figures are shares of the chain's on the same batches. ``planted``: groups of 100 rows as
in bench_affinity, beside the homes that were planted. ``longer``: expected crossing rows of a small window by the best
of 60 divisions of 20 rounds each, beside the daemon's two of 4. ``large window``: processor time of one plan for 10^7
rows in 1,000,000 samples (10^6 with ``--quick``), 8 nodes.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_affinity import LOCAL_RANKS, planted, planted_homes, trace_samples, uniform_samples
from bench_report import check, ending

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.planner.affinity.partition import AffinityLimits, NodeHomes, learn_homes
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.planner.affinity.sampled_window import SampledWindow, row_costs, sampled_window
from flexd.planner.affinity.streaming import AffinityPlan, plan_affinity
from flexd.planner.affinity.traffic import AffinityTraffic, rule_nodes, traffic
from flexd.sketch.coaccess import MIN_BYTES, NO_USER, CoAccessSample
from flexd.sketch.coaccess_kernels import HEADER, warm_up

Int64Array = npt.NDArray[np.int64]
WINDOW, EVERY, DIM = 40, 8, 64
HORIZON = 40.0
TOLERANCE, PLANTED_TOLERANCE, BOUND_TOLERANCE = 0.05, 0.05, 0.05
MOST_SECONDS = 60.0
_SMALL = (4, 32, 8)
"""Nodes, samples a node and batches of the small window."""


@dataclass
class Sums:
    """What crossed with one way of learning, summed over the trace."""

    rows: float = 0.0
    moved: int = 0

    def add(self, sent: AffinityTraffic) -> None:
        self.rows += sent.loader_rows


def keyspace(rows: int) -> KeySpace:
    return KeySpace([TableSpec("rows", rows, DIM, optimizer="rowwise_adagrad")])


def offer(sample: CoAccessSample, samples: SampleRows, chosen: Int64Array, at: float) -> float:
    """Offer samples as one rank's look-up; return the seconds it took."""
    some = samples.select(chosen)
    rows, lengths = some.keys[some.rows], some.lengths.astype(np.int32)
    begin = time.process_time()
    sample.add(0, rows, lengths, 0, at, None, chosen)
    return time.process_time() - begin


def whole_window(samples: SampleRows, chosen: Int64Array, size: int, keys: KeySpace) -> SampledWindow:
    rows = samples.select(chosen).compact()
    wire, costs = row_costs(keys, rows.keys, HORIZON)
    none = np.full(len(chosen), NO_USER)
    return SampledWindow(rows, none, np.arange(len(chosen)) // size, size, float(rows.lengths.mean()), wire, costs)


def follow(samples: SampleRows, nodes: int, per_node: int, limit: int) -> dict[str, Any]:
    """Return the figures of one setting over the trace in order, or nothing if it has fewer than four judgements."""
    size, layout = nodes * per_node, RankLayout(nodes, LOCAL_RANKS)
    batches = min(len(samples) // size, limit)
    if batches < 8 + 4 * EVERY // 2:
        return {}
    total_rows = int(samples.keys.max()) + 1
    keys = keyspace(total_rows)
    mean = float(samples.lengths.mean())
    memory = max(MIN_BYTES, int(WINDOW * size * 4 * (HEADER + mean) / 2))
    sample = CoAccessSample([total_rows], memory, float(WINDOW))
    sums = {name: Sums() for name in ("sketch", "window", "hindsight")}
    chain = chain_bytes = 0.0
    plans: dict[str, AffinityPlan | None] = {"sketch": None, "window": None}
    offered_seconds = learnt_seconds = 0.0
    learnt_samples = 0
    for batch in range(batches):
        if batch >= EVERY and batch % EVERY == 0:
            judged_ids = np.arange(batch * size, min(batch + EVERY, batches) * size)
            judged = samples.select(judged_ids).compact()
            number = np.arange(len(judged_ids)) // size
            read = sample.read(["rows"])
            window = sampled_window(read, keys, horizon_steps=HORIZON, batch_samples=size)
            begin = time.process_time()
            learnt = {"sketch": plan_affinity(window, layout, plans["sketch"], in_place=True)}
            learnt_seconds, learnt_samples = learnt_seconds + time.process_time() - begin, learnt_samples + read.samples
            last = whole_window(samples, np.arange(max(0, batch - WINDOW) * size, batch * size), size, keys)
            learnt["window"] = plan_affinity(last, layout, plans["window"], in_place=True)
            own = learn_homes(judged, number, rule_nodes(judged.keys, layout), nodes)
            for name, homes in [(name, plan.homes) for name, plan in learnt.items()] + [("hindsight", own)]:
                sent = traffic(judged, number, homes, layout, window.wire)
                sums[name].add(sent)
            for name, plan in learnt.items():
                sums[name].moved += len(plan.moves)
                plans[name] = plan
            chain += sent.chain_rows
            chain_bytes += sent.chain_rows * window.wire.row
        offered_seconds += offer(sample, samples, np.arange(batch * size, (batch + 1) * size), float(batch))
    stored = keys.tables[0].row_bytes + keys.tables[0].state_bytes
    figures: dict[str, Any] = {}
    for name, each in sums.items():
        figures[name] = {
            "rows": each.rows / chain, "moved": each.moved,
            "bytes_with_moves": each.rows / chain + each.moved * stored / chain_bytes,
        }  # fmt: skip
    newest = plans["sketch"]
    assert newest is not None
    figures |= {
        "says_pays": newest.pays(), "memory_bytes": memory, "offer_us_a_sample": offered_seconds / batches / size * 1e6,
        "learn_us_a_sample": learnt_seconds / max(1, learnt_samples) * 1e6, "batches": batches,
        "held_samples": read.samples,
    }  # fmt: skip
    return figures


def planted_figures(nodes: int, per_node: int) -> dict[str, float]:
    """Return rows over the chain's by a sketch that holds a part of the samples, and by the planted homes."""
    size, layout = nodes * per_node, RankLayout(nodes, LOCAL_RANKS)
    samples, group_of_key = planted(96 * size)
    keys = keyspace(int(samples.keys.max()) + 1)
    sample = CoAccessSample([keys.tables[0].rows], 1 << 21, None)
    for batch in range(88):
        offer(sample, samples, np.arange(batch * size, (batch + 1) * size), float(batch))
    window = sampled_window(sample.read(["rows"]), keys, horizon_steps=HORIZON, batch_samples=size)
    plan = plan_affinity(window, layout)
    judged_ids = np.arange(88 * size, 96 * size)
    judged, number = samples.select(judged_ids).compact(), np.arange(8 * size) // size
    best = planted_homes(samples, 96, group_of_key, nodes)
    ours, theirs = (traffic(judged, number, homes, layout, window.wire) for homes in (plan.homes, best))
    return {
        "rows": ours.loader_ratio,
        "planted_rows": theirs.loader_ratio,
        "held_samples": float(window.rows.lengths.size),
    }


def longer(samples: SampleRows) -> dict[str, float]:
    """Return expected crossing rows a batch of a small window, by the daemon's learning and by a much longer one."""
    nodes, per_node, batches = _SMALL
    layout, size = RankLayout(nodes, LOCAL_RANKS), nodes * per_node
    window = samples.select(np.arange(min(len(samples), batches * size))).compact()
    batch = np.arange(len(window)) // size
    rule = rule_nodes(window.keys, layout)

    def crossing(limits: AffinityLimits, start: NodeHomes | None = None) -> NodeHomes:
        return learn_homes(window, batch, rule, nodes, limits, start)

    ours = min(crossing(AffinityLimits(probability=each)).crossing for each in (None, 0.5))
    best = min(
        (crossing(AffinityLimits(probability=each, seed=seed, rounds=20))
         for seed in range(20) for each in (None, 0.25, 0.5)),
        key=lambda found: found.crossing,
    )  # fmt: skip
    best = min(best, crossing(AffinityLimits(rounds=20), best), key=lambda found: found.crossing)
    return {"daemon": ours, "longer": best.crossing, "over": ours / best.crossing - 1}


def large_window(rows: int) -> dict[str, float]:
    """Return the processor seconds of one plan for about so many rows, in samples of 16 of groups of many rows."""
    rng, length, groups, nodes, size = np.random.default_rng(0), 16, 4096, 8, 4096
    count = 2 * rows // length
    own = rng.integers(0, groups, count)[:, None] + groups * rng.integers(0, 2 * rows // groups, (count, length))
    samples = SampleRows.of(np.repeat(np.arange(count), length), own.reshape(-1))
    window = whole_window(samples, np.arange(count), size, keyspace(int(samples.keys.max()) + 1))
    begin = time.process_time()
    plan = plan_affinity(window, RankLayout(nodes, LOCAL_RANKS))
    seconds = time.process_time() - begin
    assert plan.loader is not None
    return {"rows": float(len(window.rows.keys)), "seconds": seconds, "loader": plan.loader.expected}


def checks_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    checks = []
    for name, of in figures.items():
        if name.startswith("planted"):
            over = of["rows"] / of["planted_rows"] - 1
            checks.append(check(f"{name}: over the planted", over, "<= 0.05", over <= PLANTED_TOLERANCE))
        elif name.startswith("large"):
            checks.append(check(f"{name}: processor s a plan", of["seconds"], "<= 60", of["seconds"] <= MOST_SECONDS))
        elif name.startswith("longer"):
            checks.append(check(f"{name}: over the longer", of["over"], "<= 0.05", of["over"] <= BOUND_TOLERANCE))
        else:
            over = of["sketch"]["rows"] / of["window"]["rows"] - 1
            checks.append(check(f"{name}: rows over the window's", over, "<= 0.05", over <= TOLERANCE))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE.npz")
    parser.add_argument("--quick", action="store_true", help="2 nodes of 64 samples, 64 batches")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warm_up()
    settings = [(2, 64)] if options.quick else [(nodes, each) for nodes in (2, 4, 8) for each in (64, 512)]
    limit = 64 if options.quick else 10**9
    made = {path.stem: trace_samples(path) for path in options.trace}
    made["uniform"] = uniform_samples(100_000, 64 * 128, 16)
    made["catalogue"] = uniform_samples(200, 64 * 128, 32)
    figures: dict[str, Any] = {}
    print(f"{'':32s}{'sketch':>8s}{'window':>8s}{'hindsight':>10s} rows")
    for workload, samples in made.items():
        for nodes, per_node in settings:
            of = follow(samples, nodes, per_node, limit)
            if of:
                name = f"{workload}, {nodes} nodes of {per_node}"
                figures[name] = of
                print(
                    f"{name:32s}{of['sketch']['rows']:8.3f}{of['window']['rows']:8.3f}{of['hindsight']['rows']:10.3f}"
                    f"  moved {of['sketch']['moved']:,} (with moves "
                    f"{of['sketch']['bytes_with_moves']:.3f}), {of['memory_bytes']:,} B, "
                    f"offer {of['offer_us_a_sample']:.2f} us, learn {of['learn_us_a_sample']:.1f} us a sample, "
                    f"{'pays' if of['says_pays'] else 'not here'}",
                    flush=True,
                )
    for nodes, per_node in settings:
        name = f"planted, {nodes} nodes of {per_node}"
        of = figures[name] = planted_figures(nodes, per_node)
        print(f"{name:32s}{of['rows']:8.3f}, planted {of['planted_rows']:.3f}", flush=True)
    small = {**{stem: made[stem] for stem in made if stem not in ("uniform", "catalogue")}, "groups": planted(4096)[0]}
    for stem, samples in small.items():
        of = figures[f"longer, {stem}"] = longer(samples)
        print(
            f"{'longer, ' + stem:32s}{of['daemon']:8.1f} rows a batch, {of['longer']:.1f} by 61 divisions", flush=True
        )
    of = figures["large window"] = large_window(1_000_000 if options.quick else 8_000_000)
    print(f"{'large window':32s}{of['rows']:,.0f} rows, a plan in {of['seconds']:.1f} s of one core", flush=True)
    return ending(figures, checks_of(figures), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
