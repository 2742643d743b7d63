"""Compare the surface, and the figures of fixed jobs, with the files in this folder.

``RECORD_GOLDEN=1 python -m pytest tests/golden`` writes the files anew: look at their diff before it is committed.
"""

import json
import os
from pathlib import Path
from typing import Any

import gen_metrics_docs
import numpy as np
import torch
import torch.distributed as dist

import flexd
from flexd.core.placement import REHOMED, Delta, RankLayout, Tier
from tests.support.statuses import STATUSES
from tools.bench.sections import dispatch

STEPS = 6
PLAIN = ("direct", "chain", "copies", "re-homed", "prefetch", "tiered storage")
POOLED = ("pooled at requester", "pooled at owner")
STRATEGIES = PLAIN + POOLED
TABLES = {"item": (4000, 8), "shop": (300, 16)}


def batch(step: int, rank: int) -> dict[str, flexd.Jagged]:
    rng = np.random.default_rng([35, step, rank])
    lengths = torch.full((32,), 10)
    return {
        name: flexd.Jagged(torch.from_numpy((rng.zipf(1.2, 320) - 1) % rows), lengths)
        for name, (rows, _) in TABLES.items()
    }


def collection_of(strategy: str, layout: RankLayout) -> flexd.EmbeddingCollection:
    given: dict[str, Any] = {"layout": layout, "optimizer": flexd.RowWiseAdagrad(lr=0.1), "replica_slots": [800, 60]}
    if strategy in POOLED:
        tables = [
            flexd.EmbeddingBagTable(name, rows, dim, dtype="float64", pooling_at=strategy.removeprefix("pooled at "))
            for name, (rows, dim) in TABLES.items()
        ]
        return flexd.EmbeddingBagCollection(tables, **given)
    if strategy == "tiered storage":
        given["fast_memory_bytes"] = 50_000
    plain = [flexd.EmbeddingTable(name, rows, dim, dtype="float64") for name, (rows, dim) in TABLES.items()]
    return flexd.EmbeddingCollection(plain, exchange="direct" if strategy == "direct" else "chain", **given)


def rehomed_rows(strategy: str, collection: flexd.EmbeddingCollection) -> Delta:
    """Return copies of the most popular rows, or rows that leave the node of their sharding type."""
    keys = np.concatenate([first + np.arange(40) for first in collection.keyspace.first_key[:2]])
    if strategy == "copies":
        tiers = np.where(np.arange(80) % 40 < 10, int(Tier.DEVICE), int(Tier.NODE))
    else:
        tiers = REHOMED + 1 - collection.engine.homes.home_node(keys)
    return Delta(keys, np.zeros(80, np.uint8), tiers.astype(np.uint8))


def train(rank: int, nodes: int, local_ranks: int, strategy: str) -> tuple[list[float], int]:
    """Return the losses of the job, and the bytes sent to other nodes by all ranks."""
    collection = collection_of(strategy, RankLayout(nodes, local_ranks))
    if strategy in ("copies", "re-homed"):
        collection.engine.migrator.apply([collection.engine.migrator.prepare(rehomed_rows(strategy, collection), None)])
    batches = [batch(step, rank) for step in range(STEPS)]
    losses = []
    for features in flexd.prefetch(batches, collection) if strategy == "prefetch" else batches:
        out = collection(features)
        values = [part.values if isinstance(part, flexd.Jagged) else part for part in out.values()]
        loss = torch.stack([(value.tanh() ** 2).sum() for value in values]).sum() / 100
        loss.backward()
        collection.optimizer.step()
        losses.append(loss.detach())
    job = torch.stack(losses)
    dist.all_reduce(job)
    sent = torch.tensor([collection.traffic.all_to_all_inter_bytes + collection.traffic.sync_inter_bytes])
    dist.all_reduce(sent)
    return job.tolist(), int(sent)


FOLDER = Path(__file__).parent
COMMANDS = (
    "get tables",
    "get rows items -n 3",
    "get ranks",
    "plan",
    "explain items",
    "get plans",
    "apply p7",
    "replan",
    "get history",
    "describe migration latest",
    "rollback --dry-run",
    "rollback --reason slow",
    "throttle",
    "reload",
    "reload --dry-run",
    "pause --reason night",
    "resume",
)
MOMENTS = ("status-healthy", "status-slow-memory")
MAX_ERROR = 1e-9
"""Of a loss, as a share."""


def compare(file: str, found: Any, *, within: float = 0.0) -> None:
    """Compare with a file, floats to ``within``; or write it."""
    path = FOLDER / file
    if os.environ.get("RECORD_GOLDEN"):
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    faults = differences(recorded, json.loads(json.dumps(found)), within)
    assert not faults, "\n".join([f"{file} (to record it again: RECORD_GOLDEN=1):", *faults])


def differences(recorded: Any, found: Any, within: float, path: str = "") -> list[str]:
    """Return a line for each value that is not as recorded."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        names = sorted(recorded.keys() | found.keys())
        return [
            line
            for name in names
            for line in differences(recorded.get(name, "none"), found.get(name, "none"), within, f"{path}/{name}")
        ]
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = enumerate(zip(recorded, found, strict=True))
        return [line for i, (was, now) in pairs for line in differences(was, now, within, f"{path}[{i}]")]
    same = recorded == found
    if within and isinstance(recorded, float) and isinstance(found, float):
        same = abs(recorded - found) <= within * abs(recorded)
    return [] if same else [f"  {path}: {recorded!r} is now {found!r}"]


def test_json_of_client_commands(flexd_command, url, daemon, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    shown = {}
    for command in COMMANDS:
        done = flexd_command(*command.split(), "-o", "json", "--url", url)
        assert done.returncode in (0, 1), f"{command}: {done.stderr}"
        shown[command] = json.loads(done.stdout)
    for name in MOMENTS:
        daemon.status = lambda name=name: STATUSES[name]
        shown[name.replace("-", " ", 1)] = json.loads(flexd_command("status", "-o", "json", "--url", url).stdout)
    compare("commands.json", shown)


def test_names_and_labels_of_metrics():
    families = gen_metrics_docs.families()
    compare("metrics.json", {family.name: f"{family.type} {gen_metrics_docs._labels(family)}" for family in families})


def test_losses_and_bytes_between_nodes_by_strategy(ranks):
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        losses, sent = ranks(4).run(train, 2, 2, strategy)[0]
        found[strategy] = {"losses": losses, "bytes between nodes": sent}
    compare("job.json", found, within=MAX_ERROR)


def test_launches_and_host_waits_of_a_step():
    found = {}
    for case in dispatch.QUICK:
        figures = dispatch.measure(case, 1)
        found[case.name] = {name: int(figures[name]) for name in ("launches", "host waits", "uploads", "collectives")}
    compare("dispatch.json", found)
