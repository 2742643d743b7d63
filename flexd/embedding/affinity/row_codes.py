"""The rows of each sample, in few bytes, for ranks that only price them.

A code has the dim-group of a row and the node of its home, and the row's address modulo what is left of its bytes. Two
rows of equal code are priced as one, which makes dealing a little worse and changes nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_SPACE = 8
"""Codes of a dim-group for each id of the batch, at least: of random rows one in sixteen shares its code then."""
_MAX_ROWS = 2**16 - 1
"""Rows of a sample beyond these are not priced."""
_SAMPLE_BYTES = 6
"""Of a sample beside its codes: how many these are (uint16), and what shipping it costs (int32)."""


@dataclass(frozen=True)
class SampleKeys:
    """Distinct rows of the samples of one rank, by address.

    Attributes:
        counts: int64 [samples].
        keys: int64 [n], ascending in each sample.
        sample_bytes: int64 [samples], of shipping a sample.
    """

    counts: Int64Array
    keys: Int64Array
    sample_bytes: Int64Array

    @staticmethod
    def of(keys: torch.Tensor, sample: torch.Tensor, sample_bytes: torch.Tensor, end: int) -> SampleKeys:
        """Waits for the device.

        Args:
            keys: int64 [n], with repeats.
            sample: int64 [n].
            sample_bytes: int64 [samples].
            end: all keys are below it.
        """
        samples = len(sample_bytes)
        distinct = (sample * end + keys).unique().cpu().numpy()  # type: ignore[no-untyped-call]
        of_sample, key = np.divmod(distinct, end)
        counts = np.bincount(of_sample, minlength=samples)
        if counts.max(initial=0) > _MAX_ROWS:
            place = np.arange(len(key)) - np.repeat(np.cumsum(counts) - counts, counts)
            key, counts = key[place < _MAX_ROWS], np.minimum(counts, _MAX_ROWS)
        return SampleKeys(counts, key, sample_bytes.cpu().numpy())


@dataclass(frozen=True)
class RowCodes:
    """Packs rows as codes.

    Attributes:
        nodes, groups: numbers of nodes and dim-groups.
        width: bytes of a code.
    """

    nodes: int
    groups: int
    width: int

    @staticmethod
    def for_batch(nodes: int, groups: int, ids: int) -> RowCodes:
        """Return the shortest codes for a global batch of so many ids."""
        needed = nodes * groups * max(256, -(-_SPACE * ids // nodes))
        width = next((width for width in (2, 3, 4) if 256**width >= needed), 8)
        return RowCodes(nodes, groups, width)

    @cached_property
    def _modulus(self) -> int:
        """Without a small divisor in common with the number of ranks: homes follow from keys modulo that."""
        space: int = min(2**62, 256**self.width)
        modulus = space // (self.nodes * self.groups)
        while math.gcd(modulus, 2 * 3 * 5 * 7) > 1:
            modulus -= 1
        return modulus

    def message_bytes(self, samples: int, ids: int) -> int:
        return samples * _SAMPLE_BYTES + ids * self.width

    def pack(self, mine: SampleKeys, homes: Int64Array, group: Int64Array) -> Bytes:
        """Return uint8 [bytes].

        Args:
            homes: int64 [n], the node of each key's home.
            group: int64 [n], its dim-group.
        """
        codes = (group * self.nodes + homes) * self._modulus + mine.keys % self._modulus
        limit = np.iinfo(np.int32).max
        return np.concatenate(
            [
                mine.counts.astype("<u2").view(np.uint8),
                np.minimum(mine.sample_bytes, limit).astype("<i4").view(np.uint8),
                codes.astype("<i8").view(np.uint8).reshape(-1, 8)[:, : self.width].reshape(-1),
            ]
        )

    def unpack(self, message: Bytes, samples: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return int64 [samples] numbers of rows, int64 [samples] bytes of shipping, int64 [n] codes."""
        counts = message[: 2 * samples].view("<u2").astype(np.int64)
        ship = message[2 * samples : _SAMPLE_BYTES * samples].copy().view("<i4").astype(np.int64)
        packed = message[_SAMPLE_BYTES * samples :].reshape(-1, self.width)
        codes = np.zeros((len(packed), 8), dtype=np.uint8)
        codes[:, : self.width] = packed
        return counts, ship, codes.view("<i8").reshape(-1).astype(np.int64)

    def home_and_group(self, codes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the node of the home and the dim-group of each code."""
        group, home = np.divmod(codes // self._modulus, self.nodes)
        return home, group
