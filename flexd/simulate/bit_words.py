"""Words of the touched bits that ranks exchange for listed rows (``flexd.embedding.store.entry_pool``)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexd.core.homes import Homes
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Delta, Placement

Int64Array = npt.NDArray[np.int64]

ROWS = 64
"""Bits of a word."""


class BitWords:
    """Counts 64-bit words by home rank: the listed rows of a tier, dim-group and home rank have words of their own.

    Rows that leave make room for others, but leave their words; renumbering, which is rare, is left out.
    """

    def __init__(self, keyspace: KeySpace, layout: RankLayout) -> None:
        self._keyspace = keyspace
        self._homes = Homes(keyspace, layout)
        self._world = layout.world_size
        shape = (len(keyspace.groups), len(Tier), self._world)
        self._rows = np.zeros(shape, dtype=np.int64)
        self._words = np.zeros(shape, dtype=np.int64)

    @staticmethod
    def of(keyspace: KeySpace, layout: RankLayout, placement: Placement) -> BitWords:
        """Return those of a placement that was made by one chunk."""
        made = BitWords(keyspace, layout)
        made.apply(Placement.empty().delta_to(placement))
        return made

    def apply(self, chunk: Delta) -> None:
        """Change the tiers of rows: old numbers are freed before new ones are given."""
        self._rows -= self._count(chunk.keys, chunk.old_tiers)
        added = self._count(chunk.keys, chunk.new_tiers)
        missing = np.maximum(0, self._rows + added - ROWS * self._words)
        self._words += -(-missing // ROWS)
        self._rows += added

    def bytes_by_home(self, *tiers: Tier) -> Int64Array:
        """Return int64 [ranks] bytes of the bits of all listed rows of some tiers, by their home rank."""
        words: Int64Array = 8 * self._words[:, list(tiers)].sum(axis=(0, 1))
        return words

    def _count(self, keys: Int64Array, tiers: npt.NDArray[np.uint8]) -> Int64Array:
        """int64 [groups, tiers, ranks], HOME not counted."""
        listed = tiers != Tier.HOME
        keys = keys[listed]
        groups = self._keyspace.group_of(keys) if len(self._keyspace.groups) > 1 else np.zeros(len(keys), np.int64)
        at = (groups * len(Tier) + tiers[listed]) * self._world + self._homes.home_rank(keys)
        return np.bincount(at, minlength=self._rows.size).reshape(self._rows.shape)
