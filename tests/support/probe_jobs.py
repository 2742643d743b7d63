"""Jobs of ranks: the probe and its collectives."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flexd.core.errors import TopologyError
from flexd.core.layout import RankLayout
from flexd.embedding.kernels import step_probe
from flexd.topology import timing
from flexd.topology.cluster import Cluster, Collective, Link, StepCosts
from flexd.topology.probe import ProbeOptions, probe
from flexd.topology.timing import ProbeGroups, make_collective

SMALL = ProbeOptions(min_bytes=256, max_bytes=65_536, growth=16.0, budget_seconds=1.0)


def measured(rank: int, layout: RankLayout, options: ProbeOptions) -> tuple[Cluster, dict[str, list[float]]]:
    """Return the cluster, and message bytes by link and collective."""
    groups = ProbeGroups.create(layout, "cpu", timedelta(seconds=30))
    report = probe(groups, options)
    groups.close()
    sizes = {f"{link} {collective}": times.message_bytes.tolist() for (link, collective), times in report.times.items()}
    return report.cluster(), sizes


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


def sub_groups(rank: int, layout: RankLayout, size: int) -> list[int] | None:
    """Return the ranks of this rank's group of so many inside its node, after a measurement over it."""
    groups = ProbeGroups.create(layout, "cpu", timedelta(seconds=30))
    group = groups.sub_group(Link.INTRA_NODE, size)
    work = None if group is None else make_collective(Collective.ALL_REDUCE, 1024, group, groups.device)[1]
    groups.seconds(work or (lambda: None), 2)
    ranks = None if group is None else dist.get_process_group_ranks(group)
    if group is not None:
        dist.destroy_process_group(group)
    groups.close()
    return ranks


def leave_during_a_collective(rank: int, layout: RankLayout, victim: int, hangs: bool, timeout_seconds: float) -> str:
    """Let one rank exit, or stop responding, in the middle of a collective between nodes."""
    groups = ProbeGroups.create(layout, "cpu", timedelta(seconds=timeout_seconds))
    group_of, seconds = ProbeGroups.group_of, ProbeGroups.seconds
    reached = False

    def watched(self: ProbeGroups, link: Link) -> Any:
        nonlocal reached
        reached = link is Link.INTER_NODE
        return group_of(self, link)

    def leave(self: ProbeGroups, work: Any, times: int) -> float:
        if not reached:
            return seconds(self, work, times)
        self.max_over_ranks(np.zeros(1))  # the others start
        if not hangs:
            os._exit(9)
        time.sleep(300)
        return 0.0

    if rank == victim:
        ProbeGroups.group_of, ProbeGroups.seconds = watched, leave  # type: ignore[method-assign]
    try:
        probe(groups, SMALL)
    except TopologyError as error:
        return str(error)
    return "no error"


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
        patch.setattr(timing.dist, "all_reduce", all_reduce)
        patch.setattr(timing.dist, "all_to_all_single", all_to_all)
        patch.setattr(timing, "_all_gather", all_gather)
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


def step_costs(rank: int, layout: RankLayout, budget_seconds: float) -> tuple[StepCosts, int]:
    """Return the step costs, and how many turns of steps were measured."""
    turns = 0
    measured = step_probe._steps

    def counted(*arguments: Any) -> Any:
        nonlocal turns
        found = measured(*arguments)
        turns = len(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_probe, "_steps", counted)
        costs = step_probe.measure_step_costs(layout, torch.device("cpu"), budget_seconds)
    return costs, turns
