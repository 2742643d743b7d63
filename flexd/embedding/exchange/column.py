"""Rows of several kinds in one message to each peer: packed before a collective and unpacked after it.

One kernel gathers the rows of a column, and one more joins the parts of all columns and peers, before the collective
and after it. On an accelerator messages of many parts are made by an index instead (``window_message``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexd.embedding.exchange.collectives import TrafficKind

MAX_JOINED_PARTS = 128
"""Parts that ``torch.cat`` joins with one kernel on a GPU; with fewer an index does not pay."""


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


@dataclass(frozen=True)
class ReceivedRows:
    """Received rows of one column as bytes of a message, joined by one kernel for all columns when they are used.

    Attributes:
        by_peer: bytes of each peer; of this rank itself [n, width] rows in the dtype of their source.
        me: this rank's place among the peers.
        counts: number of rows from each peer.
        wire: their dtype.
    """

    by_peer: Sequence[torch.Tensor]
    me: int
    counts: Sequence[int]
    wire: torch.dtype

    @property
    def width(self) -> int:
        return self.by_peer[self.me].shape[1]

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [n, width] rows of all peers, in their order."""
        return joined_columns([self])[0].to(dtype)

    def as_bytes(self, *, own_last: bool) -> list[torch.Tensor]:
        """Return the bytes of each peer, in their order. This rank's own rows have the dtype of the wire."""
        before, after = self.by_peer[: self.me], self.by_peer[self.me + 1 :]
        own = bytes_of(self.by_peer[self.me])
        return [*before, *after, own] if own_last else [*before, own, *after]

    def as_rows(self, *, own_last: bool) -> list[torch.Tensor]:
        """Return the rows of the peers before this rank, of this rank, and of the peers after it."""
        mine = self.by_peer[self.me]
        none = mine.new_empty(0, dtype=torch.uint8)
        before, after = (
            torch.cat([none, *some]).view(self.wire).view(-1, self.width)
            for some in (self.by_peer[: self.me], self.by_peer[self.me + 1 :])
        )
        return [before, after, mine] if own_last else [before, mine, after]


def add_columns(
    arrived: Sequence[ReceivedRows], totals: Sequence[torch.Tensor], places: Sequence[torch.Tensor]
) -> None:
    """Add received rows of each column to its total [rows, width] at int64 [n] places, ordered by peer: those of the
    other peers in their order, then those of this rank. ``torch.use_deterministic_algorithms`` fixes the order on an
    accelerator."""
    used = [number for number, at in enumerate(places) if at.shape[0]]
    if not used:
        return
    some = [arrived[number] for number in used]
    ordered = [places[number] for number in used]
    pieces: list[torch.Tensor] = []
    moved = False
    for rows, at in zip(some, ordered, strict=True):
        first = sum(rows.counts[: rows.me])
        end = first + rows.counts[rows.me]
        moved = moved or first < end < at.shape[0]
        pieces += [at[:first], at[end:], at[first:end]]
    if moved:
        ordered = list(torch.cat(pieces).split_with_sizes([at.shape[0] for at in ordered]))
    for number, at, joined in zip(used, ordered, joined_columns(some, own_last=True), strict=True):
        totals[number].index_add_(0, at, joined.to(totals[number].dtype))


def copy_columns(arrived: Sequence[ReceivedRows], rows: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    """Write received rows of each column to its int64 [n] places of ``rows``, ordered by peer; each place once."""
    used = [number for number, at in enumerate(places) if at.shape[0]]
    for number, joined in zip(used, joined_columns([arrived[n] for n in used]), strict=True):
        rows[number].index_copy_(0, places[number], joined.to(rows[number].dtype))


def joined_columns(
    arrived: Sequence[ReceivedRows], *, own_last: bool = False, ahead: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Return the rows of all peers of each column, in their order. One kernel joins all columns of a dtype.

    Rows from this rank itself that do not have the dtype of the wire make their column wider.

    Args:
        own_last: this rank's rows after those of all other peers.
        ahead: of each column rows that are put before them, in the dtype of the wire.
    """
    joined: dict[int, torch.Tensor] = {}
    together: dict[torch.dtype, list[int]] = {}
    for number, rows in enumerate(arrived):
        mine = rows.by_peer[rows.me]
        if mine.dtype != rows.wire:
            joined[number] = torch.cat([*ahead[number : number + 1], *rows.as_rows(own_last=own_last)])
        elif not ahead and mine.shape[0] == sum(rows.counts):
            joined[number] = mine
        else:
            together.setdefault(rows.wire, []).append(number)
    for wire, numbers in together.items():
        parts: list[torch.Tensor] = []
        sizes = []
        for number in numbers:
            rows, before = arrived[number], ahead[number : number + 1]
            parts += [*map(bytes_of, before), *rows.as_bytes(own_last=own_last)]
            sizes.append((sum(len(some) for some in before) + sum(rows.counts)) * rows.width)
        for number, part in zip(numbers, torch.cat(parts).view(wire).split_with_sizes(sizes), strict=True):
            joined[number] = part.view(-1, arrived[number].width)
    return [joined[number] for number in range(len(arrived))]


def bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """View contiguous [n, width] rows as uint8 [bytes]."""
    return rows.view(-1).view(torch.uint8)


def pack(columns: Sequence[Column], me: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return (uint8 [bytes to all peers] message, per column the rows that this rank sends to itself)."""
    device = columns[0].source.device
    own, parts = [], []
    for column in columns:
        rows = column.source if column.index is None else column.source.index_select(0, column.index)
        first = sum(column.sent[:me])
        own.append(rows[first : first + column.sent[me]])
        width = column.row_bytes
        flat = bytes_of(rows.to(column.wire).contiguous())
        parts.append(flat.split_with_sizes([count * width for count in column.sent]))
    of_peers = list(zip(*parts, strict=True))
    pieces = [part for of_peer in (*of_peers[:me], *of_peers[me + 1 :]) for part in of_peer]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device), own


def unpack(
    columns: Sequence[Column], own: Sequence[torch.Tensor], arrived: torch.Tensor, me: int
) -> list[ReceivedRows]:
    """Return the rows of each column in the messages of all peers, one message after another in ``arrived``."""
    peers = len(columns[0].received)
    widths = [column.row_bytes for column in columns]
    sizes = [
        0 if peer == me else column.received[peer] * width
        for peer in range(peers)
        for column, width in zip(columns, widths, strict=True)
    ]
    pieces = arrived.split_with_sizes(sizes)
    by_column = [list(pieces[number :: len(columns)]) for number in range(len(columns))]
    for parts, mine in zip(by_column, own, strict=True):
        parts[me] = mine
    return [
        ReceivedRows(parts, me, column.received, column.wire) for parts, column in zip(by_column, columns, strict=True)
    ]
