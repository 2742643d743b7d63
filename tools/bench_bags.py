"""Compare places to pool features by bytes, and the time of a pooled step with ``nn.EmbeddingBag``.

Bytes are those of exact id sets: received and sent between the nodes by one rank of 2 nodes x 2 in a step, forward and
backward. Either rows are pooled on the requesting rank (flexd: a row crosses once a node and step), or the node of the
homes makes partial sums (every bag requests its rows; one vector and one gradient a bag are sent; the ranks of that
node are assumed to add their parts first, at no cost). Rows with copies are free in both; their synchronisation is the
same in both and left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from bench_report import check, last_line
from torch import nn

import flexd

NODES, LOCAL_RANKS, DIM = 2, 2, 64
ROW_BYTES, ID_BYTES = DIM * 4, 8


def drawn(rng: np.random.Generator, rows: int, count: int, skew: float) -> np.ndarray:
    cumulative = np.cumsum(np.arange(1, rows + 1.0) ** -skew)
    return np.minimum(np.searchsorted(cumulative, rng.random(count) * cumulative[-1]), rows - 1)


def traffic(rows: int, ids_of_rank: int, skew: float, bag: int, hot_share: float) -> dict[str, float]:
    """Return MB a rank and step between the nodes, by the place of pooling."""
    rng = np.random.default_rng(0)
    of_rank = [drawn(rng, rows, ids_of_rank, skew) for _ in range(LOCAL_RANKS)]
    far = [(ids % (NODES * LOCAL_RANKS) >= LOCAL_RANKS) & (ids >= hot_share * rows) for ids in of_rank]
    crossing = len(np.unique(np.concatenate([ids[there] for ids, there in zip(of_rank, far, strict=True)])))
    sums = 0
    for ids, there in zip(of_rank, far, strict=True):
        bags = np.repeat(np.arange(-(-len(ids) // bag)), bag)[: len(ids)][there]
        sums += len(np.unique(bags * rows + ids[there])) * ID_BYTES + 2 * ROW_BYTES * len(np.unique(bags))
    total = crossing * (ID_BYTES + 2 * ROW_BYTES)
    return {"rows_mb": total / LOCAL_RANKS / 1e6, "sums_mb": sums / LOCAL_RANKS / 1e6}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, count = 200_000, 25_600
    bytes_of = []
    for skew in (1.05, 1.2):
        for hot_share in (0.0, 0.05):
            for bag in (1, 4, 8, 16, 32, 128):
                figures = traffic(rows, count, skew, bag, hot_share)
                bytes_of.append({"name": f"zipf {skew} copies {hot_share:.0%} bag {bag}", **figures})
                print(
                    f"{bytes_of[-1]['name']:32} rows {figures['rows_mb']:6.2f} MB   sums {figures['sums_mb']:6.2f} MB"
                )
    times = step_times(candidates(rows, count, 1.05, 32), 8 if options.quick else 40)
    ratio = {name: value / times["embedding_bag"] for name, value in times.items()}
    for name, value in times.items():
        print(f"{name:16} {value:7.2f} ms of processor a step, {ratio[name]:.2f} of nn.EmbeddingBag (sparse gradients)")
    if options.json:
        saved = times["flexd"] / times["flexd_expanding"]
        figures = {"bytes": bytes_of, "step_ms": times, "of_embedding_bag": ratio}
        print(
            last_line(
                figures, [check("pooling distinct rows against expanding them", saved, "at most 1.05", saved <= 1.05)]
            )
        )


if __name__ == "__main__":
    main()
