"""The protocol of tables of unbounded ids in plain Python: one id after another, in one process."""

from dataclasses import dataclass, field

import torch

from flexd.embedding.ids.id_sets import SLOTS

_MASK = 2**64 - 1
_SALT = 0x517CC1B727220A95


def mixed(number: int) -> int:
    """SplitMix64 (Steele, Lea, Flood) of a number of 64 bits."""
    x = (number + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass
class Slot:
    id: int
    last: int
    uses: int
    since: int


@dataclass
class PlainSet:
    slots: int
    used: dict[int, Slot] = field(default_factory=dict)
    filters: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    turn: int = 0
    held: int = 0

    def slot_of(self, number: int) -> int | None:
        return next((at for at, slot in self.used.items() if slot.id == number), None)


class PlainIds:
    """The rows of one table's ids.

    Attributes:
        look_ups: for training; halved as in flexd after 1,024 steps.
        own, admitted, evicted, refused, pinned: counts as in ``slot_table.COUNTS``.
    """

    def __init__(self, rows: int, admit_after: int) -> None:
        self.shared = rows - 1
        self.admit_after = admit_after
        self.number_of_sets = -(-self.shared // SLOTS)
        self.sets = [PlainSet(len(range(at, self.shared, self.number_of_sets))) for at in range(self.number_of_sets)]
        self.step = self.steps = self.look_ups = 0
        self.own = self.admitted = self.evicted = self.refused = self.pinned = 0

    def find(self, number: int) -> int | None:
        """Return the row of an id; None: it has none."""
        at = (mixed(number & _MASK) >> 1) % self.number_of_sets
        slot = self.sets[at].slot_of(number)
        return None if slot is None else slot * self.number_of_sets + at

    def is_fresh(self, number: int) -> bool:
        at = (mixed(number & _MASK) >> 1) % self.number_of_sets
        slot = self.sets[at].slot_of(number)
        return slot is not None and self.sets[at].used[slot].since == self.step

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return int64 [n] rows of ids, those without a row of their own the shared one."""
        found = [self.find(number) for number in numbers.tolist()]
        return torch.tensor([self.shared if row is None else row for row in found], dtype=torch.int64)

    def fresh(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return bool [n]: ids that were admitted in this step."""
        return torch.tensor([self.is_fresh(number) for number in numbers.tolist()], dtype=torch.bool)

    def ids(self) -> dict[int, int]:
        """Return the id of each row that has one."""
        return {
            slot * self.number_of_sets + at: used.id
            for at, one in enumerate(self.sets)
            for slot, used in one.used.items()
        }

    def look_up(self, counts: dict[int, int], *, new_step: bool) -> list[int]:
        """Decide about the ids of a look-up for training; return the rows that begin anew.

        Args:
            counts: look-ups by id, over all ranks.
            new_step: the optimizer has stepped since the last one.
        """
        if new_step or not self.step:
            self.step += 1
            self.steps += 1
        self.look_ups += sum(counts.values())
        bonus = max(1, 2 * self.shared * self.steps // max(1, self.look_ups))
        begun: list[int] = []
        by_set: dict[int, list[int]] = {}
        for number in sorted(counts):
            by_set.setdefault((mixed(number & _MASK) >> 1) % self.number_of_sets, []).append(number)
        for at, numbers in by_set.items():
            begun += [slot * self.number_of_sets + at for slot in self._in_set(self.sets[at], numbers, counts, bonus)]
        return begun

    def _in_set(self, one: PlainSet, numbers: list[int], counts: dict[int, int], bonus: int) -> list[int]:
        resident = {number: slot for number in numbers if (slot := one.slot_of(number)) is not None}
        for number, slot in resident.items():
            self.own += counts[number] * (one.used[slot].since != self.step)
            one.used[slot].last = self.step
            one.used[slot].uses += counts[number]
        begun, refused = [], []
        for number in numbers:
            if number in resident:
                continue
            if self.admit_after == 2 and counts[number] < 2 and not any(self._bits(number) <= f for f in one.filters):
                refused.append(number)
                continue
            free = [slot for slot in range(one.slots) if slot not in one.used]
            unpinned = [slot for slot in one.used if one.used[slot].last < self.step - 1]
            if not free and not unpinned:
                self.pinned += 1
                continue
            slot = min(free) if free else min(unpinned, key=lambda at: (self._score(one.used[at], bonus), at))
            self.evicted += slot in one.used
            self.admitted += 1
            one.used[slot] = Slot(number, self.step, counts[number], self.step)
            begun.append(slot)
        self.refused += len(refused)
        for number in refused:
            one.filters[one.turn].update(self._bits(number))
        one.held += len(refused)
        if one.held >= 4 * one.slots:
            one.turn, one.held = 1 - one.turn, 0
            one.filters[one.turn].clear()
        return begun

    @staticmethod
    def _score(slot: Slot, bonus: int) -> int:
        return slot.last + bonus * (slot.uses.bit_length() - 1)

    @staticmethod
    def _bits(number: int) -> set[int]:
        word = mixed((number & _MASK) ^ _SALT)
        return {word >> shift & 2047 for shift in (0, 16, 32, 48)}
