"""What the rank that deals a batch sends to the others: where each sample is trained, in few bytes.

A message to the ranks of one node and rail has, in order: the totals of the batch (int64 [4]), the bytes that arrive
from each node over this rail (int64 [nodes]), and the node of each of the rail's samples (one byte, or two).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.dealing import Dealt
from flexd.core.shared_rows import BatchRows

Int64Array = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_TOTALS = 4


@dataclass(frozen=True)
class RailResult:
    """What one rank needs to know.

    Attributes:
        bytes_before, bytes_after, shipped_bytes: of the whole batch, as ``Dealt``.
        shipped_samples: of the whole batch.
        arriving_bytes: int64 [nodes], of samples that come to this rank from each other node.
        to: int64 [samples of the rail], nodes, by the node that has read them.
    """

    bytes_before: int
    bytes_after: int
    shipped_bytes: int
    shipped_samples: int
    arriving_bytes: Int64Array
    to: Int64Array


class DealResults:
    """Results of one batch as bytes.

    Args:
        samples: int64 [rails, nodes], of each rank.
    """

    def __init__(self, nodes: int, samples: Int64Array) -> None:
        self._nodes, self._samples = nodes, samples
        self._dtype = np.dtype(np.uint8 if nodes <= 256 else "<u2")

    def message_bytes(self, rail: int) -> int:
        """Return the size of a message to one rank of the rail."""
        return 8 * (_TOTALS + self._nodes) + self._dtype.itemsize * int(self._samples[rail].sum())

    def pack(self, batch: BatchRows, dealt: Dealt) -> Bytes:
        """Return uint8 [bytes], a message by rail and node.

        Args:
            batch: its samples are ordered by group, the rail, and by the node that has read them.
        """
        moved = dealt.to != batch.node
        totals = [dealt.bytes_before, dealt.bytes_after, dealt.shipped_bytes, int(np.count_nonzero(moved))]
        rails, nodes = len(self._samples), self._nodes
        way = ((batch.group * nodes + dealt.to) * nodes + batch.node)[moved]
        # Sums of float64 are exact: bytes of a batch are below 2**53.
        arriving = np.bincount(way, batch.sample_bytes[moved], rails * nodes * nodes).astype("<i8")
        of_rail = np.split(dealt.to.astype(self._dtype), np.cumsum(self._samples.sum(axis=1))[:-1])
        begin = np.array(totals, dtype="<i8").view(np.uint8)
        messages = [
            part
            for rail, to in enumerate(of_rail)
            for of_node in arriving.reshape(rails, nodes, nodes)[rail]
            for part in (begin, of_node.view(np.uint8), to.view(np.uint8))
        ]
        return np.concatenate(messages)

    def unpack(self, message: Bytes, rail: int) -> RailResult:
        """Return the result for a rank of the rail."""
        fixed = 8 * (_TOTALS + self._nodes)
        numbers = message[:fixed].copy().view("<i8")
        to = message[fixed : self.message_bytes(rail)].copy().view(self._dtype).astype(np.int64)
        before, after, shipped_bytes, shipped = (int(number) for number in numbers[:_TOTALS])
        return RailResult(before, after, shipped_bytes, shipped, numbers[_TOTALS:].astype(np.int64), to)
