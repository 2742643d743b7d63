"""Rows of numbers for certain ranks, and their answers: exchanges beside the steps, of sizes not known before."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexd.embedding import devices
from flexd.embedding.exchange.collectives import Peers


@dataclass(frozen=True)
class AddressedRows:
    """Rows that ranks have sent to each other.

    Attributes:
        arrived: [m, a].
        order: int64 [n] places of this rank's rows, ordered by the rank to which they went.
        sent, received: numbers of rows by rank.
    """

    arrived: torch.Tensor
    order: torch.Tensor
    sent: list[int]
    received: list[int]

    @staticmethod
    def exchanged(world: Peers, ranks: torch.Tensor, rows: torch.Tensor) -> AddressedRows:
        """Collective. Send [n, a] rows to int64 [n] ranks of the world."""
        order, counts = devices.ordered(ranks, world.size)
        ones, width = [1] * world.size, rows.shape[1]
        sent, received = counts.tolist(), world.all_to_all(counts, ones, ones).tolist()
        arrived = world.all_to_all(
            rows.index_select(0, order).view(-1), [width * n for n in sent], [width * n for n in received]
        )
        return AddressedRows(arrived.view(-1, width), order, sent, received)

    def answered(self, world: Peers, answers: torch.Tensor) -> torch.Tensor:
        """Collective. Send [m, b] answers to the rows that arrived back; return [n, b], those to this rank's rows."""
        width = answers.shape[1]
        back = world.all_to_all(
            answers.reshape(-1), [width * n for n in self.received], [width * n for n in self.sent]
        ).view(-1, width)
        return torch.empty_like(back).index_copy_(0, self.order, back)
