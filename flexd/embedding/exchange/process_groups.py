"""The process groups of the exchange: world, node and rail of each rank."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from flexd.core.errors import TopologyError
from flexd.core.layout import RankLayout
from flexd.embedding.exchange.collectives import Peers, Traffic, all_gather_flat
from flexd.embedding.exchange.device_wait import DeviceWait
from flexd.embedding.exchange.fault_notice import FaultNotices


class ChainGroups:
    """World, node and rail of one rank.

    Collective: every rank of the default process group constructs it at the same point of the program. Without
    ``torch.distributed`` the world is one rank.

    Args:
        device: device of the tensors in collectives.
        deadline: timeout of every collective. If given, all process groups, the world included, are new: a second
            thread needs groups of its own, because collectives of one group must not overtake each other. Without it
            groups are shared by all collections and have the timeout of the default process group.
        notices: of errors of ranks; by default new ones, in which the ranks of these groups share theirs.

    Raises:
        TopologyError: on every rank, if the layout does not have as many ranks as the default process group, or the
            ranks were given different ones.
    """

    def __init__(
        self,
        layout: RankLayout,
        traffic: Traffic,
        device: torch.device,
        deadline: timedelta | None = None,
        notices: FaultNotices | None = None,
    ) -> None:
        live = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if live else 1
        self.rank = dist.get_rank() if live else 0
        if world_size > 1:
            _check_same_layout(layout, world_size, device)
        if layout.world_size != world_size:
            raise TopologyError(
                f"layout of {layout.nodes} nodes x {layout.local_ranks} local ranks, but the process group has "
                f"{world_size} ranks",
                remedy="pass the layout of this job, or launch as many ranks as it has",
            )
        self.layout = layout
        within = _timeout(device) if deadline is None and live else deadline
        own = deadline is not None
        nodes = [layout.node_ranks(node) for node in range(layout.nodes)]
        rails = [layout.rail_ranks(local) for local in range(layout.local_ranks)]
        node_groups = [self._new(ranks, live, within, shared=not own) for ranks in nodes]
        rail_groups = [self._new(ranks, live, within, shared=not own) for ranks in rails]
        node, local = layout.node_of(self.rank), layout.local_rank_of(self.rank)
        everyone = list(range(world_size))
        shared = dist.group.WORLD if live else None
        world = shared if deadline is None else self._new(everyone, live, deadline)
        self.notices = notices or FaultNotices()
        wait = DeviceWait(within, self.notices)
        self.world = Peers(world, everyone, self.rank, layout, traffic, self.notices, wait)
        self.node = Peers(node_groups[node], layout.node_ranks(node), self.rank, layout, traffic, self.notices, wait)
        self.rail = Peers(rail_groups[local], layout.rail_ranks(local), self.rank, layout, traffic, self.notices, wait)

    @staticmethod
    def _new(
        ranks: list[int], live: bool, deadline: timedelta | None, shared: bool = False
    ) -> dist.ProcessGroup | None:
        if not live or len(ranks) < 2:
            return None
        made = _shared_groups() if shared else {}
        if tuple(ranks) not in made:
            made[tuple(ranks)] = dist.new_group(ranks, timeout=deadline)
        return made[tuple(ranks)]


_shared: tuple[object, dict[tuple[int, ...], dist.ProcessGroup]] = (None, {})
"""The default process group, and the groups beside it that the training thread uses. A group has threads and
connections of its own, and torch keeps it for ever, so all collections of a job share them. Every rank makes its
collections in the same order, so either all ranks find a group here or none does."""


def _shared_groups() -> dict[tuple[int, ...], dist.ProcessGroup]:
    global _shared
    if _shared[0] is not dist.group.WORLD:
        _shared = (dist.group.WORLD, {})
    return _shared[1]


def _timeout(device: torch.device) -> timedelta | None:
    """Return the timeout of the default process group. New groups would have torch's half an hour without it."""
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)  # type: ignore[union-attr]
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def _check_same_layout(layout: RankLayout, world_size: int, device: torch.device) -> None:
    mine = torch.tensor([layout.nodes, layout.local_ranks], dtype=torch.int64, device=device)
    gathered = mine.new_empty(world_size * 2)
    all_gather_flat(gathered, mine)
    layouts = gathered.view(world_size, 2).tolist()
    odd = [rank for rank, shape in enumerate(layouts) if shape != layouts[0]]
    if odd:
        raise TopologyError(
            f"rank {odd[0]} has a layout of {layouts[odd[0]][0]} nodes x {layouts[odd[0]][1]} local ranks, rank 0 of "
            f"{layouts[0][0]} x {layouts[0][1]}",
            remedy="pass the same layout on every rank, or launch equally many ranks on every node",
        )


def layout_from_environment() -> RankLayout:
    """Read nodes and local ranks from torchrun's ``LOCAL_WORLD_SIZE``; one node without it.

    Raises:
        TopologyError: the world size is no multiple of ``LOCAL_WORLD_SIZE``, or the process is one of several that have
            no process group yet.
    """
    live = dist.is_available() and dist.is_initialized()
    if not live and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise TopologyError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but there is no process group: each rank would train alone",
            remedy="call torch.distributed.init_process_group first, or pass layout=RankLayout(1, 1)",
        )
    world_size = dist.get_world_size() if live else 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if local < 1 or world_size % local:
        raise TopologyError(
            f"LOCAL_WORLD_SIZE={local} does not divide the world size {world_size}",
            remedy="pass layout=RankLayout(nodes, local_ranks)",
        )
    return RankLayout(world_size // local, local)
