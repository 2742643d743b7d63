"""Messages of many parts on an accelerator: one gather packs them, and one takes them apart.

A message has a part for each peer and column. ``torch.cat`` of the parts takes the host a microsecond or more for each
of them, twice, and the device a kernel for 128 of them. Here rows move in *units*, of as many bytes as divide every row
of all columns, and an index over units that is made on the device says where they go: the host handles two numbers a
part, with numpy, and the number of kernels depends on neither peers nor columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, lcm

import numpy as np
import numpy.typing as npt
import torch

from flexd.embedding import devices

Int64Array = npt.NDArray[np.int64]

MAX_JOINED_PARTS = 128
"""Parts that ``torch.cat`` joins with one kernel on a GPU; with fewer an index does not pay."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TAIL_BYTES = 16
"""Rows behind a message begin at a multiple of it."""


@dataclass(frozen=True)
class PartTable:
    """Parts in the order in which their units are written.

    Attributes:
        starts: place of the first unit of each.
        sizes: their units.
    """

    starts: Int64Array
    sizes: Int64Array


def places_of_units(tables: Sequence[PartTable], numbers: devices.Numbers) -> list[torch.Tensor]:
    """Return of each table int64 [units] the place of each unit: one upload and three kernels for all tables.

    Args:
        numbers: of the device.
    """
    if not tables:
        return []
    sizes = np.concatenate([table.sizes for table in tables])
    begins = np.cumsum(sizes) - sizes
    shifts = np.concatenate([table.starts for table in tables]) - begins
    total = int(sizes.sum())
    of_parts = devices.uploaded(np.stack([shifts, sizes]), numbers.device)
    part = torch.repeat_interleave(of_parts[1], output_size=total)
    places = of_parts[0].index_select(0, part) + numbers.first(total)
    return list(places.split_with_sizes([int(table.sizes.sum()) for table in tables]))


def transposition(sizes: Int64Array) -> PartTable | None:
    """Return the parts of a flat tensor in the order of ``with_parts_transposed``; None if it needs no table."""
    if min(sizes.shape) == 1 or sizes.size <= MAX_JOINED_PARTS:
        return None
    starts = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
    return PartTable(starts.T.ravel(), sizes.T.ravel())


def with_parts_transposed(flat: torch.Tensor, sizes: Int64Array, places: torch.Tensor | None = None) -> torch.Tensor:
    """Transpose the order of the parts of a flat tensor: those of ``sizes`` [a, b], a by a, become b by b.

    Args:
        places: those of ``transposition``; None: the parts are joined one by one.
    """
    if places is not None:
        return flat.index_select(0, places)
    if min(sizes.shape) == 1:
        return flat
    parts = flat.split_with_sizes(sizes.ravel().tolist())
    return torch.cat([part for b in range(sizes.shape[1]) for part in parts[b :: sizes.shape[1]]])


@dataclass(frozen=True)
class Geometry:
    """Sizes of the columns of a message.

    Attributes:
        row_bytes: of each column.
        sent, received: int64 [columns, peers] rows; those that a rank keeps for itself are 0.
        ahead: int64 [columns] rows of this rank that are put before the received ones.
        own_last: of each column, whether this rank's rows come after those of all other peers.
        me: this rank's place among the peers.
        order: the columns in the order in which their bytes are given to ``UnitMessage.pack``.
    """

    row_bytes: Sequence[int]
    sent: Int64Array
    received: Int64Array
    ahead: Int64Array
    own_last: Sequence[bool]
    me: int
    order: Sequence[int]

    def bytes_of(self, rows: Int64Array) -> list[int]:
        """int64 [columns, peers] rows -> the bytes of each peer."""
        found: list[int] = (np.array(self.row_bytes) @ rows).tolist()
        return found


class UnitMessage:
    """The layout of the messages of one exchange: made once for packing and taking apart.

    Args:
        numbers: of the device.
    """

    def __init__(self, geometry: Geometry, numbers: devices.Numbers) -> None:
        self._geometry = geometry
        widths = geometry.row_bytes
        self._unit = gcd(*widths)
        self._word = gcd(self._unit, 8)
        offsets, self.received_size = _offsets_in_message(widths, geometry.received)
        self._ahead_places, self.room = self._place_ahead()
        aligned = by_alignment(range(len(widths)), widths)
        ahead, others = ([c for c in aligned if bool(geometry.ahead[c]) == with_ahead] for with_ahead in (True, False))
        self._taken = ahead, others
        """Columns that are taken apart together, in the order of their rows: with rows ahead, and without."""
        self._known: dict[int, torch.Tensor] = {}
        """Columns without rows ahead that are taken apart."""
        tables = [self._packing_table(), *(self._taking_table(columns, offsets) for columns in self._taken)]
        self._packing, *self._taking = places_of_units(tables, numbers)

    def _place_ahead(self) -> tuple[list[int], int]:
        """Return the byte behind the message at which the rows ahead of each column begin, and the bytes of all."""
        if not self._geometry.ahead.any():
            return [0] * len(self._geometry.row_bytes), 0
        aligned = lcm(self._unit, _TAIL_BYTES)
        at = -(-self.received_size // aligned) * aligned
        places = []
        for rows, width in zip(self._geometry.ahead.tolist(), self._geometry.row_bytes, strict=True):
            places.append(at)
            at += -(-rows * width // aligned) * aligned
        return places, at - self.received_size

    def _packing_table(self) -> PartTable:
        """Return where the units of a message come from."""
        order = list(self._geometry.order)
        sizes = self._geometry.sent * np.array(self._geometry.row_bytes)[:, None]
        ordered = sizes[order]
        starts = np.empty_like(sizes)
        starts[order] = (np.cumsum(ordered) - ordered.ravel()).reshape(ordered.shape)
        return PartTable(starts.T.ravel() // self._unit, sizes.T.ravel() // self._unit)

    def _taking_table(self, columns: Sequence[int], offsets: Int64Array) -> PartTable:
        geometry, me = self._geometry, self._geometry.me
        peers = geometry.received.shape[1]
        own_last = [*range(me), *range(me + 1, peers), me]
        starts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for c in columns:
            order = own_last if geometry.own_last[c] else slice(None)
            starts += [np.array([self._ahead_places[c]]), offsets[c, order]]
            rows = np.concatenate([geometry.ahead[c : c + 1], geometry.received[c, order]])
            sizes.append(rows * geometry.row_bytes[c])
        return PartTable(np.concatenate(starts) // self._unit, np.concatenate(sizes) // self._unit)

    def pack(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the message.

        Args:
            flat: uint8 [bytes], column by column in ``Geometry.order``, of each those of one peer after another.
        """
        return self._units(flat).index_select(0, self._packing).view(-1).view(torch.uint8)

    def read_columns(self, whole: torch.Tensor, columns: Sequence[int]) -> list[torch.Tensor]:
        """Return uint8 [bytes] of each column: its rows ahead, then its received rows. One kernel for those with rows
        ahead, which are taken when they are used, and one for all others.

        Args:
            whole: uint8 [received_size + room], the message and the rows ahead behind it.
            columns: any, each once.
        """
        ahead, others = self._taken
        found = self._read(whole, ahead, self._taking[0]) if any(c in columns for c in ahead) else {}
        if not self._known and any(c in columns for c in others):
            self._known = self._read(whole, others, self._taking[1])
        found |= self._known
        return [found[c] for c in columns]

    def _read(self, whole: torch.Tensor, columns: Sequence[int], places: torch.Tensor) -> dict[int, torch.Tensor]:
        geometry = self._geometry
        rows = geometry.ahead + geometry.received.sum(axis=1)
        sizes = [int(rows[c]) * geometry.row_bytes[c] for c in columns]
        taken = self._units(whole).index_select(0, places).view(-1).view(torch.uint8)
        return dict(zip(columns, taken.split_with_sizes(sizes), strict=True))

    def rows_ahead(self, whole: torch.Tensor, column: int) -> torch.Tensor:
        """Return uint8 [bytes] of ``whole`` for the rows ahead of a column, to be filled before it is read."""
        first = self._ahead_places[column]
        return whole[first : first + int(self._geometry.ahead[column]) * self._geometry.row_bytes[column]]

    def _units(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(_WORDS[self._word]).view(-1, self._unit // self._word)


def by_alignment(columns: Iterable[int], row_bytes: Sequence[int]) -> list[int]:
    """Order columns so that each begins where its rows may, after those with more factors of two."""
    return sorted(columns, key=lambda c: -(row_bytes[c] & -row_bytes[c]))


def _offsets_in_message(widths: Sequence[int], rows: Int64Array) -> tuple[Int64Array, int]:
    """Return int64 [columns, peers] the byte at which each part begins in messages ordered by peer, and their size."""
    sizes = (rows * np.array(widths)[:, None]).T
    ends = np.cumsum(sizes)
    starts: Int64Array = (ends - sizes.ravel()).reshape(sizes.shape).T
    return starts, int(ends[-1])
