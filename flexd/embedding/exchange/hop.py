"""One hop of the chain: ids go out to peers, rows come back; in the backward pass gradients go out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from flexd.embedding.exchange.process_groups import Peers
from flexd.embedding.exchange.sent_bytes import Kind

Counts = list[list[int]]
"""[peers][groups] numbers of rows."""


_RANK_BITS, _CALL_BITS = 20, 11
_MAX_RANK = 2**_RANK_BITS - 1
_PASSES = 128


@dataclass(frozen=True, order=True)
class Call:
    """What a rank is about to do; compared by ``code``, which all ranks must have alike.

    Attributes:
        code: passes that wait for a step, steps so far (modulo 8), and whether it trains.
    """

    code: int
    rank: int

    @staticmethod
    def of(rank: int, *, trains: bool, passes: int, steps: int) -> Call:
        return Call((steps % 8 * _PASSES + min(passes, _PASSES - 1)) * 2 + trains, rank)

    def __str__(self) -> str:
        passes, steps = self.code // 2 % _PASSES, self.code // 2 // _PASSES
        doing = "looks rows up for training" if self.code % 2 else "only looks rows up"
        return f"rank {self.rank} {doing}, with {passes} passes since its last step ({steps} modulo 8)"

    def pack(self) -> int:
        return self.code << _RANK_BITS | self.rank

    @staticmethod
    def unpack(word: int) -> Call:
        word &= 2 ** (_RANK_BITS + _CALL_BITS) - 1
        return Call(word >> _RANK_BITS, word & _MAX_RANK)


@dataclass(frozen=True)
class Agreement:
    """What every rank tells every other in the sizes exchange, and its combination over all of them.

    Attributes:
        version: the highest chunk received; combined by minimum.
        fault: 0, or 1 + the rank whose input cannot be served; combined by maximum.
        first, last: the calls of the ranks: combined by minimum and maximum.
    """

    version: int
    fault: int
    first: Call
    last: Call

    @property
    def parted(self) -> bool:
        """Do ranks do different things? Nothing more must be exchanged for this call, or they wait for each other."""
        return self.first.code != self.last.code

    def pack(self) -> list[int]:
        """Two 64-bit numbers."""
        bits = _RANK_BITS + _CALL_BITS
        return [self.version << bits | self.first.pack(), self.fault << bits | self.last.pack()]

    @staticmethod
    def combined(words: Sequence[Sequence[int]]) -> Agreement:
        """Of what ``pack`` gave on several ranks."""
        bits = _RANK_BITS + _CALL_BITS
        return Agreement(
            min(version >> bits for version, _ in words),
            max(fault >> bits for _, fault in words),
            min(Call.unpack(version) for version, _ in words),
            max(Call.unpack(fault) for _, fault in words),
        )


@dataclass(frozen=True)
class Column:
    """Rows of one kind that go to all peers in an exchange, and how many come in return.

    Attributes:
        source: [m, width], where the rows are.
        index: int64 [sum of sent] rows of ``source`` in the order in which they are sent, peer after peer; None: all of
            them, as they stand.
        sent, received: rows to and from each peer.
        wire: dtype in which they travel. What a rank sends itself does not travel, and is not rounded.
        kind: what the bytes are counted as.
    """

    source: torch.Tensor
    index: torch.Tensor | None
    sent: Sequence[int]
    received: Sequence[int]
    wire: torch.dtype
    kind: Kind = Kind.ALL_TO_ALL

    @property
    def row_bytes(self) -> int:
        """Of one row on the wire."""
        return self.source.shape[1] * self.wire.itemsize

    def write(self, first: int, end: int, into: torch.Tensor) -> None:
        """The rows sent from place ``first`` to ``end``, into [end - first, width] of dtype ``wire``."""
        if self.index is None or self.source.dtype != self.wire:
            into.copy_(self.rows(first, end))
        else:
            torch.index_select(self.source, 0, self.index[first:end], out=into)

    def rows(self, first: int, end: int) -> torch.Tensor:
        """The same, as they stand in ``source``."""
        return self.source[first:end] if self.index is None else self.source.index_select(0, self.index[first:end])


@dataclass(frozen=True)
class Note:
    """int64 ``words`` for the peers, one after another; ``sent`` and ``received`` numbers of words of each."""

    words: torch.Tensor
    sent: list[int]
    received: list[int]

    @property
    def empty(self) -> bool:
        """Is nothing sent and nothing received? Then it need not travel, whatever the peers tell each other."""
        return not any(self.sent) and not any(self.received)


class Hop:
    """Sends each key to one peer and brings its row back.

    Args:
        destination: int64 [n] keys -> int64 [n] peer indices.
        all_reduces: gradients of the rows that all its peers hold copies of are all-reduced where they can be; else
            they go to the home, and the sums come back.
    """

    def __init__(
        self, peers: Peers, destination: Callable[[torch.Tensor], torch.Tensor], *, all_reduces: bool = False
    ) -> None:
        self.peers = peers
        self.destination = destination
        self.all_reduces = all_reduces

    def exchange_sizes(self, counts: torch.Tensor, agreement: Agreement) -> tuple[Counts, Counts, Agreement]:
        """int64 [peers, groups] rows asked of each peer -> (asked by me, asked of me, agreement of the peers)."""
        size, groups = counts.shape
        extra = torch.tensor(agreement.pack(), dtype=torch.int64, device=counts.device)
        sent = torch.cat([counts, extra.expand(size, 2)], dim=1)
        width = [groups + 2] * size
        received = self.peers.all_to_all(sent.reshape(-1), width, width).view(size, groups + 2)
        both = torch.stack([sent, received]).tolist()
        combined = Agreement.combined([row[groups:] for row in both[1]])
        return [row[:groups] for row in both[0]], [row[:groups] for row in both[1]], combined

    def exchange_ids(
        self, ids: torch.Tensor, asked: Counts, asked_of_me: Counts, note: Note | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 ids ordered by peer, and a note to each -> the ids asked of me, ordered by peer, and the notes."""
        sent, received = [sum(row) for row in asked], [sum(row) for row in asked_of_me]
        if note is None:
            return self.peers.all_to_all(ids, sent, received), None
        pairs = zip(torch.split(ids, sent), torch.split(note.words, note.sent), strict=True)
        got = self.peers.all_to_all(
            torch.cat([piece for pair in pairs for piece in pair]),
            [a + b for a, b in zip(sent, note.sent, strict=True)],
            [a + b for a, b in zip(received, note.received, strict=True)],
            sync_counts=note.sent,
        )
        pieces = torch.split(got, [n for pair in zip(received, note.received, strict=True) for n in pair])
        return torch.cat(pieces[0::2]), torch.cat(pieces[1::2])

    def exchange_note(self, note: Note) -> torch.Tensor:
        """A note to each peer -> the notes received, in a collective of their own."""
        return self.peers.all_to_all(note.words, note.sent, note.received, sync_counts=note.sent)

    def exchange(self, columns: Sequence[Column]) -> list[list[torch.Tensor]]:
        """All columns in one collective -> per column and peer the rows received, [n, width] in the column's ``wire``;
        those from this rank itself in the dtype of their source."""
        me = self.peers.index
        sent, received, synced = (
            [0 if peer == me else sum(of(column, peer) for column in columns) for peer in range(self.peers.size)]
            for of in (_sent_bytes, _received_bytes, _synced_bytes)
        )
        buffer = torch.empty(sum(sent), dtype=torch.uint8, device=columns[0].source.device)
        places = [[0, *accumulate(column.sent)] for column in columns]
        at = 0
        for peer in range(self.peers.size):
            for column, place in zip(columns, places, strict=True):
                if peer == me or not column.sent[peer]:
                    continue
                part = buffer[at : at + _sent_bytes(column, peer)]
                at += len(part)
                rows = place[peer], place[peer + 1]
                if part.storage_offset() % column.wire.itemsize:
                    part.copy_(column.rows(*rows).to(column.wire).contiguous().view(-1).view(torch.uint8))
                else:
                    column.write(*rows, part.view(column.wire).view(-1, column.source.shape[1]))
        arrived = self.peers.all_to_all(buffer, sent, received, sync_counts=synced)
        got: list[list[torch.Tensor]] = [[] for _ in columns]
        at = 0
        for peer in range(self.peers.size):
            for column, place, parts in zip(columns, places, got, strict=True):
                if peer == me:
                    parts.append(column.rows(place[me], place[me + 1]))
                    continue
                part = arrived[at : at + _received_bytes(column, peer)]
                at += len(part)
                if part.storage_offset() % column.wire.itemsize:
                    part = part.clone()  # numbers cannot start at any byte
                parts.append(part.view(column.wire).view(-1, column.source.shape[1]))
        return got


def _sent_bytes(column: Column, peer: int) -> int:
    return column.sent[peer] * column.row_bytes


def _received_bytes(column: Column, peer: int) -> int:
    return column.received[peer] * column.row_bytes


def _synced_bytes(column: Column, peer: int) -> int:
    return _sent_bytes(column, peer) if column.kind == Kind.SYNC else 0
