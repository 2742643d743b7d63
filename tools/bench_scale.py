"""Measure what a job of a thousand ranks costs one rank outside its steps.

Simulates rank 0 of 128x8 ranks on CPU tensors, with exchanges answered by mirrors (``mirror_ranks``). All times are
seconds of the processor, on one thread, without those of the mirrors:

* groups: process groups that the rank makes for two collections, and in all with a loop of ``flexd.prefetch`` and
  another one with another deadline, in a process group of torch's ``fake`` backend;
* start-up: the constructor of a collection of 1,935 tables with 10^7 home rows on the rank;
* initial values: numbers a second;
* checkpoint: tensors that the rank contributes, entries (chunks of tensors) in the metadata of all ranks,
  ``sharded_state_dict`` and ``save_checkpoint``;
* listing: the lists of touched bits after a chunk of 1,000 rows, in the placement of 1,935 tables: of rows anywhere,
  and of rows of one home, which need further blocks of entries;
* bits: agreeing on 25,600 touched rows of 10^7 listed ones.

    python tools/bench_scale.py [--quick] [--json] [--only PART]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import mirror_ranks
import numpy as np
import torch
import torch.distributed as dist
from bench_dispatch import Case, keyspace_of, placement, tables_of
from bench_report import check, last_line
from mirror_ranks import mirrored
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import flexd
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Delta
from flexd.embedding.checkpoint import checkpoint
from flexd.embedding.checkpoint.saved_tables import saved_tables
from flexd.embedding.exchange import job_groups, process_groups
from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.fault_notice import FaultNotices
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.replicas import row_bits
from flexd.embedding.store.initial_values import initial_rows

DIM = 8


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the processor seconds of ``work`` without those of the mirrors."""
    started, of_mirrors = time.thread_time(), mirror_ranks.MIRROR_SECONDS[0]
    work()
    return time.thread_time() - started - (mirror_ranks.MIRROR_SECONDS[0] - of_mirrors)


def start_up(layout: RankLayout, tables: int, home_rows: int) -> dict[str, float]:
    rows = home_rows * layout.world_size // tables
    specs = [flexd.EmbeddingTable(f"t{i}", rows, DIM) for i in range(tables)]
    keyspace = KeySpace([TableSpec(t.name, t.rows, t.dim, t.dtype, "rowwise_adagrad") for t in specs])
    with mirrored([(group.first_key, group.end_key) for group in keyspace.groups]):
        return {
            "start-up s": seconds_of(
                lambda: flexd.EmbeddingCollection(specs, layout=layout, optimizer=flexd.RowWiseAdagrad())
            )
        }


def groups(layout: RankLayout) -> dict[str, float]:
    """Count the calls that make process groups, on 2x2 ranks and on those of ``layout``."""
    found: dict[str, float] = {}
    for shape in (RankLayout(2, 2), layout):
        dist.init_process_group("fake", rank=0, world_size=shape.world_size, store=FakeStore())
        try:
            with (
                mock.patch.object(distributed_c10d, "_set_pg_timeout"),  # warns of this backend
                mock.patch.object(FaultNotices, "meet"),  # there are no others to wait for
                mock.patch.object(process_groups, "_agree_on_layout", side_effect=lambda *given: given[-1]),
                mock.patch.object(job_groups, "new_subgroup", wraps=job_groups.new_subgroup) as made,
            ):
                of_training = [ChainGroups(shape, Traffic(), torch.device("cpu")) for _ in range(2)]
                found[f"groups, {shape.nodes}x{shape.local_ranks}: two collections"] = made.call_count
                for seconds in (300, 301):
                    deadline, notices = timedelta(seconds=seconds), of_training[0].notices
                    ahead = ChainGroups(shape, Traffic(), torch.device("cpu"), deadline, notices)
                    ahead.close()
                found[f"groups, {shape.nodes}x{shape.local_ranks}: and two loops"] = made.call_count
                for used in of_training:
                    used.close()
        finally:
            dist.destroy_process_group()
    return found


def initial_values(rows: int) -> dict[str, float]:
    def draw() -> None:
        initial_rows("item", np.arange(rows), 64, torch.float32, scale=0.01, seed=1)

    draw()
    seconds = statistics.median(seconds_of(draw) for _ in range(3))
    return {"initial values, M numbers/s": rows * 64 / seconds / 1e6}


def of_checkpoint(case: Case) -> dict[str, float]:
    keyspace = keyspace_of(case)
    with mirrored([(group.first_key, group.end_key) for group in keyspace.groups]):
        collection = flexd.EmbeddingCollection(
            tables_of(case), layout=case.layout, optimizer=flexd.RowWiseAdagrad(), exchange=case.exchange
        )
        state: dict[str, torch.Tensor] = {}
        in_memory = seconds_of(lambda: state.update(checkpoint.sharded_state_dict(collection)))
        with tempfile.TemporaryDirectory() as folder:
            saved = seconds_of(lambda: checkpoint.save_checkpoint(collection, Path(folder, "there")))
        return {
            "tensors of the rank": float(len(state)),
            "entries of all ranks": float(entries(collection)),
            "sharded_state_dict s": in_memory,
            "save_checkpoint s": saved,
        }


def entries(collection: flexd.EmbeddingCollection) -> int:
    """Return the number of chunks of tensors in the metadata of a checkpoint of all ranks."""
    ranks = range(collection.layout.world_size)
    blocks = 0
    for table in saved_tables(collection):
        homes = table.columns[0].homes
        parts = 1 if table.owned is not None else sum(len(homes.block(rank)) > 0 for rank in ranks)
        blocks += parts * len(table.columns)
    return blocks + len(collection.tables) + 1


def listing(case: Case, repeats: int) -> dict[str, float]:
    keyspace = keyspace_of(case)
    with mirrored([(group.first_key, group.end_key) for group in keyspace.groups]):
        collection = flexd.EmbeddingCollection(
            tables_of(case), layout=case.layout, optimizer=flexd.RowWiseAdagrad(),
            replica_fraction=min(1.0, 4 * case.copies + 0.01),
        )  # fmt: skip
        engine = collection.engine
        whole = placement(case, keyspace)
        engine.migrator.apply([engine.migrator.prepare(whole, None)])
        listed = whole.keys

        def after(keys: np.ndarray) -> float:
            none, device = np.zeros(len(keys), np.uint8), np.full(len(keys), Tier.DEVICE, np.uint8)
            engine.migrator.apply([engine.migrator.prepare(Delta(keys, none, device), None)])
            return seconds_of(engine.sync.new_touched)

        engine.sync.new_touched()
        anywhere, of_one_home = [], []
        for number in range(repeats):
            others = np.setdiff1d(np.arange(0, keyspace.total_rows, 97), listed)
            keys = others[number :: len(others) // 1000][:1000]
            anywhere.append(after(keys))
            listed = np.union1d(listed, keys)
            at_home = np.arange(number, keyspace.total_rows, case.layout.world_size)
            keys = np.setdiff1d(at_home, listed)[:1000]
            of_one_home.append(after(keys))
            listed = np.union1d(listed, keys)
        return {
            "listed rows": float(len(engine.migrator.placement()[0])),
            "listing ms": 1e3 * statistics.median(anywhere),
            "listing of new blocks ms": 1e3 * statistics.median(of_one_home),
        }


def bits(layout: RankLayout, listed: int, touched: int, repeats: int) -> dict[str, float]:
    spec = flexd.EmbeddingTable("item", 2 * listed, 1)
    with mirrored([(0, 2 * listed)]):
        engine = flexd.EmbeddingCollection(
            [spec], layout=layout, optimizer=flexd.SGD(), replica_slots=[listed + 1]
        ).engine
        keys = np.arange(0, 2 * listed, 2)
        delta = Delta(keys, np.zeros(listed, np.uint8), np.full(listed, Tier.DEVICE, np.uint8))
        engine.migrator.apply([engine.migrator.prepare(delta, None)])
    rng = np.random.default_rng(1)

    def entries() -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, listed, touched))

    seconds = []
    for _ in range(repeats + 1):
        own, others = entries(), engine.sync.new_touched()
        assert others is not None
        others.add(entries())
        lists = others.lists
        up = [row_bits.packed(rows.gather(others.entries), lists.weights) for rows in lists.downstream]
        down = [row_bits.packed(rows.gather(others.entries), lists.weights) for rows in lists.upstream]

        def agree(own: torch.Tensor = own, up: list[torch.Tensor] = up, down: list[torch.Tensor] = down) -> None:
            mine = engine.sync.new_touched()
            assert mine is not None
            mine.add(own)
            for hop, words in enumerate(up):
                mine.up(hop)
                mine.recv_up(hop, words)
            for hop, words in reversed(list(enumerate(down))):
                mine.down(hop)
                mine.recv_down(hop, words)
            mine.all_positions()

        seconds.append(seconds_of(agree))
    return {"bits ms": 1e3 * statistics.median(seconds[1:])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16x8 ranks, a hundredth of the rows and 100 tables")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="parts whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quick = options.quick
    layout = RankLayout(16, 8) if quick else RankLayout(128, 8)
    tables = 100 if quick else 1935
    case = Case("job", layout, tables, 8, 0.01)
    rows = 10**5 if quick else 10**7
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "groups": lambda: groups(layout),
        "start-up": lambda: start_up(layout, tables, rows),
        "initial values": lambda: initial_values(2**14 if quick else 2**20),
        "checkpoint": lambda: of_checkpoint(case),
        "listing": lambda: listing(case, 3 if quick else 7),
        "bits": lambda: bits(layout, rows, 256 if quick else 25_600, 2 if quick else 5),
    }
    figures: dict[str, float] = {}
    for name, part in parts.items():
        if options.only in name:
            for title, value in part().items():
                figures[title] = value
                print(f"{title:40} {value:14,.1f}", flush=True)
    ranks = layout.world_size
    targets = {
        "start-up s": 4.0, "entries of all ranks": tables * 3.0 + 1 + ranks, "sharded_state_dict s": 2.0,
        "listing ms": 0.5, "listing of new blocks ms": 4.0, "bits ms": 12.0,
    } | {title: 4.0 for title in figures if title.startswith("groups")}  # fmt: skip
    checks = [
        check(f"{ranks} ranks: {title}", figures[title], f"<= {most:g}", figures[title] <= most)
        for title, most in targets.items()
        if title in figures
    ]
    if options.json:
        print(last_line(figures, checks))
    return 0 if all(entry["ok"] for entry in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
