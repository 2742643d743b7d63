"""The touched rows that gradients are exchanged of, by list, dim-group and peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from flexd.embedding.replicas.row_bits import RowBits, blocks_of, positions_of
from flexd.embedding.replicas.touched_rows import SyncList, entries_at
from flexd.embedding.store.entry_pool import BLOCK

Part = list[tuple[torch.Tensor, list[int]]]
"""Of each dim-group: rows, and how many of each peer."""


@dataclass(frozen=True)
class SumLists:
    """Lists of the rows whose gradients are exchanged. What depends on the lists alone is made once.

    A *part* is the rows of a list, a dim-group and a peer; parts are numbered in this order.

    Attributes:
        peers: number of peers of each list.
        groups: number of dim-groups.
        blocks: int64 [words] block of each word of all lists.
        part_of_word: [words] the part of each word; the number of parts if its rows are left out.
    """

    peers: list[int]
    groups: int
    blocks: torch.Tensor
    part_of_word: npt.NDArray[np.int32]

    @staticmethod
    def of(lists: Sequence[tuple[SyncList, Sequence[bool]]]) -> SumLists:
        """Make them of lists with the dim-groups of each that are kept."""
        groups = len(lists[0][1])
        peers = [len(rows.blocks) for rows, _ in lists]
        numbers = []
        first = 0
        for rows, kept in lists:
            widths = [len(of_group) for of_peer in rows.blocks for of_group in of_peer]
            part = first + np.arange(groups) * len(rows.blocks) + np.arange(len(rows.blocks))[:, None]
            numbers.append(np.repeat(np.where(kept, part, groups * sum(peers)).ravel(), widths))
            first += groups * len(rows.blocks)
        return SumLists(
            peers, groups, torch.cat([rows.index for rows, _ in lists]), np.concatenate(numbers).astype(np.int32)
        )

    @property
    def number_of_parts(self) -> int:
        """Number of parts."""
        return self.groups * sum(self.peers)

    @cached_property
    def _ordered(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the device, of the kept words part by part: int64 number, block and part of each."""
        order = np.argsort(self.part_of_word, kind="stable")
        order = order[: np.count_nonzero(self.part_of_word < self.number_of_parts)].astype(np.int64)
        number = torch.from_numpy(order).to(self.blocks.device)
        part = torch.from_numpy(self.part_of_word[order].astype(np.int64)).to(self.blocks.device)
        return number, self.blocks.index_select(0, number), part

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        ordered: int = sum(part.nbytes for part in self.__dict__.get("_ordered", ()))
        return self.blocks.nbytes + self.part_of_word.nbytes + ordered

    def touched_in_host_memory(self, bits: Sequence[RowBits]) -> tuple[torch.Tensor, list[int]]:
        """Find the touched rows: (int64 [n] entries, part by part; their number in each part).

        Args:
            bits: of each list, in the order of its words.
        """
        firsts = accumulate((BLOCK * len(blocks_of(some)) for some in bits), initial=0)
        at = np.concatenate([positions_of(some).numpy() + first for some, first in zip(bits, firsts, strict=False)])
        parts = self.number_of_parts
        part = self.part_of_word[at // BLOCK]
        counts = np.bincount(part, minlength=parts + 1)[:parts]
        # A radix sort of 16 bits where they are enough.
        order = np.argsort(part.astype(np.uint16) if parts < 2**16 else part, kind="stable")[: counts.sum()]
        return entries_at(self.blocks, torch.from_numpy(at[order])), counts.tolist()

    def on_device(self, bits: Sequence[RowBits]) -> tuple[torch.Tensor, torch.Tensor]:
        """Order the bits of the lists part by part: (uint8 [kept words, 64] bits, int64 [parts] numbers of ones).

        Args:
            bits: as in ``touched_in_host_memory``.
        """
        number, _, part = self._ordered
        ordered = torch.cat(list(bits)).view(-1, BLOCK).index_select(0, number)
        ones = ordered.sum(dim=1)
        return ordered, ones.new_zeros(self.number_of_parts).index_add_(0, part, ones)

    def touched_on_device(self, ordered: torch.Tensor, total: int) -> torch.Tensor:
        """Return int64 [total] entries of the ones, whose number the host has read, in ordered bits."""
        # ``nonzero`` would wait for the number once more.
        at = torch.nonzero_static(ordered.view(-1), size=total).view(-1)
        return entries_at(self._ordered[1], at)

    def by_part(self, places: torch.Tensor, counts: Sequence[int]) -> list[Part]:
        """Split int64 [n] places, part by part: of each list its rows."""
        of_peers: list[list[int]] = []
        first = 0
        for peers in self.peers:
            for end in range(first + peers, first + (self.groups + 1) * peers, peers):
                of_peers.append(list(counts[end - peers : end]))
            first += self.groups * peers
        rows = places.split_with_sizes([sum(of_group) for of_group in of_peers])
        parts = list(zip(rows, of_peers, strict=True))
        return [parts[i : i + self.groups] for i in range(0, len(parts), self.groups)]
