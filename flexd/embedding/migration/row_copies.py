"""Copies rows with optimizer state from their homes to other ranks, in collectives of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.migration.row_carrier import SlotsByPeer
from flexd.embedding.store.slow.tier import RowColumn
from flexd.embedding.store.store import GroupStore

_ALIGNMENT = 16
"""Bytes to which sections are aligned, so that they can be viewed as numbers of any width."""


def copy_rows(peers: Peers, stores: Sequence[GroupStore], slots: SlotsByPeer) -> None:
    """Collective over ``peers``. Send every member the rows that others have, in one all-gather for all dim-groups.

    A member's part of the buffer has a section for the values and one for the state of each dim-group, as long as the
    member with most rows needs it. Every member can compute the rows of each one, so only rows travel, copied directly
    between the stores and the buffer.
    """
    most = [max(len(of_peer) for of_peer in of_peers) for of_peers in slots]
    if peers.size == 1 or not any(most):
        return
    sections: list[_Section] = []
    end = 0
    for store, count in zip(stores, most, strict=True):
        for column in (store.rows, store.state):
            sections.append(_Section(column, end))
            end += -(-count * column.shape[1] * column.element_size() // _ALIGNMENT) * _ALIGNMENT
    mine = torch.zeros(end, dtype=torch.uint8, device=stores[0].rows.device)
    for section, of_peers in zip(sections, _by_section(slots), strict=True):
        held = of_peers[peers.index]
        if section.column.shape[1] and len(held):
            if isinstance(section.column, torch.Tensor):
                torch.index_select(section.column, 0, held, out=section.rows(mine, len(held)))
            else:
                section.rows(mine, len(held)).copy_(section.column.index_select(0, held))
    gathered = peers.all_gather(mine)
    for section, of_peers in zip(sections, _by_section(slots), strict=True):
        for peer, here in enumerate(of_peers):
            if peer != peers.index and section.column.shape[1] and len(here):
                section.column.index_copy_(0, here, section.rows(gathered[peer], len(here)))


@dataclass(frozen=True)
class _Section:
    """The place of rows of ``column`` [slots, width] in a member's part of a buffer, from byte ``start``."""

    column: RowColumn
    start: int

    def rows(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """Return [count, width], a view of uint8 ``part``."""
        width = self.column.shape[1]
        end = self.start + count * width * self.column.element_size()
        return part[self.start : end].view(self.column.dtype).view(count, width)


def _by_section(slots: Sequence[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    """Repeat the slots for the two sections of each dim-group."""
    return [of_peers for of_peers in slots for _ in range(2)]
