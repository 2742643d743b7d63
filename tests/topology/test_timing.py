"""Collectives that the probe times: their bytes, the groups, and disagreements between ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from flexd.core.errors import TopologyError
from flexd.core.placement import RankLayout
from flexd.topology import probe
from flexd.topology.cluster import Collective, Link
from flexd.topology.probe import ProbeGroups, make_collective
from tests.support.rank_pool import RankPool


def groups_of(rank: int, layouts: dict[int, RankLayout]) -> str:
    """Return the ranks of this rank's groups and two numbers shared by all ranks, or the error."""
    try:
        groups = ProbeGroups.create(layouts[rank], "cpu", timedelta(seconds=30))
    except TopologyError as error:
        return str(error)
    members = [group and dist.get_process_group_ranks(group) for group in (groups.node, groups.rail)]
    largest = float(groups.max_over_ranks(np.array([rank], dtype=np.float64))[0])
    text = f"node {members[0]}, rail {members[1]}, max {largest}, of rank 0 {groups.from_rank0(10.0 + rank)}"
    groups.close()
    return text


def bytes_sent(rank: int, layout: RankLayout, sizes: list[int]) -> list[tuple[str, int, float, float]]:
    """Return for each collective its name, the requested bytes, the stated bytes and the bytes of its arguments."""
    groups = ProbeGroups.create(layout, "cpu", timedelta(seconds=30))
    out = []
    seen: list[float] = []

    def all_reduce(flat: Any, group: Any) -> None:
        peers = dist.get_world_size(group)
        seen.append(2 * flat.nbytes * (peers - 1) / peers)

    def all_to_all(received: Any, send: Any, _received: list[int], splits: list[int], group: Any) -> None:
        assert received.numel() == send.numel() == sum(splits)
        own = splits[dist.get_group_rank(group, rank)]
        seen.append((sum(splits) - own) * send.itemsize)

    def all_gather(received: Any, part: Any, group: Any) -> None:
        peers = dist.get_world_size(group)
        assert received.numel() == part.numel() * peers
        seen.append(part.nbytes * (peers - 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe.dist, "all_reduce", all_reduce)
        patch.setattr(probe.dist, "all_to_all_single", all_to_all)
        patch.setattr(probe, "_all_gather", all_gather)
        for link in Link:
            group = groups.group_of(link)
            for collective in Collective if group is not None else ():
                for size in sizes:
                    assert group is not None
                    stated, work = make_collective(collective, size, group, groups.device)
                    work()
                    out.append((f"{link} {collective}", size, stated, seen[-1]))
    groups.close()
    return out


def test_stated_bytes_equal_the_sent_bytes(pool: RankPool) -> None:
    for layout in (RankLayout(2, 2), RankLayout(1, 4)):
        for rows in pool.run(bytes_sent, layout, [1, 1000, 4099, 65_536]):
            assert rows
            for name, requested, stated, sent in rows:
                assert stated == sent, name
                assert requested <= stated <= requested + 4 * 2 * layout.world_size, name


def test_different_layouts_are_refused_on_every_rank(pool: RankPool) -> None:
    texts = pool.run(groups_of, {rank: RankLayout(2, 2) for rank in (0, 1, 2)} | {3: RankLayout(4, 1)})
    assert all("layout of rank 3 is [4.0, 1.0], of rank 0 [2.0, 2.0]" in text for text in texts)
