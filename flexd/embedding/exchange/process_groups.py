"""The process groups of the chain, and collectives over them that count what they send."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from flexd.core.errors import CollectiveError, TopologyError
from flexd.core.layout import RankLayout
from flexd.embedding.exchange.sent_bytes import Kind, Traffic

# torch 2.13 renamed it and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Peers:
    """One group of ranks that a rank exchanges with; collectives over a single rank are skipped.

    Args:
        ranks: ascending global ranks of the group, this rank among them.
        inter_node: does a message to another member leave the node? One answer for a rail or a node; for the whole
            world it is told by peer.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int, layout: RankLayout, traffic: Traffic
    ) -> None:
        self.group = group
        self.rank = rank
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(rank)
        node = layout.node_of(rank)
        self.far = [layout.node_of(peer) != node for peer in self.ranks]
        self._traffic = traffic

    @contextmanager
    def _named(self, collective: str) -> Iterator[None]:
        """Errors of the process group say which ranks of which group did what."""
        try:
            yield
        except RuntimeError as error:
            others = [rank for rank in self.ranks if rank != self.ranks[self.index]]
            cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CollectiveError(
                f"rank {self.ranks[self.index]}: {collective} with ranks {', '.join(map(str, others))} "
                f"({self._traffic.kind_now}): {cause}",
                remedy="one of them has died, hangs, or makes other calls than this one: see its log, then restart the "
                "job from a checkpoint",
            ) from error

    def _count(self, bytes_by_peer: Sequence[int], kind: Kind | None = None) -> None:
        intra = inter = 0
        for peer, sent in enumerate(bytes_by_peer):
            if peer == self.index:
                continue
            if self.far[peer]:
                inter += sent
            else:
                intra += sent
        self._traffic.sent(intra, inter, kind)

    def _count_even(self, total: int, kind: Kind | None = None) -> None:
        """A collective whose sent bytes spread evenly over the other members."""
        others = self.size - 1
        far = sum(self.far)
        self._traffic.sent(total * (others - far) // others, total * far // others, kind)

    def all_to_all(
        self,
        send: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        sync_counts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Flat ``send`` split by peer -> flat received, split by ``receive_counts``.

        Args:
            sync_counts: how much of what goes to each peer is replica synchronisation, and counted as that.
        """
        if self.size == 1:
            return send
        received = send.new_empty(sum(receive_counts))
        with self._named("all_to_all"):
            dist.all_to_all_single(received, send, list(receive_counts), list(send_counts), group=self.group)
        synced = [0] * self.size if sync_counts is None else sync_counts
        width = send.element_size()
        self._count([(count - sync) * width for count, sync in zip(send_counts, synced, strict=True)])
        if sync_counts is not None:
            self._count([sync * width for sync in synced], Kind.SYNC)
        return received

    def all_reduce(
        self, flat: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, kind: Kind | None = None
    ) -> None:
        """In place; bit-equal on every member."""
        if self.size == 1 or flat.numel() == 0:
            return
        with self._named("all_reduce"):
            dist.all_reduce(flat, op=op, group=self.group)
        self._count_even(2 * flat.numel() * flat.element_size() * (self.size - 1) // self.size, kind)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """[n, ...] on every member (equal shapes) -> [size, n, ...]."""
        if self.size == 1:
            return part.unsqueeze(0)
        parts = part.new_empty((self.size, *part.shape))
        if part.numel():
            with self._named("all_gather"):
                _all_gather(parts.view(-1), part.reshape(-1), group=self.group)
            self._count_even(part.numel() * part.element_size() * (self.size - 1))
        return parts


class ChainGroups:
    """World, node and rail of one rank.

    Collective: every rank of the default process group constructs it at the same point. Without
    ``torch.distributed`` the world is one rank.

    Args:
        device: where the process group's collectives work.
        deadline: if given, the world is a process group of its own too, and no collective waits longer. Who works in
            another thread than the trainer's needs both: collectives of one group must not overtake each other.
            Otherwise collectives wait as long as those of the default process group.

    Raises:
        TopologyError: on every rank, if the layout does not have as many ranks as the default process group, or the
            ranks were given different ones.
    """

    def __init__(
        self, layout: RankLayout, traffic: Traffic, device: torch.device, deadline: timedelta | None = None
    ) -> None:
        self._live = live = dist.is_available() and dist.is_initialized()
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
        self.world = Peers(world, everyone, self.rank, layout, traffic)
        self.node = Peers(node_groups[node], layout.node_ranks(node), self.rank, layout, traffic)
        self.rail = Peers(rail_groups[local], layout.rail_ranks(local), self.rank, layout, traffic)

    def check_still_alone(self) -> None:
        """Raises TopologyError if this is a world of one rank, made before the process group that there is now."""
        if not self._live and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise TopologyError(
                f"the tables are older than the process group of {dist.get_world_size()} ranks: each rank has its own",
                remedy="call torch.distributed.init_process_group before constructing the collection",
            )

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
"""The default process group, and the groups beside it that the trainer's thread works in. A group has threads and
connections of its own, and torch keeps it for ever, so the collections of a job share theirs. Every rank makes its
collections in the same order: all find a group here, or none does."""


def _shared_groups() -> dict[tuple[int, ...], dist.ProcessGroup]:
    global _shared
    if _shared[0] is not dist.group.WORLD:
        _shared = (dist.group.WORLD, {})
    return _shared[1]


def _timeout(device: torch.device) -> timedelta | None:
    """Of the default process group. Groups made beside it would wait for half an hour, whatever it was given."""
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)  # type: ignore[union-attr]
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def _check_same_layout(layout: RankLayout, world_size: int, device: torch.device) -> None:
    mine = torch.tensor([layout.nodes, layout.local_ranks], dtype=torch.int64, device=device)
    gathered = mine.new_empty(world_size * 2)
    _all_gather(gathered, mine)
    layouts = gathered.view(world_size, 2).tolist()
    odd = [rank for rank, shape in enumerate(layouts) if shape != layouts[0]]
    if odd:
        raise TopologyError(
            f"rank {odd[0]} has a layout of {layouts[odd[0]][0]} nodes x {layouts[odd[0]][1]} local ranks, rank 0 of "
            f"{layouts[0][0]} x {layouts[0][1]}",
            remedy="pass the same layout on every rank, or launch equally many ranks on every node",
        )


def layout_from_environment() -> RankLayout:
    """Nodes and local ranks as torchrun tells them (``LOCAL_WORLD_SIZE``); one node without it.

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
