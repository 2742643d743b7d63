"""The answers of homes: a byte for each id, its slot, and the rows that begin, which all ranks must know of.

How many rows begin is known when the answer is here. So it has room for as many as in the one before and some more, and
only if a home has more than that do all homes send theirs once more.
"""

from __future__ import annotations

import weakref

import torch

from flexd.embedding import devices
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.exchange.hop import host_numbers

_LEAST_ROOM = 16


class Answers:
    """Room in the answers of each group of ranks; equal on all of them, whose calls have one order."""

    def __init__(self) -> None:
        self._rooms: weakref.WeakKeyDictionary[Peers, int] = weakref.WeakKeyDictionary()

    def exchange(
        self, peers: Peers, slots: torch.Tensor, begun: torch.Tensor, asked: list[int], answered: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective.

        Args:
            slots: int64 [n] of the ids that each of the peers asked for, ``answered`` of each.
            begun: int64 [f] keys of the rows that begin at this home.
            asked: ids that this rank asked each of the peers for.

        Returns:
            (int64 [m] slots of the ids that this rank asked for; int64 [g] keys of the rows that begin at any home).
        """
        size, room, mine = peers.size, self._rooms.get(peers, _LEAST_ROOM), len(begun)
        head = torch.nn.functional.pad(begun[:room], (1, max(0, room - mine)))
        head[:1].copy_(devices.uploaded([mine], head.device))
        of_head = head.view(torch.uint8)
        parts = slots.to(torch.int8).view(torch.uint8).split_with_sizes(answered)
        width = len(of_head)
        back = peers.all_to_all(
            torch.cat([piece for part in parts for piece in (of_head, part)]),
            [width + count for count in answered],
            [width + count for count in asked],
        ).split_with_sizes([part for count in asked for part in (width, count)])
        found = torch.cat(back[1::2]).view(torch.int8).to(torch.int64)
        heads = torch.cat(back[::2]).view(torch.int64).view(size, 1 + room)
        counts = host_numbers(heads[:, 0]).tolist()
        most = max(counts)
        self._rooms[peers] = max(most + most // 8 + _LEAST_ROOM, room - room // 8)
        if most > room:
            return found, peers.all_to_all(begun.repeat(size), [mine] * size, counts)
        return found, torch.cat([of_home[1 : 1 + count] for of_home, count in zip(heads, counts, strict=True)])
