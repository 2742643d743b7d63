"""Simulate one rank of a large job without the others: every peer has the same batch, with its keys moved.

A collective over ``MirrorPeers`` returns what this rank sent, as if each peer had asked it for as much as it asks the
peer. Requested keys are moved to keys that this rank serves. So a step of rank 0 of a thousand runs all of its code,
on sizes of that job, in one process. Rows and gradients that come back are not those of a training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from flexd.core.placement import RankLayout
from flexd.embedding.exchange import hop as hop_module
from flexd.embedding.exchange.bag_exchange import SummingRouter
from flexd.embedding.exchange.collectives import DEFAULT_TIMEOUT, DeviceWait, Peers, Traffic
from flexd.embedding.exchange.fault_notices import FaultNotices
from flexd.embedding.exchange.route import COUNT_SHIFT, BagIds, BagRoute
from flexd.embedding.exchange.waits import Waits
from flexd.embedding.replicas import touched_rows as row_bits
from flexd.embedding.replicas.touched_rows import SyncList, SyncLists, TouchedRows
from flexd.embedding.store.directory import Directory

COLLECTIVES: list[str] = []
"""Names of the collectives since the list was cleared."""
MIRROR_SECONDS = [0.0]
"""Processor time that the mirrors took themselves."""
INSIDE = [False]
"""True while a mirror works: what it does is not counted."""


@contextmanager
def _outside() -> Iterator[None]:
    """Leave what a mirror does out of the counts and times."""
    started = time.thread_time()
    INSIDE[0] = True
    with _disable_current_modes():
        yield
    INSIDE[0] = False
    MIRROR_SECONDS[0] += time.thread_time() - started


class MirrorPeers(Peers):
    """Peers that send back what they receive."""

    def __init__(self, ranks: Sequence[int], layout: RankLayout, traffic: Traffic, notices: FaultNotices) -> None:
        waits = Waits(notices, 0, "main")
        super().__init__(None, ranks, 0, layout, traffic, notices, DeviceWait(DEFAULT_TIMEOUT, notices), waits)
        self.modulus = 0
        """Requested keys become multiples of it; 0: they stay as they are."""

    def all_to_all(
        self,
        send: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        of_kinds: Any = None,
        *,
        is_first: bool = False,
    ) -> torch.Tensor:
        if self.size == 1:
            return send
        COLLECTIVES.append("all_to_all")
        with _outside():
            received = torch.cat([send, send.new_zeros(1)])[_mirrored(send_counts, receive_counts)]
        width = send.element_size()
        self._count([count * width for count in send_counts])
        return received

    def all_reduce(self, flat: torch.Tensor, op: Any = None, kind: Any = None) -> None:
        if self.size > 1 and flat.numel():
            COLLECTIVES.append("all_reduce")

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            COLLECTIVES.append("all_gather")
        with _outside():
            return part.unsqueeze(0).repeat(self.size, *[1] * part.dim())

    def check_world_unchanged(self) -> None:
        pass


def _mirrored(sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Return int64 [received]: for each number of a peer, one that was sent to it, again and again, or the place after
    all if none was."""
    out, back = np.array(sent, dtype=np.int64), np.array(received, dtype=np.int64)
    within = np.arange(back.sum()) - np.repeat(np.cumsum(back) - back, back)
    places = np.repeat(np.cumsum(out) - out, back) + within % np.repeat(np.maximum(out, 1), back)
    places[np.repeat(out == 0, back)] = out.sum()
    return torch.from_numpy(places)


class MirrorGroups:
    """World, node and rail of one rank, as ``ChainGroups``, over mirrors."""

    def __init__(
        self, layout: RankLayout, traffic: Traffic, device: torch.device, notices: FaultNotices | None = None,
        own: bool = False,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.notices = notices or FaultNotices()
        self.rank = 0
        self.timeout_seconds = 60.0
        self.on_host = False
        self.world = MirrorPeers(range(layout.world_size), layout, traffic, self.notices)
        self.node = MirrorPeers(layout.node_ranks(0), layout, traffic, self.notices)
        self.rail = MirrorPeers(layout.rail_ranks(0), layout, traffic, self.notices)
        self.node.modulus = layout.local_ranks
        self.rail.modulus = self.world.modulus = layout.world_size

    def close(self, *, destroy: bool = True) -> None:
        pass


def _moved(keys: torch.Tensor, modulus: int, counts: Sequence[int]) -> torch.Tensor:
    """Return keys, so many of each dim-group, moved to multiples of ``modulus`` inside their dim-group."""
    moved = keys - keys % modulus
    for part, (low, high) in zip(torch.split(moved, list(counts)), hop_ranges, strict=True):
        part += torch.where(part < low, modulus, 0) - torch.where(part >= high, modulus, 0)
    return moved


def _served_ids(
    hop: hop_module.Hop, ids: torch.Tensor, requested: hop_module.Counts, served: hop_module.Counts,
    words: hop_module.PeerWords | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """``Hop.exchange_ids``, with the received keys moved to this rank's."""
    arrived, received_words = _exchange_ids(hop, ids, requested, served, words)
    peers = hop.peers
    if not isinstance(peers, MirrorPeers) or not peers.modulus:
        return arrived, received_words
    with _outside():
        keys, counts = arrived & ((1 << COUNT_SHIFT) - 1), arrived >> COUNT_SHIFT
        return _moved(keys, peers.modulus, served.sum(axis=0).tolist()) | (counts << COUNT_SHIFT), received_words


def _third(rows: SyncList, words: torch.Tensor) -> torch.Tensor:
    """Return words of the size of ``words`` in which every third row of the list is touched, and no padding."""
    with _outside():
        listed = _listed_words[id(rows)]
        assert len(listed) == len(words)
        thirds = np.zeros(64 * len(words), np.uint8)
        thirds[::3] = 1
        return (listed & torch.from_numpy(np.packbits(thirds, bitorder="little").view(np.int64))).to(words.device)


def _lists_of(
    directory: Directory, hops: Sequence[hop_module.Hop], layout: RankLayout, trained: Sequence[bool]
) -> SyncLists:
    """``SyncLists.of``, with the bits of each list that stand for a row. Rows that get numbers of these blocks later
    are touched by no mirror."""
    lists = _sync_lists_of(directory, hops, layout, trained)
    with _outside():
        listed = row_bits.none_set(directory.entries, directory.device)
        row_bits.mark(listed, torch.as_tensor(directory.listed_entries(), device=directory.device))
        for rows in (*lists.upstream, *lists.downstream):
            _listed_words[id(rows)] = row_bits.packed(rows.gather(listed)).cpu()
    return lists


_sync_lists_of = SyncLists.of
_listed_words: dict[int, torch.Tensor] = {}


def _recv_up(touched: TouchedRows, hop: int, words: torch.Tensor) -> None:
    _touched_up(touched, hop, _third(touched.lists.downstream[hop], words))


def _recv_down(touched: TouchedRows, hop: int, words: torch.Tensor) -> None:
    _touched_down(touched, hop, _third(touched.lists.upstream[hop], words))


_touched_up, _touched_down = TouchedRows.recv_up, TouchedRows.recv_down
_exchange_ids = hop_module.Hop.exchange_ids
hop_ranges: list[tuple[int, int]] = []
"""First key and end of each dim-group of the collection that is simulated."""


def _served_bags(
    router: SummingRouter, ids: BagIds | None, agreement: hop_module.Agreement
) -> tuple[torch.Tensor, BagRoute, hop_module.Agreement]:
    """``SummingRouter.send_bags``, with the keys that arrived moved to this rank's."""
    keys, route, met = _send_bags(router, ids, agreement)
    with _outside():
        return _moved(keys, router._world_size, route.numbers), route, met


_send_bags = SummingRouter.send_bags


@contextmanager
def mirrored(ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Make collections constructed and used inside rank 0 of their layout, with mirrors for all other ranks."""
    hop_ranges[:] = ranges
    _listed_words.clear()
    with (
        mock.patch("flexd.embedding.collection.ChainGroups", MirrorGroups),
        mock.patch("flexd.embedding.prefetch.pipeline.ChainGroups", MirrorGroups),
        mock.patch.object(hop_module.Hop, "exchange_ids", _served_ids),
        mock.patch.object(SummingRouter, "send_bags", _served_bags),
        mock.patch.object(TouchedRows, "recv_up", _recv_up),
        mock.patch.object(SyncLists, "of", staticmethod(_lists_of)),
        mock.patch.object(TouchedRows, "recv_down", _recv_down),
    ):
        yield
