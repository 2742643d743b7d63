"""Compare answers of pooled features by the bytes between nodes, and the time of a pooled step with
``nn.EmbeddingBag``.

Bytes are what a rank of 2 nodes x 2 sends to the other node in a training step, on average, in real collectives of
four gloo ranks: flexd with tables that answer by rows and by sums, spread over all ranks or each on the ranks of one
node (its counters), and TorchRec's ``EmbeddingBagCollection`` by each of its shardings (the payload of every
collective; a ring's least for reduce-scatter and all-gather). No row has copies. Without TorchRec (``make torchrec``)
its columns are missing.

Then `--nodes` x `--local-ranks` ranks by the counter of the simulator, which equals real ranks to the byte.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import bench_bags_rank as ranks
import numpy as np
import torch
import torch.multiprocessing as mp
from bench_bags_rank import Setting, drawn
from bench_report import check, ending
from torch import nn

import flexd
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.demo.ports import free_ports
from flexd.planner.model.row_bytes import Exchange
from flexd.simulate.bag_bytes import BagByteCounter, StepBags
from flexd.simulate.byte_counter import INTER, CollectiveBytes, StepByteCounter, sent_bytes
from flexd.simulate.step_keys import StepPasses

DIM = 64
SKEWS = (0.9, 1.05, 1.2)
BAGS = (1, 2, 4, 8, 16, 32, 64)
MOST = 1.02
"""Of the bytes of TorchRec's best sharding: what flexd's better answer may send."""


def real_bytes(settings: Sequence[Setting]) -> list[dict[str, float]]:
    """Return of each setting the bytes a rank and step between nodes, by sharding, sent by real ranks."""
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(ranks.run, (free_ports(1)[0], list(settings), answers), nprocs=settings[0].layout.world_size)
    found: list[dict[str, float]] = answers.get()
    return found


def simulated_bytes(setting: Setting) -> dict[str, float]:
    """Return the bytes a rank and step between nodes of each answer and rule, by the simulator's counters."""
    layout = setting.layout
    return {name: _simulated(setting, name, layout) for name in ranks.FLEXD}


def _simulated(setting: Setting, name: str, layout: RankLayout) -> float:
    keyspace = KeySpace(
        [
            TableSpec(f"t{number}", setting.rows, setting.dim, homes=ranks.rule_of(setting, name, number))
            for number in range(setting.tables)
        ]
    )
    bags = [
        [
            (keyspace.keys(keyspace.index[feature], one.values.numpy()), one.lengths.numpy())
            for feature, one in ranks.bags_of(setting, rank).items()
        ]
        for rank in range(layout.world_size)
    ]
    keys = [np.concatenate([ids for ids, _ in of_rank]) for of_rank in bags]
    none = [np.empty(0, np.int64)] * layout.world_size
    rows = StepByteCounter(keyspace, layout)

    def sent(keys: list[np.ndarray]) -> list[CollectiveBytes]:
        return rows.step(StepPasses.of([keys], layout), Placement.empty(), Exchange.CHAIN)

    if ranks.FLEXD[name][0] == "rows":
        collectives = sent(keys)
    else:
        collectives = [*sent(none), *BagByteCounter(keyspace, layout).step([StepBags.of(bags)], Exchange.CHAIN)]
    return float(sent_bytes(collectives, layout.world_size)[:, :, INTER].sum()) / layout.world_size


def table(title: str, settings: Sequence[Setting], found: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Print the bytes of each setting, and return them with the better answer and its ratio to TorchRec's best."""
    shardings = list(found[0])
    print(f"{title}\n{'Zipf':>6}{'bag':>5}" + "".join(f"{name:>16}" for name in [*shardings, "best of flexd"]))
    figures = []
    for setting, sent in zip(settings, found, strict=True):
        better = min(sent[answer] for answer in ranks.FLEXD)
        entry = {"name": f"zipf {setting.skew} bag {setting.bag}", **sent, "better": better}
        others = [sent[name] for name in ranks.TORCHREC if name in sent]
        last = f"{better / 1e6:>13.2f} MB"
        if others:
            entry["of_best_torchrec"] = better / min(others)
            last += f" ({entry['of_best_torchrec']:.2f} of TorchRec's best)"
        print(f"{setting.skew:>6}{setting.bag:>5}" + "".join(f"{sent[n] / 1e6:>13.2f} MB" for n in shardings) + last)
        figures.append(entry)
    if all("column-wise" in sent for sent in found):
        over = [entry["column-wise"] / entry["better"] for entry in figures]
        print(f"column-wise over flexd's better answer: {min(over):.1f} to {max(over):.1f}")
    for skew in dict.fromkeys(setting.skew for setting in settings):
        pays = [
            setting.bag
            for setting, sent in zip(settings, found, strict=True)
            if setting.skew == skew and min(sent["sums"], sent["node sums"]) < min(sent["rows"], sent["node rows"])
        ]
        shortest = min(pays, default=None)
        print(f"Zipf {skew}: sums are fewer bytes " + (f"from {shortest} ids a bag on" if shortest else "for no bag"))
    return figures


def step_times(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Return median milliseconds of processor time. The candidates take turns, so that caches are equally warm."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            started = time.process_time()
            step()
            times[name].append((time.process_time() - started) * 1e3)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def candidates(rows: int, ids_of_rank: int, skew: float, bag: int) -> dict[str, Callable[[], None]]:
    """Return training steps on one process: pooled by flexd, pooled after expanding all rows, and nn.EmbeddingBag."""
    ids = torch.from_numpy(drawn(np.random.default_rng(1), rows, ids_of_rank, skew))
    lengths = torch.full((ids_of_rank // bag,), bag)
    features = {"item": flexd.Jagged(ids, lengths)}
    table = flexd.EmbeddingBagTable("item", rows, DIM)
    bags = flexd.EmbeddingBagCollection([table], optimizer=flexd.SGD(0.1))
    sequences = flexd.EmbeddingCollection([table], optimizer=flexd.SGD(0.1))
    plain = nn.EmbeddingBag(rows, DIM, mode="sum", include_last_offset=True, sparse=True)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def pooled() -> None:
        bags(features)["item"].square().sum().backward()
        bags.optimizer.step()

    def expanded() -> None:
        out = sequences(features)["item"].values.view(len(lengths), bag, DIM).sum(dim=1)
        out.square().sum().backward()
        sequences.optimizer.step()

    def embedding_bag() -> None:
        plain_optimizer.zero_grad()
        plain(ids, features["item"].offsets).square().sum().backward()
        plain_optimizer.step()

    return {"flexd": pooled, "flexd_expanding": expanded, "embedding_bag": embedding_bag}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two skews, four bag lengths, fewer repeats")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--nodes", type=int, default=8, help="of the simulated cluster")
    parser.add_argument("--local-ranks", type=int, default=8, help="of the simulated cluster")
    options = parser.parse_args()
    torch.set_num_threads(1)
    skews, bags = ((0.9, 1.05), (1, 8, 16, 64)) if options.quick else (SKEWS, BAGS)
    of_four = [Setting(RankLayout(2, 2), 4, 50_000, DIM, 25_600, skew, bag) for skew in skews for bag in bags]
    real = table("2 nodes x 2, real ranks: bytes a rank and step between nodes", of_four, real_bytes(of_four))
    for setting, sent in zip(of_four, real, strict=True):
        for answer, simulated in simulated_bytes(setting).items():
            if simulated != sent[answer]:
                raise AssertionError(f"{setting}: {answer}: {sent[answer]} bytes of real ranks, {simulated} simulated")
    layout = RankLayout(options.nodes, options.local_ranks)
    larger = [replace(setting, layout=layout) for setting in of_four]
    name = f"{layout.nodes} nodes x {layout.local_ranks}, simulated: bytes a rank and step between nodes"
    simulated_figures = table(name, larger, [simulated_bytes(setting) for setting in larger])
    times = step_times(candidates(200_000, 25_600, 1.05, 32), 8 if options.quick else 40)
    ratio = {name: value / times["embedding_bag"] for name, value in times.items()}
    for name, value in times.items():
        print(f"{name:16} {value:7.2f} ms of processor a step, {ratio[name]:.2f} of nn.EmbeddingBag (sparse gradients)")
    saved = times["flexd"] / times["flexd_expanding"]
    checks = [check("pooling distinct rows against expanding them", saved, "at most 1.05", saved <= 1.05)]
    checks += [
        check(f"{one['name']}: bytes over TorchRec's best", one["of_best_torchrec"], f"<= {MOST}",
              one["of_best_torchrec"] <= MOST)
        for one in real if "of_best_torchrec" in one
    ]  # fmt: skip
    figures = {"bytes": real, "simulated_bytes": simulated_figures, "step_ms": times, "of_embedding_bag": ratio}
    return ending(figures, checks, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
