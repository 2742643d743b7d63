"""Which rows are in the cache slots of fast memory, and which leave when others come in.

Out goes the row whose next use is farthest, as far as batches ahead are known, and among the rows not seen ahead the
one with the lowest decayed count of uses. Decay is *forward* (Cormode, Shkapenyuk, Srivastava, Xu: Forward decay, ICDE
2009): counts grow with the step of a use instead of falling with time, so the order of two rows changes only when one
of them is used. So the rows that leave next are found once for many steps, and a step costs what it brings in.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch

from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.key_table import BucketTable

# Scores of rows with a known next use begin here, above every count.
_AHEAD = 1e12
# The cache slots that leave next are found for so many parts of all cache slots at a time.
_QUEUE_SHARE = 16


@dataclass(frozen=True)
class Leaving:
    """Rows that lose their cache slots, and what of them must be written before these are used.

    Attributes:
        slots: int64 [l] slots of all of them.
        changed: int64 [e] slots of those that were changed in fast memory.
        cache_slots: int64 [e], their cache slots.
        counts: float64 [e], log2 of their decayed counts, to give back when they come in again.
    """

    slots: torch.Tensor
    changed: torch.Tensor
    cache_slots: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class Arrivals:
    """Cache slots of the rows of one batch.

    Attributes:
        cache_slots: int64 [n] of the slots asked for.
        missing: int64 [m] places among these whose rows must be read into their cache slots.
        leaving: the rows that were in cache slots which the missing take over.
    """

    cache_slots: torch.Tensor
    missing: torch.Tensor
    leaving: Leaving


class CacheSlotTable:
    """Maps slots to cache slots. Not thread-safe.

    Args:
        cache_slots: number of cache slots.
        max_slot: slots lie in [0, max_slot].
    """

    def __init__(self, cache_slots: int, max_slot: int, device: torch.device) -> None:
        self._table = BucketTable(cache_slots, max_slot, device)
        self._max_slot = max_slot
        self._slots = torch.full((cache_slots,), -1, dtype=torch.int64, device=device)
        self._counts = torch.full((cache_slots,), -math.inf, dtype=torch.float64, device=device)
        self._scores = torch.full((cache_slots,), -math.inf, dtype=torch.float64, device=device)
        self._pins = torch.zeros(cache_slots, dtype=torch.int16, device=device)
        self._changed = torch.zeros(cache_slots, dtype=torch.bool, device=device)
        self._used = 0
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._queue, self._queue_scores, self._head = none, none.to(torch.float64), 0
        self._cut = -math.inf
        self._rescored: list[torch.Tensor] = []

    def __len__(self) -> int:
        """Number of rows in cache slots."""
        return len(self._table)

    @property
    def cache_slots(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        own = (self._slots, self._counts, self._scores, self._pins, self._changed, self._queue, self._queue_scores)
        return self._table.nbytes + sum(tensor.nbytes for tensor in (*own, *self._rescored))

    def find(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 [n] slots -> int64 [n] cache slots, -1 where a row is in none."""
        return (
            self._table.values_of(slots, torch.tensor(self.cache_slots, dtype=torch.int32, device=slots.device))
            .to(torch.int64)
            .add_(1)
            .remainder_(self.cache_slots + 1)
            .sub_(1)
        )

    def bring(self, slots: torch.Tensor) -> Arrivals:
        """Give int64 [n] distinct slots cache slots, and keep these until ``release``.

        Raises:
            SlowMemoryError: fewer cache slots are free of kept rows than rows are missing; nothing has changed then.
        """
        cache_slots = self.find(slots)
        missing = (cache_slots < 0).nonzero().view(-1)
        held = cache_slots[cache_slots >= 0]
        self._pins.index_add_(0, held, torch.ones_like(held, dtype=torch.int16))
        try:
            taken = self._take(len(missing))
        except SlowMemoryError:
            self.release(held)
            raise
        leaving = self._leaving(taken[self._slots.index_select(0, taken) >= 0])
        if len(leaving.slots):
            self._table.remove(self._table.find(leaving.slots)[1])
        come = slots.index_select(0, missing)
        self._table.insert(come, taken.to(torch.int32))
        self._slots.index_copy_(0, taken, come)
        self._changed.index_fill_(0, taken, False)
        self._counts.index_fill_(0, taken, -math.inf)
        self._pins.index_fill_(0, taken, 1)
        return Arrivals(cache_slots.index_copy_(0, missing, taken), missing, leaving)

    def _leaving(self, gone: torch.Tensor) -> Leaving:
        changed = gone[self._changed.index_select(0, gone)]
        return Leaving(
            self._slots.index_select(0, gone), self._slots.index_select(0, changed), changed,
            self._counts.index_select(0, changed),
        )  # fmt: skip

    def resized(self, cache_slots: int) -> tuple[CacheSlotTable, torch.Tensor, Leaving]:
        """Return (a table of so many cache slots with the rows that would leave last; int64 [k] ascending cache slots,
        of which its cache slot i has what number i had; the other rows). This one must not be used any more.

        Raises:
            SlowMemoryError: rows are in use; nothing has changed then.
        """
        if bool(self._pins.any()):
            raise SlowMemoryError("cache slots whose rows are in use", remedy="change their number between two steps")
        device, used = self._slots.device, self._used
        if used > cache_slots:
            kept = torch.topk(self._scores[:used], cache_slots, sorted=False).indices.sort().values
        else:
            kept = torch.arange(used, device=device)
        goes = torch.ones(used, dtype=torch.bool, device=device).index_fill_(0, kept, False)
        table = CacheSlotTable(cache_slots, self._max_slot, device)
        table._used = len(kept)
        for of_old, of_new in (
            (self._slots, table._slots), (self._counts, table._counts), (self._scores, table._scores),
            (self._changed, table._changed),
        ):  # fmt: skip
            of_new[: len(kept)] = of_old.index_select(0, kept)
        table._table.insert(table._slots[: len(kept)], torch.arange(len(kept), dtype=torch.int32, device=device))
        return table, kept, self._leaving(goes.nonzero().view(-1))

    def release(self, cache_slots: torch.Tensor) -> None:
        """Let the rows of int64 [n] distinct cache slots leave again; once for each ``bring`` of them."""
        self._pins.index_add_(0, cache_slots, torch.full_like(cache_slots, -1, dtype=torch.int16))

    def changed(self, cache_slots: torch.Tensor) -> None:
        """Note that the rows in int64 [n] cache slots differ from what is in slow memory."""
        self._changed.index_fill_(0, cache_slots, True)

    def slots_at(self, cache_slots: torch.Tensor) -> torch.Tensor:
        """int64 [n] cache slots in use -> int64 [n] slots."""
        return self._slots.index_select(0, cache_slots)

    def remember(self, cache_slots: torch.Tensor, counts: torch.Tensor) -> None:
        """Give the rows in int64 [n] cache slots, which have just come in, the float64 [n] counts with which they
        left, -inf where there is none."""
        self._counts.index_copy_(0, cache_slots, counts)
        self._score(cache_slots, counts)

    def use(self, cache_slots: torch.Tensor, clock: float, *, ahead: torch.Tensor | None = None) -> None:
        """Count a use of the rows in int64 [n] distinct cache slots.

        Args:
            clock: in half-lives of counts; never lower than before.
            ahead: int64 [n], the step of the next use that is known, 0 where none is.
        """
        old = self._counts.index_select(0, cache_slots)
        count = torch.logaddexp2(old, torch.tensor(clock, dtype=torch.float64, device=cache_slots.device))
        self._counts.index_copy_(0, cache_slots, count)
        self._score(
            cache_slots, count if ahead is None else torch.where(ahead > 0, _AHEAD - ahead.to(torch.float64), count)
        )

    def expect(self, cache_slots: torch.Tensor, step: int) -> None:
        """Note that the rows in int64 [n] distinct cache slots will be used at a step, farther than any noted
        before."""
        of_now = self._scores.index_select(0, cache_slots)
        self._score(cache_slots, torch.where(of_now > _AHEAD / 2, of_now, _AHEAD - step))

    def pass_over(self, cache_slots: torch.Tensor, step: int, following: torch.Tensor) -> None:
        """Note that the rows in int64 [n] distinct cache slots are not used at a step any more.

        Args:
            following: int64 [n], the step of the next use that is known, 0 where none is.
        """
        noted = self._scores.index_select(0, cache_slots) == _AHEAD - step
        cache_slots, following = cache_slots[noted], following[noted]
        counts = self._counts.index_select(0, cache_slots)
        self._score(cache_slots, torch.where(following > 0, _AHEAD - following.to(torch.float64), counts))

    def _score(self, cache_slots: torch.Tensor, scores: torch.Tensor) -> None:
        self._scores.index_copy_(0, cache_slots, scores)
        low = cache_slots[scores <= self._cut]
        if len(low):
            self._rescored.append(low)

    def _take(self, count: int) -> torch.Tensor:
        """Return int64 [count] cache slots: free ones, then those with the lowest scores."""
        free = min(count, self.cache_slots - self._used)
        taken = torch.arange(self._used, self._used + free, device=self._slots.device)
        if free < count:
            taken = torch.cat([taken, self._lowest(count - free)])
        self._used += free
        return taken

    def _lowest(self, count: int) -> torch.Tensor:
        """Return the cache slots with the lowest scores that are not kept, ascending."""
        found = self._from_queue(count)
        if found is None:
            self._rebuild(count)
            found = self._from_queue(count)
        if found is None:
            kept = int((self._pins > 0).sum())
            raise SlowMemoryError(
                f"of {self.cache_slots} cache slots of fast memory {kept} hold rows in use: {count} more are not free",
                remedy="give fast_memory_bytes for the rows of one batch at least, or look fewer batches ahead",
            )
        return found

    def _from_queue(self, count: int) -> torch.Tensor | None:
        """Return the lowest of the queue and of the cache slots that were rescored since it was made; None if too
        few."""
        rescored = _distinct(self._rescored) if self._rescored else self._queue[:0]
        rescored = rescored[self._scores.index_select(0, rescored) <= self._cut]
        candidates = rescored[self._pins.index_select(0, rescored) == 0]
        head, reach = self._head, self._head + 2 * count + 64
        while True:
            segment = self._queue[head:reach]
            same = self._scores.index_select(0, segment) == self._queue_scores[head:reach]
            places = (same & (self._pins.index_select(0, segment) == 0)).nonzero().view(-1)[:count]
            if len(places) == count or reach >= len(self._queue):
                break
            reach = head + 2 * (reach - head)
        cache_slots = _distinct([candidates, segment.index_select(0, places)])
        if len(cache_slots) < count:
            return None
        taken = cache_slots.index_select(0, self._scores.index_select(0, cache_slots).argsort(stable=True)[:count])
        self._scores.index_fill_(0, taken, math.inf)
        # What stays of the part of the queue that was looked through: kept rows, and those above what was taken.
        passed = int(places[-1]) + 1 if len(places) else 0
        self._head = head + passed
        left = torch.cat([rescored, segment[:passed][same[:passed]]])
        left = left[self._scores.index_select(0, left) <= self._cut]
        self._rescored = [left] if len(left) else []
        return taken

    def _rebuild(self, count: int) -> None:
        used = self._scores[: self._used]
        kept = self._pins[: self._used] > 0
        number = min(int((~kept).sum()), max(8 * count, self._used // _QUEUE_SHARE))
        lowest = torch.topk(torch.where(kept, math.inf, used), number, largest=False, sorted=True)
        self._queue, self._queue_scores, self._head = lowest.indices, lowest.values, 0
        self._cut = float(lowest.values[-1]) if number else -math.inf
        below = (kept & (used <= self._cut)).nonzero().view(-1)
        self._rescored = [below] if len(below) else []


def _distinct(parts: list[torch.Tensor]) -> torch.Tensor:
    distinct: torch.Tensor = torch.cat(parts).unique()  # type: ignore[no-untyped-call]
    return distinct


class LookAhead:
    """Batches that are known, numbered from 1. Not thread-safe.

    Attributes:
        table: that has the scores of the rows.
        present: number of the batch whose rows are being fetched; 0 before the first.
    """

    def __init__(self, table: CacheSlotTable) -> None:
        self.table = table
        self._known: deque[tuple[int, torch.Tensor]] = deque()
        self._last = 0
        self.present = 0

    @property
    def known(self) -> int:
        """Number of batches after the present one that are known."""
        return self._last - self.present

    @property
    def nbytes(self) -> int:
        return sum(slots.nbytes for _, slots in self._known)

    def add(self, slots: torch.Tensor) -> None:
        """Add the batch after the last one that is known: int64 [n] ascending slots that it looks up."""
        self._last += 1
        self._known.append((self._last, slots))
        cache_slots = self.table.find(slots)
        self.table.expect(cache_slots[cache_slots >= 0], self._last)

    def begin(self, passes_kept: int) -> None:
        """Begin to fetch the next batch; rows of batches before it that no update needs any more are released.

        Args:
            passes_kept: batches before it whose rows an update still needs.
        """
        self.present += 1
        self._last = max(self._last, self.present)
        while self._known and self._known[0][0] < self.present - passes_kept:
            number, slots = self._known.popleft()
            cache_slots = self.table.find(slots)
            held = cache_slots >= 0
            self.table.pass_over(cache_slots[held], number, self._next_use(slots[held]))

    def end(self) -> None:
        """Forget all batches."""
        while self._known:
            number, slots = self._known.popleft()
            cache_slots = self.table.find(slots)
            cache_slots = cache_slots[cache_slots >= 0]
            self.table.pass_over(cache_slots, number, torch.zeros_like(cache_slots))
        self.present = self._last

    def use_of(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return for int64 [n] slots that are looked up now the number of the present batch, 0 for those that it was
        not known to look up; None if no batch is known."""
        for number, known in self._known:
            if number == self.present:
                return torch.where(_are_in(slots, known), number, 0)
        return None

    def _next_use(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 [n] slots -> int64 [n] the next batch that looks each up, 0 where none is known."""
        following = torch.zeros_like(slots)
        for number, known in reversed(self._known):
            following = torch.where(_are_in(slots, known), number, following)
        return following


def _are_in(slots: torch.Tensor, ascending: torch.Tensor) -> torch.Tensor:
    if not len(ascending):
        return torch.zeros_like(slots, dtype=torch.bool)
    return ascending.index_select(0, torch.searchsorted(ascending, slots).clamp_(max=len(ascending) - 1)) == slots
