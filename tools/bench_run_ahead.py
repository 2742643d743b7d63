#!/usr/bin/env python3
"""Count the bytes that a training step waits for on the network, with and without run-ahead.

The batches, tables and plan of tools/bench_cluster.py, on ranks of this machine over loopback: bytes do not depend on
the link, so neither root nor a quiet machine is needed. A step *waits for* what its forward pass and its optimizer step
send themselves; what the exchange of the next batch sends during the step is *ahead*. How much time that hides depends
on the link and on the dense part: tools/bench_cluster.py measures it. The peer is the direct exchange with dedup, as a
row-wise sharded collection does it.

Usage: tools/bench_run_ahead.py [--quick] [--json] [--zipf 1.05 1.2]
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from typing import Any

import bench_cluster_data as data
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_cluster_data import Setting
from bench_report import check, last_line

import flexd
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Delta, Placement
from flexd.demo.ports import free_ports
from flexd.planner.plan import make_plan

DEDUP = "direct, dedup"
STRATEGIES: dict[str, dict[str, bool | str]] = {
    DEDUP: {"exchange": "direct"},
    "chain": {},
    "tiers": {"tiers": True},
    "direct, dedup, run-ahead": {"exchange": "direct", "ahead": True},
    "chain, run-ahead": {"ahead": True},
    "tiers, run-ahead": {"tiers": True, "ahead": True},
}
TARGET = 2.5
WARM_UP = 3
RATE_MBIT = 200.0


def target_of(setting: Setting) -> Placement:
    keyspace = KeySpace([TableSpec(t.name, t.rows, t.dim, t.dtype, "sgd") for t in setting.embedding_tables()])
    return make_plan(
        data.exact_profile(setting), keyspace, setting.layout, data.given_cluster(setting, RATE_MBIT).bandwidth_only(),
        [int(setting.replica_fraction * setting.rows)], Placement.empty(), plan_id="bench", parent_id="",
        topology_generation=1, horizon_steps=1e9, now_unix_seconds=0.0, reason="bench",
    ).target  # fmt: skip


def count(
    setting: Setting, rank: int, steps: int, *, exchange: str = "chain", tiers: bool = False, ahead: bool = False
) -> tuple[list[int], float]:
    """Of one rank: ([bytes a step to other nodes, waited for of them, to other ranks of the node, waited for of them],
    last loss)."""
    names = [table.name for table in setting.embedding_tables()]
    collection = flexd.EmbeddingCollection(
        setting.embedding_tables(), layout=setting.layout, exchange=exchange, average_gradients=False,
        replica_fraction=setting.replica_fraction if tiers else 0.0, max_migration_bytes_per_step=2**30,
    )  # fmt: skip
    if tiers:
        target = target_of(setting)
        collection.engine.inbox.offer(1, Delta(target.keys, np.zeros(len(target), np.uint8), target.tiers))
    loader: Any = [
        {
            name: flexd.Jagged(torch.from_numpy(values), torch.from_numpy(lengths))
            for name, values, lengths in zip(names, batch.values, batch.lengths, strict=True)
        }
        for batch in data.batches_of(setting, rank)[: WARM_UP + steps + 1]
    ]
    if ahead:
        loader = flexd.prefetch(loader, collection)
    begin, loss = [0, 0, 0, 0], torch.zeros(())
    for step, features in enumerate(loader):
        if step in (WARM_UP, WARM_UP + steps):
            end = _sent(collection)
            if step > WARM_UP:
                break
            begin = end
        rows = collection(features)
        loss = torch.stack([(rows[name].values - 0.1).square().sum() for name in names]).sum() / 100.0
        loss.backward()
        collection.optimizer.step()
    assert collection.placement_version == int(tiers)
    return [(b - a) // steps for a, b in zip(begin, end, strict=True)], float(loss.detach())


def _sent(collection: flexd.EmbeddingCollection) -> list[int]:
    collection.engine.hooks.wait()
    ahead = collection.engine.hooks.overlapped
    all_bytes, hidden = collection.traffic.totals(), ahead.totals() if ahead is not None else {}
    sent = []
    for link in ("inter", "intra"):
        names = [f"{kind}_{link}_bytes" for kind in ("all_to_all", "sync")]
        total = sum(all_bytes[name] for name in names)
        sent += [total, total - sum(hidden.get(name, 0) for name in names)]
    return sent


def _rank(rank: int, port: int, setting: Setting, steps: int, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=setting.layout.world_size,
        timeout=timedelta(seconds=300),
    )  # fmt: skip
    said = {name: count(setting, rank, steps, **options) for name, options in STRATEGIES.items()}  # type: ignore[arg-type]
    gathered: list[Any] = [None] * setting.layout.world_size
    dist.all_gather_object(gathered, said)
    if rank == 0:
        answers.put(gathered)
    dist.destroy_process_group()


def run(setting: Setting, steps: int) -> dict[str, Any]:
    """All ranks together: megabytes a step by strategy, losses, the bound."""
    (port,) = free_ports(1)
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (port, setting, steps, answers), nprocs=setting.layout.world_size)
    by_rank = answers.get()
    bound = data.bounds(setting)
    return {
        "zipf": setting.zipf,
        "bound_bytes": bound.volume,
        "between_steps_bytes": bound.between_steps,
        "strategies": {
            name: {
                **dict(
                    zip(
                        ("inter", "inter_waited", "intra", "intra_waited"),
                        np.sum([said[name][0] for said in by_rank], axis=0).tolist(),
                        strict=True,
                    )
                ),
                "loss": float(np.mean([said[name][1] for said in by_rank])),
            }
            for name in STRATEGIES
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the ids and rows, two steps")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.05, 1.2])
    arguments = parser.parse_args()
    size = {"rows": 25_000, "samples": 64} if arguments.quick else {}
    steps = 2 if arguments.quick else 6
    settings = [Setting(zipf=zipf, batches=WARM_UP + steps + 2, **size) for zipf in arguments.zipf]  # type: ignore[arg-type]
    results, checks = [], []
    for setting in settings:
        result = run(setting, steps)
        results.append(result)
        dedup = result["strategies"][DEDUP]
        print(
            f"\nZipf {setting.zipf}: bound {result['bound_bytes'] / 1e6:.2f} MB between nodes a step, of which "
            f"{result['between_steps_bytes'] / 1e6:.2f} MB must wait"
        )
        titles = f"{'between nodes':>15}{'waited for':>13}{'dedup / it':>12}{'in nodes':>11}{'waited for':>13}"
        print(f"{'strategy':26}{titles}")
        for name, row in result["strategies"].items():
            ratio = dedup["inter_waited"] / max(1, row["inter_waited"])
            print(
                f"{name:26}{row['inter'] / 1e6:12.2f} MB{row['inter_waited'] / 1e6:10.2f} MB{ratio:12.2f}"
                f"{row['intra'] / 1e6:8.2f} MB{row['intra_waited'] / 1e6:10.2f} MB"
            )
            label = f"zipf {setting.zipf}: {name}"
            off = abs(row["loss"] / dedup["loss"] - 1)
            checks.append(check(f"{label}: loss differs by", off, "<= 1e-4", off <= 1e-4))
            if name == "tiers, run-ahead":
                checks.append(
                    check(f"{label}: bytes waited for, dedup over it", ratio, f">= {TARGET}", ratio >= TARGET)
                )
    if arguments.json:
        print(last_line({"zipf": results}, checks))
    return 0 if all(entry["ok"] for entry in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
