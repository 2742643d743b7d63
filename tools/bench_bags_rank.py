"""One rank of tools/bench_bags.py: a training step on bags by each sharding, with the bytes that it sends to other
nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torchrec_peer

import flexd
from flexd.core.layout import RankLayout

TORCHREC = ("table-wise", "row-wise", "column-wise", "table-row-wise")


@dataclass(frozen=True)
class Setting:
    """One measurement: each rank looks up ``ids`` ids, in bags of ``bag``, evenly in all tables."""

    layout: RankLayout
    tables: int
    rows: int
    dim: int
    ids: int
    skew: float
    bag: int


FLEXD = {"rows": ("rows", "all"), "sums": ("sums", "all"), "node sums": ("sums", "node"), "node rows": ("rows", "node")}
"""Answer and home rule of flexd's tables: spread over all ranks, or each on the ranks of a node, table by table."""


def rule_of(setting: Setting, name: str, table: int) -> str:
    """Return the home rule of a table."""
    rule = FLEXD[name][1]
    return f"node:{table % setting.layout.nodes}" if rule == "node" else rule


def drawn(rng: np.random.Generator, rows: int, count: int, skew: float) -> np.ndarray:
    """Return Zipf ids, the hottest first, moved by a permutation, so that hot rows are in all parts of a table."""
    cumulative = np.cumsum(np.arange(1, rows + 1.0) ** -skew)
    ranks = np.minimum(np.searchsorted(cumulative, rng.random(count) * cumulative[-1]), rows - 1)
    return np.random.default_rng(17).permutation(rows)[ranks]


def bags_of(setting: Setting, rank: int) -> dict[str, flexd.Jagged]:
    rng = np.random.default_rng([setting.bag, rank])
    bags = setting.ids // setting.tables // setting.bag
    return {
        f"t{number}": flexd.Jagged(
            torch.from_numpy(drawn(rng, setting.rows, bags * setting.bag, setting.skew)),
            torch.full((bags,), setting.bag),
        )
        for number in range(setting.tables)
    }


def run(rank: int, port: int, settings: list[Setting], answers: Any) -> None:
    """Measure every setting; rank 0 puts a list of {sharding: bytes a rank sends to other nodes} into ``answers``."""
    layout = settings[0].layout
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(layout.world_size),
        LOCAL_WORLD_SIZE=str(layout.local_ranks), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps: dict[str, Callable[[Setting], float]] = {name: _FlexdSteps(settings[0], name) for name in FLEXD}
    if torchrec_peer.missing() is None:
        steps |= {sharding: _TorchRecSteps(settings[0], sharding) for sharding in TORCHREC}
    found = []
    for setting in settings:
        sent = torch.tensor([step(setting) for step in steps.values()], dtype=torch.float64)
        dist.all_reduce(sent)
        found.append(dict(zip(steps, (sent / layout.world_size).tolist(), strict=True)))
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


class _FlexdSteps:
    def __init__(self, setting: Setting, name: str) -> None:
        self._collection = flexd.EmbeddingBagCollection(
            [
                flexd.EmbeddingBagTable(
                    f"t{number}", setting.rows, setting.dim, answer=FLEXD[name][0], homes=rule_of(setting, name, number)
                )
                for number in range(setting.tables)
            ],
            optimizer=flexd.SGD(0.1),
            layout=setting.layout,
            exchange="chain",
        )

    def __call__(self, setting: Setting) -> float:
        traffic = self._collection.traffic
        before = traffic.all_to_all_inter_bytes
        pooled = self._collection(bags_of(setting, self._collection.rank))
        torch.stack([sums.square().sum() for sums in pooled.values()]).sum().backward()
        self._collection.optimizer.step()
        return traffic.all_to_all_inter_bytes - before


class _TorchRecSteps:
    def __init__(self, setting: Setting, sharding: str) -> None:
        self._module = torchrec_peer.sharded_bags(
            [flexd.EmbeddingBagTable(f"t{number}", setting.rows, setting.dim) for number in range(setting.tables)],
            sharding=sharding,
            layout=setting.layout,
        )

    def __call__(self, setting: Setting) -> float:
        from torchrec import KeyedJaggedTensor

        bags = bags_of(setting, dist.get_rank())
        features = KeyedJaggedTensor(
            list(bags),
            torch.cat([one.values for one in bags.values()]),
            lengths=torch.cat([one.lengths for one in bags.values()]),
        )
        with counted_bytes(setting.layout) as counted:
            out = self._module(features)
            pooled = out.values() if hasattr(out, "values") else out.wait().values()
            pooled.square().sum().backward()
        return counted[0]


@contextmanager
def counted_bytes(layout: RankLayout) -> Iterator[list[float]]:
    """Count the payload that this rank sends to other nodes in the collectives of ``torch.distributed``.

    Reduce-scatter and all-gather are counted as rings with one way out of each node, which is the least that they can
    send: a share of 1 / local ranks of the (m-1)/m that each rank sends.
    """
    node = layout.node_of(dist.get_rank())
    total = [0.0]

    def members(group: Any) -> list[int]:
        return dist.get_process_group_ranks(group or dist.group.WORLD)

    def of_ring(whole: torch.Tensor, group: Any) -> None:
        ranks = members(group)
        nodes = {layout.node_of(rank) for rank in ranks}
        if len(nodes) > 1:
            total[0] += whole.nbytes * (len(ranks) - 1) / len(ranks) * len(nodes) / len(ranks)

    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        ranks = members(group)
        sizes = input_split_sizes or [input.shape[0] // len(ranks)] * len(ranks)
        each = input.element_size() * (input.numel() // max(1, input.shape[0]))
        total[0] += sum(size * each for peer, size in zip(ranks, sizes, strict=True) if layout.node_of(peer) != node)
        return original["all_to_all_single"](output, input, output_split_sizes, input_split_sizes, group, async_op)

    def reduce_scatter_tensor(output: Any, input: Any, *args: Any, group: Any = None, **more: Any) -> Any:
        of_ring(input, group)
        return original["reduce_scatter_tensor"](output, input, *args, group=group, **more)

    def all_gather_into_tensor(output: Any, input: Any, group: Any = None, **more: Any) -> Any:
        of_ring(output, group)
        return original["all_gather_into_tensor"](output, input, group=group, **more)

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective whose bytes are not counted")

    counters = {
        "all_to_all_single": all_to_all_single, "reduce_scatter_tensor": reduce_scatter_tensor,
        "all_gather_into_tensor": all_gather_into_tensor, "all_reduce": refused, "all_gather": refused,
        "reduce_scatter": refused, "all_to_all": refused, "broadcast": refused,
    }  # fmt: skip
    original = {name: getattr(dist, name) for name in counters}
    with mock.patch.multiple(dist, **counters):
        yield total
