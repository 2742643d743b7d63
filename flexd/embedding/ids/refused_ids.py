"""Bloom filters of ids that were looked up once and have no row yet (B. H. Bloom, CACM 13/7, 1970).

Each set of slots has two filters of 32 bits per slot, 8 bytes per row together, of which one takes ids. When that
one holds as many ids as four times the slots, the other is emptied and they change places: an id is known for between
four and eight times as many other new ids as its set has slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexd.embedding.ids.id_sets import SLOTS
from flexd.embedding.row_hashes import splitmix64

_BITS = 32 * SLOTS
_WORDS = _BITS // 64
FILTER_WORDS = 2 * _WORDS
"""Number of int64 of the filters of a set."""
_HASHES = 4
_HELD_PER_SLOT = 4
_SALT = 0x51_7C_C1_B7_27_22_0A_95


@dataclass(frozen=True)
class FilterChange:
    """Changes of the filters by the ids that a step refuses.

    Attributes:
        words: int64 [4 n] places of words, repeats allowed.
        bits: int64 [4 n], the bit that is set in each, 0 for one that is.
        sets: int64 [n], repeats allowed.
        fills: int32 [n] of each, ``RefusedIds.fills``.
        emptied: int64 [n] filters; some are of no set.
    """

    words: torch.Tensor
    bits: torch.Tensor
    sets: torch.Tensor
    fills: torch.Tensor
    emptied: torch.Tensor


class RefusedIds:
    """Filters of the first ``sets`` sets of a rank; of later ones no id is refused.

    Attributes:
        sets: number of sets that have filters.
        words: int64 [sets + 1, 2, 32], the bits of both filters of each set; the last is of no set.
        fills: int32 [sets + 1]: twice the ids that the filter holds which takes them, plus its number.
    """

    def __init__(self, sets: int, slots: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        self.sets, self._slots = sets, slots
        self.words = torch.zeros((sets + 1, 2, _WORDS), dtype=torch.int64, device=device)
        self.fills = torch.zeros(sets + 1, dtype=torch.int32, device=device)

    def _bits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return int64 [n, 4] bits of int64 [n] ids in a filter."""
        mixed = splitmix64(ids ^ _SALT).unsqueeze(1)
        return (mixed >> torch.arange(0, 64, 16, device=ids.device)).bitwise_and_(_BITS - 1)

    def admits(self, sets: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return bool [n]: a filter holds the id, or its set has none."""
        gated, bits = sets.clamp(max=self.sets), self._bits(ids).unsqueeze(1)
        first = gated.view(-1, 1, 1) * FILTER_WORDS + torch.tensor([[0], [_WORDS]], device=ids.device)
        words = self.words.view(-1)[first + (bits >> 6)]
        return (words >> (bits & 63)).bitwise_and_(1).eq(1).all(dim=2).any(dim=1) | (sets >= self.sets)

    def change(self, sets: torch.Tensor, ids: torch.Tensor, refused: torch.Tensor) -> FilterChange:
        """Return the change by those of int64 [n] ids that are ``refused``, bool [n].

        Args:
            sets: int64 [n], ascending.
        """
        gated = torch.where(refused, sets, self.sets)
        fills = self.fills[sets.clamp(max=self.sets)].to(torch.int64)
        turn = fills & 1
        bits = ((gated * 2 + turn) * _BITS).unsqueeze(1) + self._bits(ids)
        bits = bits.view(-1).sort().values
        words, bit = bits >> 6, torch.ones_like(bits) << (bits & 63)
        again = torch.nn.functional.pad(bits[1:] == bits[:-1], (1, 0))
        bit.masked_fill_(again | (self.words.view(-1)[words] & bit).ne(0), 0)
        totals = torch.nn.functional.pad(refused.to(torch.int64).cumsum(0), (1, 0))
        held = totals[torch.searchsorted(sets, sets, right=True)] - totals[torch.searchsorted(sets, sets)]
        held += fills >> 1
        full = refused & (held >= _HELD_PER_SLOT * self._slots(gated))
        filled = torch.where(full, 1 - turn, held * 2 + turn)
        return FilterChange(
            words,
            bit,
            gated,
            filled.to(torch.int32),
            torch.where(full, gated * 2 + 1 - turn, self.sets * 2),
        )

    def apply(self, change: FilterChange) -> None:
        self.words.view(-1).index_add_(0, change.words, change.bits)
        self.words.view(-1, _WORDS).index_fill_(0, change.emptied, 0)
        self.fills.index_copy_(0, change.sets, change.fills)
