"""Messages of many parts on an accelerator: rows are written to and read from their places by an index.

A message has a part for each peer and column. ``torch.cat`` of the parts takes the host a microsecond or more for each
of them, twice, and the device a kernel for 128 of them. Here the index of a column says at which *cell* of the message
each row begins; it is made on the device from two numbers a part. The number of kernels does not depend on the peers.
"""

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch

from flexd.core.arrays import Int64Array
from flexd.embedding import devices
from flexd.embedding.exchange.column import Column, ReceivedRows, bytes_of

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _places(starts: Int64Array, sizes: Int64Array, step: int | Int64Array, device: torch.device) -> torch.Tensor:
    """Return int64 [sum of sizes] place of each row of parts with so many rows: the first one of a part is at
    ``starts``, each further one by ``step`` behind. One upload and four kernels."""
    shifts = starts - step * (np.cumsum(sizes) - sizes)
    of_parts = devices.uploaded(np.stack([shifts, np.broadcast_to(step, sizes.shape), sizes]), device)
    total = int(sizes.sum())
    part = torch.repeat_interleave(of_parts[2], output_size=total)
    shift, steps = of_parts[:2].index_select(1, part)
    return torch.addcmul(shift, steps, torch.arange(total, device=device))


def transposed(flat: torch.Tensor, sizes: Int64Array) -> torch.Tensor:
    """As ``hop.with_parts_transposed``."""
    starts = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
    return flat.index_select(0, _places(starts.T.ravel(), sizes.T.ravel(), 1, flat.device))


class WindowMessage:
    """Packs the columns of a message and takes them apart, as ``column.pack`` and ``column.unpack`` do.

    Args:
        me: this rank's place among the peers.
    """

    def __init__(self, columns: Sequence[Column], me: int) -> None:
        self._columns, self._me = columns, me
        widths = np.array([[column.row_bytes] for column in columns])
        self._cell = gcd(*widths.ravel().tolist())
        rows = np.array([[column.sent for column in columns], [column.received for column in columns]], dtype=np.int64)
        # Rows that this rank keeps are written behind the message, and not received.
        self._kept = int((rows[0, :, me] * widths[:, 0]).sum())
        rows[1, :, me] = 0
        order = [*range(me), *range(me + 1, rows.shape[2]), me]
        starts = np.empty_like(rows)
        for number, of_way in enumerate(rows):
            sizes = (of_way * widths)[:, order].T
            starts[number][:, order] = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape).T
        steps = np.broadcast_to(widths // self._cell, rows.shape)
        places = _places(starts.ravel() // self._cell, rows.ravel(), steps.ravel(), columns[0].source.device)
        split = places.split_with_sizes(rows.sum(axis=2).ravel().tolist())
        self._written, self._read = split[: len(columns)], split[len(columns) :]

    def pack(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return (uint8 message, per column the rows that this rank sends to itself)."""
        columns, own = self._columns, []
        size = sum(sum(column.sent) * column.row_bytes for column in columns)
        message = torch.empty(size, dtype=torch.uint8, device=columns[0].source.device)
        for column, places in zip(columns, self._written, strict=True):
            rows = column.source if column.index is None else column.source.index_select(0, column.index)
            first = sum(column.sent[: self._me])
            own.append(rows[first : first + column.sent[self._me]])
            if len(rows):
                windows = self._windows(message, column)
                sent = rows.to(column.wire).contiguous()
                windows.index_copy_(0, places, bytes_of(sent).view(windows.dtype).view(-1, windows.shape[1]))
        return message[: size - self._kept], own

    def unpack(self, arrived: torch.Tensor, own: Sequence[torch.Tensor]) -> list[ReceivedRows]:
        """Return the rows of each column; those of the peers before this rank, and after it, as of one each."""
        received = []
        for column, places, mine in zip(self._columns, self._read, own, strict=True):
            others = arrived[:0]
            if len(places):
                others = self._windows(arrived, column).index_select(0, places).view(-1).view(torch.uint8)
            before, here = sum(column.received[: self._me]), column.received[self._me]
            counts = [before, here, sum(column.received) - before - here]
            parts = others.split_with_sizes([counts[0] * column.row_bytes, counts[2] * column.row_bytes])
            received.append(ReceivedRows([parts[0], mine, parts[1]], 1, counts, column.wire))
        return received

    def _windows(self, message: torch.Tensor, column: Column) -> torch.Tensor:
        """View a message as rows of a column that begin at every cell, and overlap."""
        word = gcd(self._cell, 8)
        words = message.view(_WORDS[word])
        width, step = column.row_bytes // word, self._cell // word
        return words.as_strided(((len(words) - width) // step + 1, width), (step, 1))
