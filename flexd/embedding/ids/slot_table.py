"""The slots of the sets that a rank is home of: which id has which, and who gets one that another loses.

A step's decisions are a function of the slots and of the step's distinct ids with their counts over all ranks, in
integers and in ascending order of the ids of a set: first the ids that have slots are counted, then those without
are admitted. An id takes the lowest free slot, else that of the id with the lowest

    step of its last use + bonus * floor(log2(uses since it was admitted))

and among equals the lowest slot. Slots that were used in this step or the one before are pinned: their gradients may
still be on the way. With none left the id goes on reading the shared row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from flexd.embedding import devices
from flexd.embedding.ids.id_sets import SLOTS, IdSets
from flexd.embedding.ids.refused_ids import FILTER_WORDS, FilterChange, RefusedIds

COUNTS = ("look_ups", "own", "admitted", "evicted", "refused", "pinned", "sampled", "in_half", "in_quarter")
"""Counts of a table at its homes: look-ups for training; of these, of ids that had a row of their own already; ids that
were given slots; of these by taking one from another id; ids that were refused as seen the first time, and those for
which all slots of the set were pinned, each once per step; of a sample of the look-ups those with a row of their own,
and of these the ones of ids among the half and the quarter of the slots of their set that would be kept longest, which
fewer rows would have kept too (R. Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal
9/2, 1970)."""

_SAMPLED, _SAMPLED_STEPS = 256, 16
"""Distinct ids of a step, of one step in so many."""
_WORDS = 2 * SLOTS
_NEVER = 2**63 - 1
_MOST_USES = 2**31 - 1
# Slots that are compared at once: of a host as many as its caches hold.
_BLOCK_SLOTS, _BLOCK_SLOTS_OF_ACCELERATOR = 1 << 16, 1 << 26
# Of float64.
_MANTISSA_BITS, _EXPONENT_BIAS = 52, 1023


def set_words(*, filters: bool) -> int:
    """Return the number of int64 of a set that ``SlotTable.packed`` returns."""
    return _WORDS + (FILTER_WORDS + 1) * filters


@dataclass(frozen=True)
class SlotDecisions:
    """The slots of a step's ids. Making it changes nothing; ``SlotTable.apply`` does.

    Attributes:
        slots: int64 [n] slot of each id; -1: the shared row.
        fresh: bool [n]: it was admitted in this step, so that its first look-ups read the shared row.
        places: int64 [n] place of the slot in the table, or of no slot.
        ids, uses: int64 [n] and int32 [n] values there.
        step: of the decisions.
        filters: None: no table has filters.
        counts: int64 [tables, 9], of ``COUNTS``.
    """

    slots: torch.Tensor
    fresh: torch.Tensor
    places: torch.Tensor
    ids: torch.Tensor
    uses: torch.Tensor
    step: int
    filters: FilterChange | None
    counts: torch.Tensor


class SlotTable:
    """Slots of a rank's sets, 16 bytes each; set ``s`` of all is its set ``s // world_size``.

    Attributes:
        ids: int64 [sets + 1, 64] id of each slot; the last set is none, as in the other columns.
        last: int32 [sets + 1, 64] step of the last use.
        uses: int32 [sets + 1, 64] look-ups since the id was admitted; 0: the slot is free, as are those behind it in
            the set; negative: in the step ``last``, so that the row has not been trained.
        refused: None where all ids are admitted at their first look-up.
        counts: int64 [tables, 9], of ``COUNTS``, since the table was made.
        changed: bool [sets + 1], set by ``apply`` of the sets that it changes.
    """

    def __init__(self, sets: IdSets, rank: int, world_size: int, device: torch.device) -> None:
        self._all, self.rank, self.world_size = sets, rank, world_size
        self.sets = len(range(rank, sets.total, world_size))
        shape = (self.sets + 1, SLOTS)
        self.ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.last, self.uses = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
        self.changed = torch.zeros(self.sets + 1, dtype=torch.bool, device=device)
        gated = len(range(rank, sets.gated, world_size))
        self.refused = RefusedIds(gated, self._slots_of, device) if sets.gated else None
        self.counts = torch.zeros((len(sets.tables), len(COUNTS)), dtype=torch.int64, device=device)
        self._slots = torch.arange(SLOTS, device=device)
        self._lowest_first = (SLOTS - self._slots).to(torch.uint8)

    def global_sets(self, sets: torch.Tensor) -> torch.Tensor:
        """Return the numbers of this rank's int64 [n] sets among all."""
        return sets * self.world_size + self.rank

    def columns(self) -> dict[str, torch.Tensor]:
        """Return all that decisions depend on and change, by name; not copies."""
        found = {"ids": self.ids, "last": self.last, "uses": self.uses}
        if self.refused is not None:
            found |= {"filters": self.refused.words, "fills": self.refused.fills}
        return found

    def packed(self, sets: torch.Tensor, *, filters: bool) -> torch.Tensor:
        """Return int64 [n, words of a set] copies of this rank's int64 [n] sets, with their filters if all have some:
        ids, then ``last`` and ``uses``, then the filters and their fill."""
        numbers = torch.cat([self.last.index_select(0, sets), self.uses.index_select(0, sets)], dim=1)
        parts = [self.ids.index_select(0, sets), numbers.view(torch.int64)]
        if filters and self.refused is not None:
            parts.append(self.refused.words.index_select(0, sets).flatten(1))
            parts.append(self.refused.fills.index_select(0, sets).to(torch.int64).unsqueeze(1))
        return torch.cat(parts, dim=1)

    def unpack(self, sets: torch.Tensor, words: torch.Tensor, *, filters: bool) -> None:
        """Replace this rank's int64 [n] sets by what ``packed`` returned; filters that it lacks stay."""
        self.ids[sets] = words[:, :SLOTS]
        numbers = words[:, SLOTS:_WORDS].clone().view(torch.int32)
        self.last[sets], self.uses[sets] = numbers[:, :SLOTS], numbers[:, SLOTS:]
        if filters and self.refused is not None and words.shape[1] > _WORDS:
            self.refused.words[sets] = words[:, _WORDS:-1].reshape(-1, *self.refused.words.shape[1:])
            self.refused.fills[sets] = words[:, -1].to(torch.int32)

    def used(self) -> torch.Tensor:
        """Return int64 [tables], the slots that ids have."""
        mine = torch.arange(self.sets, device=self.uses.device)
        return self._sums(mine, (self.uses[:-1] != 0).sum(dim=1).unsqueeze(0)).view(-1)

    def _slots_of(self, sets: torch.Tensor) -> torch.Tensor:
        return self._all.slots(self.global_sets(sets))

    def find(self, sets: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return int64 [n], the slot of each id in its set, -1 if it has none."""
        step = devices.block_rows(self.ids, _BLOCK_SLOTS, _BLOCK_SLOTS_OF_ACCELERATOR)
        parts = zip(torch.split(sets, step), torch.split(ids, step), strict=True)
        slots = torch.cat([self._first_equal(self.ids.index_select(0, of_sets), of_ids) for of_sets, of_ids in parts])
        at = sets * SLOTS + slots
        known = (self.ids.view(-1).index_select(0, at) == ids) & (self.uses.view(-1).index_select(0, at) != 0)
        return torch.where(known, slots, -1)

    def _first_equal(self, of_sets: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return int64 [n], the first slot of each of int64 [n, 64] ids that has the one of int64 [n] ids, or any if
        none has it. Free slots, whose ids are 0, are behind those that are used."""
        if devices.in_host_memory(ids):
            return torch.from_numpy((of_sets.numpy() == ids.numpy()[:, None]).argmax(axis=1))
        ranks = (of_sets == ids.unsqueeze(1)).view(torch.uint8).mul_(self._lowest_first).amax(dim=1)
        return (SLOTS - ranks.to(torch.int64)).clamp_(max=SLOTS - 1)

    def decide(
        self, sets: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, step: int, bonus: torch.Tensor
    ) -> SlotDecisions:
        """Decide about the distinct ids of a step.

        Args:
            sets: int64 [n] of this rank, ascending.
            ids: int64 [n], in each set ascending.
            counts: int64 [n] look-ups over all ranks; 0: it is only read, and neither counted nor admitted.
            step: not below that of earlier decisions that were applied.
            bonus: int64 [n] steps by which twice as many uses outweigh a later last use.
        """
        slots = self.find(sets, ids)
        known, counted = slots >= 0, counts > 0
        before = sets * SLOTS + slots.clamp(min=0)
        uses = self.uses.view(-1)[before].to(torch.int64)
        fresh = known & (uses < 0) & (self.last.view(-1)[before] == step)
        total = (uses.abs() + counts).clamp_(max=_MOST_USES)
        wanted = ~known & counted
        refused, filters = torch.zeros_like(wanted), None
        if self.refused is not None:
            refused = wanted & (counts < 2) & ~self.refused.admits(sets, ids)
            wanted = wanted & ~refused
            filters = self.refused.change(sets, ids, refused)
        at = wanted.nonzero().view(-1)
        chosen, evicts = self._choose(sets, slots, at, counted & known, step, bonus)
        slots = slots.index_copy(0, at, chosen)
        admitted = wanted & (slots >= 0)
        uses = torch.where(known, torch.where(fresh, -total, total), -counts.clamp(max=_MOST_USES))
        changes = counted & (slots >= 0)
        places = torch.where(changes, sets * SLOTS + slots, self.sets * SLOTS)
        own = known & ~fresh
        evicted = torch.zeros_like(wanted).index_copy_(0, at, evicts)
        flags = torch.stack([counts, counts * own, admitted, evicted, refused, wanted & (slots < 0)])
        sums = torch.cat([self._sums(sets, flags), self._sampled(sets, before, counts * own, step, bonus)], dim=1)
        return SlotDecisions(slots, fresh | admitted, places, ids, uses.to(torch.int32), step, filters, sums)

    def _sums(self, sets: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return int64 [tables, k], the sums of int64 [k, n] numbers of ids of int64 [n] ascending sets by table."""
        totals = torch.nn.functional.pad(numbers.cumsum(1), (1, 0))
        ends = torch.searchsorted(self.global_sets(sets), self._all.ends)
        return totals.index_select(1, ends).diff(dim=1, prepend=totals[:, :1]).T

    def _sampled(
        self, sets: torch.Tensor, places: torch.Tensor, own: torch.Tensor, step: int, bonus: torch.Tensor
    ) -> torch.Tensor:
        """Return int64 [tables, 3], the last of ``COUNTS``.

        Args:
            places: int64 [n] of the slots that ids have.
            own: int64 [n] look-ups of ids that have one.
        """
        if step % _SAMPLED_STEPS:
            return torch.zeros((len(self._all.tables), 3), dtype=torch.int64, device=own.device)
        size = min(_SAMPLED, len(sets))
        some = slice(first := step * 0x9E3779B1 % (len(sets) - size + 1), first + size)
        sets, own = sets[some], own[some]
        last, uses = self.last.index_select(0, sets), self.uses.index_select(0, sets)
        scores = floor_log2(uses.abs_()).mul_(bonus[some].unsqueeze(1)).add_(last).masked_fill_(uses == 0, -1)
        mine = scores.gather(1, (places[some] % SLOTS).unsqueeze(1))
        above, slots = (scores > mine).sum(dim=1), self._slots_of(sets)
        return self._sums(sets, torch.stack([own, own * (2 * above < slots), own * (4 * above < slots)]))

    def _choose(
        self,
        sets: torch.Tensor,
        slots: torch.Tensor,
        at: torch.Tensor,
        used: torch.Tensor,
        step: int,
        bonus: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose slots for the ids at int64 [m] ascending places ``at``.

        Args:
            used: bool [n]: ids whose ``slots`` are used in this step.

        Returns:
            (int64 [m] slots, -1 where all are pinned; bool [m]: the slot is another id's now).
        """
        if not len(at):
            return at, torch.zeros_like(at, dtype=torch.bool)
        mine = sets.index_select(0, at)
        # What is asked of a set, of the first of its ids here.
        first = torch.searchsorted(mine, mine)
        number = torch.arange(len(mine), device=mine.device) - first
        bonus = bonus.index_select(0, at)
        if on_host := devices.in_host_memory(mine):
            # Each set once; elsewhere the host would wait to know how many they are.
            heads = number.eq(0)
            mine, bonus, first = mine[heads], bonus[heads], heads.cumsum(0).sub_(1)
        last, uses = self.last.index_select(0, mine), self.uses.index_select(0, mine)
        # Used in this step, which the table does not know yet, or in the one before; or there is no such slot.
        blocked = (last >= max(step - 1, 1)).logical_or_(self._slots >= self._slots_of(mine).unsqueeze(1))
        place = torch.searchsorted(mine, sets).clamp_(max=len(mine) - 1)
        inside = used & (mine.index_select(0, place) == sets)
        blocked = torch.cat([blocked.view(-1), blocked.new_empty(1)])
        blocked.index_fill_(0, torch.where(inside, place * SLOTS + slots, len(mine) * SLOTS), 1)
        # The lowest of free slots, whose ``last`` is 0, is the first of all: 0 has the lowest exponent.
        order = torch.addcmul(last.to(torch.int64), exponents(uses.abs_()), bonus.unsqueeze(1))
        order = order.mul_(SLOTS).add_(self._slots).masked_fill_(blocked[:-1].view(-1, SLOTS), _NEVER)
        lowest = _lowest_in_turn(order, first, number) if on_host else _lowest_sorted(order, first, number)
        free = lowest != _NEVER
        chosen = torch.where(free, lowest % SLOTS, -1)
        return chosen, free & (uses[first, chosen] > 0)

    def apply(self, decisions: SlotDecisions) -> None:
        """Make decisions, the last that were made, those of the table."""
        self.ids.view(-1).index_copy_(0, decisions.places, decisions.ids)
        self.uses.view(-1).index_copy_(0, decisions.places, decisions.uses)
        self.last.view(-1).index_fill_(0, decisions.places, decisions.step)
        self.changed.index_fill_(0, torch.div(decisions.places, SLOTS, rounding_mode="floor"), 1)
        if self.refused is not None and decisions.filters is not None:
            self.refused.apply(decisions.filters)
            self.changed[: self.refused.sets + 1].index_fill_(0, decisions.filters.sets, 1)
        self.counts += decisions.counts


def _lowest_sorted(numbers: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return int64 [m]: of the ascending numbers of each row in int64 [n, 64] the one at a place from 0 on; behind them
    ``_NEVER``."""
    found = numbers.sort(dim=1).values[row, place.clamp(max=SLOTS - 1)]
    return torch.where(place < SLOTS, found, _NEVER)


def _lowest_in_turn(numbers: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return what ``_lowest_sorted`` does, where the host knows how many are wanted of a row: mostly few. Changes
    ``numbers``."""
    left, rows, turn = numbers.numpy(), row.numpy(), place.numpy()
    found = np.full(len(rows), _NEVER)
    for now in range(min(SLOTS, int(turn.max()) + 1)):
        mine = np.flatnonzero(turn == now)
        of_turn = rows[mine]
        lowest = left[of_turn].argmin(axis=1)
        found[mine] = left[of_turn, lowest]
        left[of_turn, lowest] = _NEVER
    return torch.from_numpy(found)


def exponents(numbers: torch.Tensor) -> torch.Tensor:
    """Return int64: of integers from 1 to 2**31 the floor of the logarithm to base 2, exactly, plus a constant; of 0
    less than of all others."""
    return numbers.to(torch.float64).view(torch.int64).bitwise_right_shift_(_MANTISSA_BITS)


def floor_log2(numbers: torch.Tensor) -> torch.Tensor:
    """Return int64: of integers from 1 to 2**31 the floor of the logarithm to base 2, exactly; of 0 undefined."""
    return exponents(numbers).sub_(_EXPONENT_BIAS)
