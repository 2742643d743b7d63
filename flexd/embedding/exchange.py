"""One hop of the chain: ids go out to peers, rows come back; in the backward pass gradients go out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from flexd.embedding.groups import Peers

Counts = list[list[int]]
"""[peers][groups] numbers of rows."""


@dataclass(frozen=True)
class Agreement:
    """What every rank tells every other in the sizes exchange, and its combination over all of them.

    Attributes:
        version: the highest chunk received; combined by minimum.
        fault: 0, or 1 + the rank whose input cannot be served; combined by maximum.
    """

    version: int
    fault: int


class Hop:
    """Sends each key to one peer and brings its row back.

    Args:
        destination: int64 [n] keys -> int64 [n] peer indices.
        dims: row length of each dim-group; rows of all groups with one dtype share a collective.
    """

    def __init__(self, peers: Peers, destination: Callable[[torch.Tensor], torch.Tensor], dims: Sequence[int]) -> None:
        self.peers = peers
        self.destination = destination
        self._dims = list(dims)

    def exchange_sizes(self, counts: torch.Tensor, agreement: Agreement) -> tuple[Counts, Counts, Agreement]:
        """int64 [peers, groups] rows asked of each peer -> (asked by me, asked of me, agreement of the peers)."""
        size, groups = counts.shape
        extra = torch.tensor([agreement.version, agreement.fault], dtype=torch.int64, device=counts.device)
        sent = torch.cat([counts, extra.expand(size, 2)], dim=1)
        width = [groups + 2] * size
        received = self.peers.all_to_all(sent.reshape(-1), width, width).view(size, groups + 2)
        both = torch.stack([sent, received]).tolist()
        combined = Agreement(min(row[groups] for row in both[1]), max(row[groups + 1] for row in both[1]))
        return [row[:groups] for row in both[0]], [row[:groups] for row in both[1]], combined

    def exchange_ids(self, ids: torch.Tensor, asked: Counts, asked_of_me: Counts) -> torch.Tensor:
        """int64 ids ordered by peer -> the ids asked of me, ordered by peer."""
        return self.peers.all_to_all(ids, [sum(row) for row in asked], [sum(row) for row in asked_of_me])

    def exchange_rows(self, rows: list[torch.Tensor], sent: Counts, received: Counts) -> list[torch.Tensor]:
        """Per group [n, dim] ordered by peer -> per group the rows received, ordered by peer."""
        if self.peers.size == 1:
            return rows
        if len(rows) == 1:
            dim = self._dims[0]
            flat = self.peers.all_to_all(
                rows[0].reshape(-1), [row[0] * dim for row in sent], [row[0] * dim for row in received]
            )
            return [flat.view(-1, dim)]
        return self._exchange_packed(rows, sent, received)

    def _exchange_packed(self, rows: list[torch.Tensor], sent: Counts, received: Counts) -> list[torch.Tensor]:
        """Several groups: bytes of [peer 0: group 0, group 1, ...; peer 1: ...] in one collective."""
        widths = [dim * part.element_size() for dim, part in zip(self._dims, rows, strict=True)]
        parts = [torch.split(part, [row[group] for row in sent]) for group, part in enumerate(rows)]
        flat = torch.cat(
            [part.contiguous().view(-1).view(torch.uint8) for part in chain.from_iterable(zip(*parts, strict=True))]
        )
        bytes_of = [[count * width for count, width in zip(row, widths, strict=True)] for row in received]
        got = self.peers.all_to_all(
            flat,
            [sum(count * width for count, width in zip(row, widths, strict=True)) for row in sent],
            [sum(row) for row in bytes_of],
        )
        pieces = torch.split(got, list(chain.from_iterable(bytes_of)))
        groups = len(rows)
        # cat makes a fresh, aligned buffer, so that bytes can be viewed as numbers again.
        return [
            torch.cat(pieces[group::groups]).view(part.dtype).view(-1, self._dims[group])
            for group, part in enumerate(rows)
        ]
