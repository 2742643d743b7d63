"""Rows of several kinds in one message to each peer: packed before a collective and unpacked after it.

In host memory rows are written straight into the message, peer by peer. On an accelerator one kernel gathers the rows
of a column, and one more joins the parts of all columns and peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from flexd.embedding import devices
from flexd.embedding.exchange.collectives import TrafficKind


@dataclass(frozen=True)
class Column:
    """Rows of one kind that are sent to all peers in an exchange, and the number of received rows.

    Attributes:
        source: [m, width] rows.
        index: int64 [sum of sent] rows of ``source`` in the order in which they are sent, peer after peer; None: all of
            them, in their order.
        sent, received: number of rows to and from each peer.
        wire: dtype in which they travel. Rows that a rank sends to itself do not travel and are not rounded.
        kind: traffic kind that the bytes are counted as.
    """

    source: torch.Tensor
    index: torch.Tensor | None
    sent: Sequence[int]
    received: Sequence[int]
    wire: torch.dtype
    kind: TrafficKind = TrafficKind.ALL_TO_ALL

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire."""
        return self.source.shape[1] * self.wire.itemsize

    def write(self, first: int, end: int, out: torch.Tensor) -> None:
        """Write the rows sent from place ``first`` to ``end`` into ``out`` [end - first, width] of dtype ``wire``."""
        if self.index is None or self.source.dtype != self.wire:
            out.copy_(self.rows(first, end))
        else:
            torch.index_select(self.source, 0, self.index[first:end], out=out)

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Return the rows sent from place ``first`` to ``end``, in the dtype of ``source``."""
        return self.source[first:end] if self.index is None else self.source.index_select(0, self.index[first:end])


@dataclass(frozen=True)
class ReceivedRows:
    """Received rows of one column.

    Attributes:
        by_peer: [n, width] rows of each peer in the column's ``wire`` dtype; those from this rank itself in the dtype
            of their source.
        me: this rank's place among the peers.
    """

    by_peer: Sequence[torch.Tensor]
    me: int

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [n, width] rows of all peers, in their order."""
        parts = [part if part.dtype == dtype else part.to(dtype) for part in self.by_peer if len(part)]
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else self.by_peer[0].to(dtype)

    def add_to(self, total: torch.Tensor, places: torch.Tensor) -> None:
        """Add the rows to ``total`` [rows, width] at int64 [n] ``places``, ordered by peer: those of the other peers in
        their order, then those of this rank."""
        parts = list(zip(self.by_peer, torch.split(places, [len(part) for part in self.by_peer]), strict=True))
        mine = parts.pop(self.me)
        if not devices.in_host_memory(total) and len(parts) > 1:
            # One kernel. torch.use_deterministic_algorithms fixes its order of summation.
            whole = [part for part, _ in parts if len(part)]
            parts = [(torch.cat(whole), torch.cat([at for _, at in parts if len(at)]))] if whole else []
        for part, at in (*parts, mine):
            if len(part):
                total.index_add_(0, at, part.to(total.dtype))

    def copy_to(self, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Write the rows to int64 [n] ``places`` of ``rows``, ordered by peer; each place once."""
        if not devices.in_host_memory(rows):
            if len(places):
                rows.index_copy_(0, places, self.whole(rows.dtype))
            return
        for part, at in zip(self.by_peer, torch.split(places, [len(part) for part in self.by_peer]), strict=True):
            if len(part):
                rows.index_copy_(0, at, part.to(rows.dtype))


def pack(columns: Sequence[Column], sent_bytes: Sequence[int], me: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return (uint8 [sum of ``sent_bytes``] message, per column the rows that this rank sends to itself)."""
    device = columns[0].source.device
    places = [[0, *accumulate(column.sent)] for column in columns]
    if devices.in_host_memory(columns[0].source):
        own = [column.rows(place[me], place[me + 1]) for column, place in zip(columns, places, strict=True)]
        return _packed_in_place(columns, places, sum(sent_bytes), me), own
    own, parts = [], []
    for column, place in zip(columns, places, strict=True):
        rows = column.rows(0, place[-1])
        own.append(rows[place[me] : place[me + 1]])
        flat = rows.to(column.wire).view(-1).view(torch.uint8)
        parts.append(torch.split(flat, [count * column.row_bytes for count in column.sent]))
    pieces = [
        part[peer]
        for peer in range(len(sent_bytes))
        if peer != me and sent_bytes[peer]
        for part in parts
        if len(part[peer])
    ]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device), own


def _packed_in_place(columns: Sequence[Column], places: Sequence[Sequence[int]], size: int, me: int) -> torch.Tensor:
    buffer = torch.empty(size, dtype=torch.uint8, device=columns[0].source.device)
    at = 0
    for peer in range(len(columns[0].sent)):
        for column, place in zip(columns, places, strict=True):
            if peer == me or not column.sent[peer]:
                continue
            part = buffer[at : at + column.sent[peer] * column.row_bytes]
            at += len(part)
            rows = place[peer], place[peer + 1]
            if part.storage_offset() % column.wire.itemsize:
                part.copy_(column.rows(*rows).to(column.wire).contiguous().view(-1).view(torch.uint8))
            else:
                column.write(*rows, part.view(column.wire).view(-1, column.source.shape[1]))
    return buffer


def unpack(
    columns: Sequence[Column], own: Sequence[torch.Tensor], arrived: torch.Tensor, me: int
) -> list[ReceivedRows]:
    """Return the rows of each column in the messages of all peers, one message after another in ``arrived``."""
    peers = len(columns[0].received)
    sizes = [
        0 if peer == me else column.received[peer] * column.row_bytes for peer in range(peers) for column in columns
    ]
    starts = list(accumulate(sizes, initial=0))
    pieces = torch.split(arrived, sizes)
    received, width = [], len(columns)
    for number, (column, mine) in enumerate(zip(columns, own, strict=True)):
        parts = list(pieces[number::width])
        aligned = [
            size == 0 or start % column.wire.itemsize == 0
            for size, start in zip(sizes[number::width], starts[number::width], strict=False)
        ]
        if all(aligned):
            pass
        elif devices.in_host_memory(arrived):
            parts = [part if good else part.clone() for part, good in zip(parts, aligned, strict=True)]
        else:
            parts = list(torch.split(torch.cat(parts), sizes[number::width]))
        none = mine.new_empty((0, mine.shape[1]), dtype=column.wire)
        rows = [
            part.view(column.wire).view(-1, mine.shape[1]) if size else none
            for part, size in zip(parts, sizes[number::width], strict=True)
        ]
        rows[me] = mine
        received.append(ReceivedRows(rows, me))
    return received
