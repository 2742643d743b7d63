"""Messages of many parts on an accelerator: one gather packs them, and one takes them apart.

A message has a part for each peer and column. ``torch.cat`` of the parts takes the host a microsecond or more for each
of them, twice, and the device a kernel for 128 of them. Here rows move in *units*, of as many bytes as divide every row
of a class of columns, and an index over units that is made on the device says where they go: the host handles two
numbers a part, with numpy, and the number of kernels depends on neither peers nor columns.

Columns whose rows are multiples of 16 bytes are one class, all others (words of bits, rows of a migration) another.
Parts of the first begin at multiples of a *cell*, which divides the units of both. With one class a cell is a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm

import numpy as np
import torch

from flexd.core.arrays import Int64Array
from flexd.embedding import devices
from flexd.embedding.exchange.column import MAX_JOINED_PARTS, Column, ReceivedRows, bytes_of

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CLASS_BYTES = 16
_TAIL_BYTES = 16
"""Rows behind a message begin at a multiple of it."""


@dataclass(frozen=True)
class PartTable:
    """Parts in the order in which their units are written.

    Attributes:
        starts: place of the first unit of each, in cells.
        sizes: their units.
        step: cells of a unit.
    """

    starts: Int64Array
    sizes: Int64Array
    step: int = 1


def places_of_units(tables: Sequence[PartTable], numbers: devices.Numbers) -> list[torch.Tensor]:
    """Return of each table int64 [units] the place of each unit: one upload and three kernels for all tables.

    Args:
        numbers: of the device.
    """
    if not tables:
        return []
    columns = []
    first = 0
    for table in tables:
        begins = first + np.cumsum(table.sizes) - table.sizes
        columns.append(np.stack([table.starts - table.step * begins, np.full_like(begins, table.step), table.sizes]))
        first += int(table.sizes.sum())
    of_parts = devices.uploaded(np.concatenate(columns, axis=1), numbers.device)
    part = torch.repeat_interleave(of_parts[2], output_size=first)
    shift, step = of_parts[:2].index_select(1, part)
    return list(
        torch.addcmul(shift, step, numbers.first(first)).split_with_sizes([int(table.sizes.sum()) for table in tables])
    )


def transpositions(all_sizes: Sequence[Int64Array], numbers: devices.Numbers) -> list[torch.Tensor | None]:
    """Return of each int64 [a, b] sizes of the parts of a flat tensor the place of each of its numbers once the parts
    are transposed; None where joining the parts one by one is as fast.

    Args:
        numbers: of the device.
    """
    tables = [
        None
        if min(sizes.shape) == 1 or sizes.size <= MAX_JOINED_PARTS
        else PartTable((np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape).T.ravel(), sizes.T.ravel())
        for sizes in all_sizes
    ]
    known = iter(places_of_units([table for table in tables if table is not None], numbers))
    return [None if table is None else next(known) for table in tables]


@dataclass(frozen=True)
class Geometry:
    """Sizes of the columns of a message.

    Attributes:
        row_bytes: of each column.
        sent, received: int64 [columns, peers] rows; those that a rank keeps for itself are 0.
        ahead: int64 [columns] rows of this rank that are put before the received ones.
        own_last: of each column, whether this rank's rows come after those of all other peers.
        me: this rank's place among the peers.
    """

    row_bytes: Sequence[int]
    sent: Int64Array
    received: Int64Array
    ahead: Int64Array
    own_last: Sequence[bool]
    me: int

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes to each peer."""
        found: list[int] = (np.array(self.row_bytes) @ self.sent).tolist()
        return found

    @property
    def received_bytes(self) -> list[int]:
        """Bytes from each peer."""
        found: list[int] = (np.array(self.row_bytes) @ self.received).tolist()
        return found


class UnitMessage:
    """The layout of the messages of one exchange: made once for packing and taking apart.

    Args:
        numbers: of the device.
    """

    def __init__(self, geometry: Geometry, numbers: devices.Numbers) -> None:
        self._geometry = geometry
        widths = geometry.row_bytes
        wide = [c for c, width in enumerate(widths) if width % _CLASS_BYTES == 0]
        # So that every column begins where its rows may, after those with more factors of two.
        others = sorted(set(range(len(widths))) - set(wide), key=lambda c: -(widths[c] & -widths[c]))
        self.classes = [columns for columns in (wide, others) if columns]
        """Columns that move in the same units, in the order of their rows."""
        self._units = [gcd(*(widths[c] for c in columns)) for columns in self.classes]
        self._cell = gcd(*self._units)
        self._word = gcd(self._cell, 8)
        sent, self._sent_size = _offsets_in_message(widths, geometry.sent)
        received, self.received_size = _offsets_in_message(widths, geometry.received)
        of_ahead, self.room = self._place_ahead()
        self._ahead_places = of_ahead
        tables = self._packing_tables(sent)
        self._taken = [(0, 0)] * len(widths)
        """Of each column the first of its units in its class, and their end."""
        self._known: dict[int, dict[int, torch.Tensor]] = {}
        """Columns that are taken apart, of each class."""
        for columns, unit in zip(self.classes, self._units, strict=True):
            tables.append(self._taking_table(columns, unit, received, of_ahead))
        places = places_of_units(tables, numbers)
        self._packing, self._taking = places[: -len(self.classes)], places[-len(self.classes) :]

    def _place_ahead(self) -> tuple[list[int], int]:
        """Return the byte behind the message at which the rows ahead of each column begin, and the bytes of all."""
        if not self._geometry.ahead.any():
            return [0] * len(self._geometry.row_bytes), 0
        aligned = lcm(self._cell, _TAIL_BYTES)
        at = -(-self.received_size // aligned) * aligned
        places = []
        for rows, width in zip(self._geometry.ahead.tolist(), self._geometry.row_bytes, strict=True):
            places.append(at)
            at += -(-rows * width // aligned) * aligned
        return places, at - self.received_size

    def _packing_tables(self, offsets: Int64Array) -> list[PartTable]:
        """Return where the units of a message come from with one class of columns, else where those of each go."""
        sent, widths = self._geometry.sent, np.array(self._geometry.row_bytes)
        sizes = sent * widths[:, None]
        self._flat_sizes: list[int] = sizes.sum(axis=1).tolist()
        if len(self.classes) == 1:
            ordered = sizes[self.classes[0]]
            flat = np.empty_like(sizes)
            flat[self.classes[0]] = (np.cumsum(ordered) - ordered.ravel()).reshape(ordered.shape)
            return [PartTable(flat.T.ravel() // self._cell, sizes.T.ravel() // self._cell)]
        return [
            PartTable(offsets[columns].ravel() // self._cell, sizes[columns].ravel() // unit, unit // self._cell)
            for columns, unit in zip(self.classes, self._units, strict=True)
        ]

    def _taking_table(self, columns: Sequence[int], unit: int, offsets: Int64Array, ahead: Sequence[int]) -> PartTable:
        geometry, me = self._geometry, self._geometry.me
        peers = geometry.received.shape[1]
        own_last = [*range(me), *range(me + 1, peers), me]
        starts, sizes = [], []
        first = 0
        for c in columns:
            order = own_last if geometry.own_last[c] else slice(None)
            starts += [np.array([ahead[c]]), offsets[c, order]]
            rows = np.concatenate([geometry.ahead[c : c + 1], geometry.received[c, order]])
            sizes.append(rows * (geometry.row_bytes[c] // unit))
            self._taken[c] = first, first + int(sizes[-1].sum())
            first = self._taken[c][1]
        return PartTable(np.concatenate(starts) // self._cell, np.concatenate(sizes), unit // self._cell)

    def sizes_of(self, columns: Sequence[int]) -> list[int]:
        """Return the bytes that each of some columns sends."""
        return [self._flat_sizes[c] for c in columns]

    def pack(self, flat: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the message.

        Args:
            flat: of each of ``classes`` uint8 [bytes that it sends], column by column.
        """
        if self._sent_size == 0:
            return flat[0][:0]
        if len(self.classes) == 1:
            rows = flat[0].view(_WORDS[self._word]).view(-1, self._cell // self._word)
            return rows.index_select(0, self._packing[0]).view(-1).view(torch.uint8)
        message = torch.empty(self._sent_size, dtype=torch.uint8, device=flat[0].device)
        for part, unit, places in zip(flat, self._units, self._packing, strict=True):
            if part.shape[0]:
                rows = part.view(_WORDS[self._word]).view(-1, unit // self._word)
                self._windows(message, unit).index_copy_(0, places, rows)
        return message

    def read_columns(self, whole: torch.Tensor, columns: Sequence[int]) -> list[torch.Tensor]:
        """Return uint8 [bytes] of each column: its rows ahead, then its received rows. One kernel a class of columns.

        Args:
            whole: uint8 [received_size + room], the message and the rows ahead behind it.
            columns: any, each once.
        """
        found: dict[int, torch.Tensor] = {}
        for number, of_class in enumerate(self.classes):
            if not any(c in columns for c in of_class):
                continue
            if self._geometry.ahead[of_class].any():
                # Taken when they are used, once: the rows ahead are known then.
                found |= self._read_class(whole, number, [c for c in of_class if c in columns])
                continue
            if number not in self._known:
                self._known[number] = self._read_class(whole, number, of_class)
            found |= self._known[number]
        return [found[c] for c in columns]

    def _read_class(self, whole: torch.Tensor, number: int, columns: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the bytes of columns of one class, in its order; with one kernel unless others are between them."""
        spans, unit = [self._taken[c] for c in columns], self._units[number]
        if any(a[1] != b[0] for a, b in pairwise(spans)):
            return {c: part for one in columns for c, part in self._read_class(whole, number, [one]).items()}
        first, end = spans[0][0], spans[-1][1]
        if first == end:
            return dict.fromkeys(columns, whole[:0])
        rows = self._windows(whole, unit).index_select(0, self._taking[number][first:end])
        sizes = [(last - begin) * unit for begin, last in spans]
        return dict(zip(columns, rows.view(-1).view(torch.uint8).split_with_sizes(sizes), strict=True))

    def rows_ahead(self, whole: torch.Tensor, column: int) -> torch.Tensor:
        """Return uint8 [bytes] of ``whole`` for the rows ahead of a column, to be filled before ``take``."""
        first = self._ahead_places[column]
        return whole[first : first + int(self._geometry.ahead[column]) * self._geometry.row_bytes[column]]

    def _windows(self, buffer: torch.Tensor, unit: int) -> torch.Tensor:
        """View a message as one unit from each cell on: they overlap where a unit is more than a cell."""
        words = buffer.view(_WORDS[self._word])
        width, step = unit // self._word, self._cell // self._word
        return words.as_strided(((words.shape[0] - width) // step + 1, width), (step, 1))


def _offsets_in_message(widths: Sequence[int], rows: Int64Array) -> tuple[Int64Array, int]:
    """Return int64 [columns, peers] the byte at which each part begins in messages ordered by peer, and their size."""
    sizes = (rows * np.array(widths)[:, None]).T
    ends = np.cumsum(sizes)
    starts: Int64Array = (ends - sizes.ravel()).reshape(sizes.shape).T
    return starts, int(ends[-1])


@dataclass(frozen=True)
class UnitRows(ReceivedRows):
    """Received rows of a column of a ``UnitMessage``. ``by_peer`` has those of this rank itself alone, if they did not
    travel, at its place.

    Attributes:
        message, bytes: what has arrived.
        column: which column.
        aside: this rank's own rows are not in the message: they do not have the dtype of the wire.
    """

    message: UnitMessage
    bytes: torch.Tensor
    column: int
    source: Column

    @property
    def width(self) -> int:
        return self.source.source.shape[1]

    @property
    def rows_ahead(self) -> torch.Tensor:
        """[ahead, width] rows to be filled before the column is joined."""
        return self.message.rows_ahead(self.bytes, self.column).view(self.wire).view(-1, self.width)

    @staticmethod
    def join(arrived: Sequence[ReceivedRows], *, own_last: bool, ahead: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As ``joined_columns``, after the rows ahead, which are in the message."""
        del ahead
        units = [rows for rows in arrived if isinstance(rows, UnitRows)]
        parts = units[0].message.read_columns(units[0].bytes, [rows.column for rows in units])
        joined = []
        for rows, part in zip(units, parts, strict=True):
            together = part.view(rows.wire).view(-1, rows.width)
            mine = rows.counts[rows.me]
            if mine and own_last != rows.source.added:
                raise AssertionError("rows are joined in another order than their column says")
            if mine and rows.source.source.dtype != rows.wire:
                before = rows.source.ahead + (len(together) if own_last else sum(rows.counts[: rows.me]))
                together = torch.cat([together[:before], rows.by_peer[0], together[before:]])
            joined.append(together)
        return joined


class UnitColumns:
    """Columns of a message that is packed and taken apart in units.

    Args:
        me: this rank's place among the peers.
        numbers: of the device.
    """

    def __init__(self, columns: Sequence[Column], me: int, numbers: devices.Numbers) -> None:
        self._columns = list(columns)
        self._me = me
        sent, received = (
            np.array(of_columns, dtype=np.int64)
            for of_columns in ([c.sent for c in columns], [c.received for c in columns])
        )
        aside = [column.source.dtype != column.wire for column in columns]
        sent[aside, me] = received[aside, me] = 0
        geometry = Geometry(
            [column.row_bytes for column in columns], sent, received,
            np.array([column.ahead for column in columns]), [column.added for column in columns], me,
        )  # fmt: skip
        self.sent, self.received = geometry.sent_bytes, geometry.received_bytes
        self._message = UnitMessage(geometry, numbers)

    @property
    def room(self) -> int:
        """Bytes that ``unpack`` needs behind the received message."""
        return self._message.room

    def pack(self) -> torch.Tensor:
        """Return the uint8 message."""
        columns, message = self._columns, self._message
        self._own = [self._aside(column) for column in columns]
        parts: list[torch.Tensor] = []
        for of_class in message.classes:
            if all(columns[c].index is not None and self._own[c] is None for c in of_class):
                sizes = message.sizes_of(of_class)
                flat = torch.empty(sum(sizes), dtype=torch.uint8, device=columns[0].source.device)
                for c, out in zip(of_class, flat.split_with_sizes(sizes), strict=True):
                    columns[c].write(0, sum(columns[c].sent), out.view(columns[c].wire).view(-1, columns[c].width))
                parts.append(flat)
                continue
            rows = [part.to(columns[c].wire).contiguous() for c in of_class for part in self._sent_rows(c)]
            parts.append(bytes_of(rows[0]) if len(rows) == 1 else torch.cat([bytes_of(part) for part in rows]))
        return message.pack(parts)

    def _sent_rows(self, c: int) -> list[torch.Tensor]:
        """Return the rows of a column that travel, one peer after another."""
        column, own = self._columns[c], self._own[c]
        if own is None:
            return [column.rows(0, sum(column.sent))]
        first = sum(column.sent[: self._me])
        return [column.rows(0, first), column.rows(first + len(own), sum(column.sent))]

    def _aside(self, column: Column) -> torch.Tensor | None:
        """Return the rows that this rank keeps because they do not have the dtype of the wire; None without any."""
        if column.source.dtype == column.wire or not column.sent[self._me]:
            return None
        first = sum(column.sent[: self._me])
        return column.rows(first, first + column.sent[self._me])

    def unpack(self, whole: torch.Tensor) -> list[ReceivedRows]:
        """Return the rows of each column.

        Args:
            whole: uint8, the received message and ``room`` bytes.
        """
        return [
            UnitRows(
                [] if own is None else [own], self._me, column.received, column.wire, self._message, whole, c, column
            )
            for c, (column, own) in enumerate(zip(self._columns, self._own, strict=True))
        ]
