"""Predicted over measured bytes of planned placements: touches by independence and as measured.

    python tools/bench_touches.py TRACE.npz... [--json] [--steps 120] [--splits 4] [--nodes 2 --local-ranks 2]

For each trace and kind of samples (``flexd.stream.samples``: sequences, impressions) and for several ways to divide the
steps, a profile is counted from one half, a plan is made from it, and real gloo ranks train the other half with the
plan's placement. Their bytes are compared with those that the cost model predicts: with the measured touches of every
row (checked: the mean over the splits is within 3 %), with the touches of the very steps that were trained (checked:
within 1 % in every split), with those of the more frequent half of the rows alone, the fitted relation for the others
(the profile lists half of them, the rest is in frequency bins), and with independence, as without measured touches.
Counted and trained steps alternate so that the popularity is the same; what is left of their difference is part of the
ratios of single splits, and large on a bursty trace.
Latencies of the cluster are left out, so that plans
have copies at this size.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import queue
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_report import check, last_line

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Delta, Placement
from flexd.demo.ports import free_ports
from flexd.planner.model.row_bytes import TrafficLink
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import make_plan, placement_cost
from flexd.simulate.exact_profile import exact_profile
from flexd.sketch.profile import Profile, RowTouches, TableProfile
from flexd.stream.batches import Batches
from flexd.stream.sample_kinds import SampleKind
from flexd.stream.trace import Trace, load_trace
from flexd.topology.files import load_preset

Int64Array = npt.NDArray[np.int64]
Steps = list[list[Int64Array]]
"""Keys by step and rank."""

DIM = 128
HISTORY = 16
REPLICA_SHARE = 0.05
TOLERANCE = 0.03
SAME_STEPS_TOLERANCE = 0.01
DEADLINE_SECONDS = 300
LINKS = {"intra": TrafficLink.INTRA_NODE, "inter": TrafficLink.INTER_NODE}


def make_steps(trace: Trace, kind: SampleKind, world_size: int, batch_size: int, steps: int) -> Steps:
    """Return the batches of a next-item model, spread evenly over the trace."""
    keyspace = KeySpace(tables_of(trace))
    batches = Batches(trace, world_size=world_size, batch_size=batch_size, steps=steps, history=HISTORY, kind=kind)
    return [
        [
            np.concatenate([keyspace.keys(table, ids) for table, ids in enumerate(batches.batch(step, rank).ids)])
            for rank in range(world_size)
        ]
        for step in range(batches.steps)
    ]


def tables_of(trace: Trace) -> tuple[TableSpec, ...]:
    """Return the job's tables."""
    return tuple(
        TableSpec(name, int(rows), DIM) for name, rows in zip(trace.table_names, trace.table_rows, strict=True)
    )


@dataclass(frozen=True)
class Case:
    """One job for the ranks: the steps that they train with this placement."""

    name: str
    tables: tuple[TableSpec, ...]
    steps: Steps
    placement: Placement


def independence(profile: Profile) -> Profile:
    """Return the profile without touches."""
    return replace(profile, tables=tuple(replace(table, touches=None) for table in profile.tables))


def half_listed(profile: Profile) -> Profile:
    """Return the profile with the more frequent half of its rows listed and the others in bins of equal frequency."""
    return replace(profile, tables=tuple(_half(table) for table in profile.tables))


def _half(table: TableProfile) -> TableProfile:
    listed = len(table.hot_rows) // 2
    share, rows = np.unique(table.hot_share[listed:], return_counts=True)
    touches = table.touches
    return replace(
        table,
        hot_rows=table.hot_rows[:listed],
        hot_share=table.hot_share[:listed],
        hot_lower=table.hot_lower[:listed],
        hot_upper=table.hot_upper[:listed],
        bin_share=share,
        bin_rows=rows.astype(np.float64),
        touches=None
        if touches is None
        else RowTouches(
            touches.nodes, touches.local_ranks, touches.per_rank[:listed], touches.per_node[:listed],
            touches.anywhere[:listed],
        ),
    )  # fmt: skip


def predicted(profile: Profile, keyspace: KeySpace, layout: RankLayout, placement: Placement) -> dict[str, float]:
    """Return bytes a rank and step, by link."""
    loads = make_loads(profile, keyspace, layout)
    cost = placement_cost(loads, placement, keyspace, layout, load_preset("azure-a100-200g"))
    return {name: cost.all_to_all_bytes(link) + cost.sync_bytes(link) for name, link in LINKS.items()}


def train(rank: int, layout: RankLayout, port: int, cases: list[Case], results: Any) -> None:
    """Train every case on this rank and report the bytes that it sent a step, by link."""
    import os
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
    from flexd.embedding.jagged import Jagged

    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(layout.world_size),
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in cases:
        keyspace = KeySpace(case.tables)
        collection = EmbeddingCollection(
            [EmbeddingTable(spec.name, spec.rows, spec.dim) for spec in case.tables],
            layout=layout, replica_slots=[group.rows for group in keyspace.groups],
        )  # fmt: skip
        target = case.placement
        if len(target):
            collection.engine.inbox.offer(1, Delta(target.keys, np.zeros(len(target), np.uint8), target.tiers))
        # The first two steps apply the chunk.
        before: dict[str, int] = {}
        for step, keys in enumerate([*case.steps[:2], *case.steps]):
            if step == 2:
                if collection.placement_version != int(len(target) > 0):
                    raise RuntimeError("the placement was not applied within two steps")
                before = collection.traffic.totals()
            table_of, row_of = keyspace.table_rows(keys[rank])
            features = {
                spec.name: Jagged(
                    torch.from_numpy(row_of[table_of == index]), torch.tensor([int((table_of == index).sum())])
                )
                for index, spec in enumerate(case.tables)
            }
            torch.stack([jagged.values.sum() for jagged in collection(features).values()]).sum().backward()
            collection.optimizer.step()
        after = collection.traffic.totals()
        sent = {
            link: sum(after[f"{kind}_{link}_bytes"] - before[f"{kind}_{link}_bytes"] for kind in ("all_to_all", "sync"))
            for link in LINKS
        }
        results.put((case.name, rank, {link: value / len(case.steps) for link, value in sent.items()}))
    dist.barrier()
    dist.destroy_process_group()


def measured(cases: list[Case], layout: RankLayout) -> dict[str, dict[str, float]]:
    """Return by case the bytes a rank and step, by link: the mean over real gloo ranks.

    Raises:
        RuntimeError: a rank failed.
    """
    context = mp.get_context("spawn")
    results = context.Queue()
    (port,) = free_ports(1)
    ranks = [
        context.Process(target=train, args=(rank, layout, port, cases, results), daemon=True)
        for rank in range(layout.world_size)
    ]
    for process in ranks:
        process.start()
    sums = {case.name: dict.fromkeys(LINKS, 0.0) for case in cases}
    try:
        for _ in range(len(cases) * layout.world_size):
            name, _, sent = results.get(timeout=DEADLINE_SECONDS)
            for link, value in sent.items():
                sums[name][link] += value / layout.world_size
    except queue.Empty:
        raise RuntimeError(f"a rank did not report within {DEADLINE_SECONDS} s") from None
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    return sums


def split(steps: Steps, number: int) -> tuple[Steps, Steps]:
    """Return (counted, trained) halves: single steps in turns, then pairs of steps; odd numbers swap the halves."""
    width = 1 + number // 2
    halves: list[Steps] = [[], []]
    for at, step in enumerate(steps):
        halves[(at // width + number) % 2].append(step)
    return halves[0], halves[1]


def plan_case(
    name: str, counted: Steps, trained: Steps, tables: tuple[TableSpec, ...], layout: RankLayout
) -> tuple[Case, dict[str, dict[str, float]], dict[str, float]]:
    """Return (case of the trained steps, predictions by kind of touches, figures of the plan).

    The plan and all predictions but "same_steps" are from the counted steps.
    """
    keyspace = KeySpace(tables)
    profile = exact_profile(counted, keyspace, layout)
    plan = make_plan(
        profile,
        keyspace,
        layout,
        load_preset("azure-a100-200g").bandwidth_only(),
        [int(REPLICA_SHARE * group.rows) for group in keyspace.groups],
        Placement.empty(),
        plan_id="bench",
        parent_id="",
        topology_generation=1,
        horizon_steps=1e9,
        now_unix_seconds=0.0,
        reason="bench",
    )
    placement = plan.target
    profiles = {
        "measured": profile,
        "same_steps": exact_profile(trained, keyspace, layout),
        "half_listed": half_listed(profile),
        "independent": independence(profile),
    }
    predictions = {kind: predicted(of, keyspace, layout, placement) for kind, of in profiles.items()}
    figures = {
        "steps": float(len(trained)),
        "node_rows": float(np.count_nonzero(placement.tiers == Tier.NODE)),
        "device_rows": float(np.count_nonzero(placement.tiers == Tier.DEVICE)),
    }
    return Case(name, tables, trained, placement), predictions, figures


def checks_of(figures: dict[str, Any], splits: int) -> list[dict[str, Any]]:
    """Predicted over measured bytes, which are nothing to predict where a plan copies no row: each then fails."""
    checks = []
    copies = {name: row["node_rows"] + row["device_rows"] for name, row in figures.items()}
    for name, row in figures.items():
        checks += [
            check(
                f"{name}: same steps, {link}-node", ratio, f"1 to {SAME_STEPS_TOLERANCE:.0%}",
                copies[name] > 0 and abs(ratio - 1) <= SAME_STEPS_TOLERANCE,
            )
            for link, ratio in row["predicted_over_measured"]["same_steps"].items()
        ]  # fmt: skip
        checks.append(check(f"{name}: rows with copies", copies[name], "> 0", copies[name] > 0))
    for job in dict.fromkeys(name.rsplit(" ", 1)[0] for name in figures):
        cases = [f"{job} {number}" for number in range(splits)]
        every_copies = all(copies[case] > 0 for case in cases)
        for link in LINKS:
            ratio = float(np.mean([figures[case]["predicted_over_measured"]["measured"][link] for case in cases]))
            checks.append(
                check(
                    f"{job}: predicted over measured bytes, {link}-node, mean of {splits} splits", ratio,
                    f"1 to {TOLERANCE:.0%}", every_copies and abs(ratio - 1) <= TOLERANCE,
                )
            )  # fmt: skip
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a rank in a step")
    parser.add_argument("--steps", type=int, default=120, help="steps, half of them trained")
    parser.add_argument("--splits", type=int, default=4, choices=(1, 2, 3, 4), help="ways to divide the steps")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--local-ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    layout = RankLayout(options.nodes, options.local_ranks)
    made = {}
    for path in options.traces:
        trace = load_trace(path)
        for kind in (SampleKind.SEQUENCES, SampleKind.IMPRESSIONS):
            steps = make_steps(trace, kind, layout.world_size, options.batch_size, options.steps)
            for number in range(options.splits):
                name = f"{path.stem} {kind.value} {number}"
                made[name] = plan_case(name, *split(steps, number), tables_of(trace), layout)
    sent = measured([case for case, _, _ in made.values()], layout)
    figures: dict[str, Any] = {}
    for name, (_, predictions, plan) in made.items():
        ratios = {
            touches: {link: bytes_of[link] / sent[name][link] for link in LINKS if sent[name][link]}
            for touches, bytes_of in predictions.items()
        }
        figures[name] = {**plan, "measured_bytes": sent[name], "predicted_over_measured": ratios}
    checks = checks_of(figures, options.splits)
    if options.json:
        print(last_line(figures, checks))
    else:
        print(f"{'':38s}{'NODE':>8s}{'DEVICE':>8s}" + "".join(f"{kind + ' ' + link:>19s}" for kind in
              ("measured", "same_steps", "half_listed", "independent") for link in LINKS))  # fmt: skip
        for name, of in figures.items():
            ratios = of["predicted_over_measured"]
            print(f"{name:38s}{of['node_rows']:8.0f}{of['device_rows']:8.0f}" + "".join(
                f"{value:19.3f}" for by_link in ratios.values() for value in by_link.values()))  # fmt: skip
        for each in checks:
            print(f"{'ok  ' if each['ok'] else 'MISS'} {each['name']}: {each['value']:.4f} (target {each['target']})")
    return 0 if all(each["ok"] for each in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
