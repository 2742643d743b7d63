"""Division of a rank's fast memory, in cache slots of home rows, between its dim-groups.

The misses of a dim-group are a convex curve of its cache slots, so the best division gives each dim-group the cache
slots that save more than one price per byte, at which the budget is spent (Everett: Generalized Lagrange multiplier
method, Operations Research 11(3), 1963). The curves are made of straight segments: taken in the order of their slopes
until the bytes are spent they give that price exactly, without a search.

The half-life of the counts of cache slots is chosen live. The best one depends on how fast popularity moves, which
differs by job and changes. So a sample of the home rows is counted with several half-lives at once, and the one by
which the sample would have missed least is used: a cache is judged by a small one that sees a sample of its rows
(Waldspurger, Saemundsson, Ahmad, Park: Cache modeling and optimization using miniature simulations, USENIX ATC 2017).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexd.core.arrays import Float64Array

CACHE_SLOT_BYTES = 64
"""Of a cache slot beside its row and state: what finds it, and its score."""


@dataclass(frozen=True)
class CacheSlotCurve:
    """Misses of a dim-group's home rows on a rank, by their cache slots.

    Attributes:
        cache_slots: float64[s], of each segment, above 0; together at most ``home_rows``.
        saved: float64[s], misses of a step that each cache slot of the segment saves, descending, at least 0.
        home_rows: most cache slots that there is a row for.
        cache_slot_bytes: of one cache slot.
        cold: misses of a step whatever the cache slots.
    """

    cache_slots: Float64Array
    saved: Float64Array
    home_rows: int
    cache_slot_bytes: int
    cold: float = 0.0

    def misses(self, cache_slots: float) -> float:
        """Return the expected rows that a step reads from slow memory."""
        if cache_slots >= self.home_rows:
            return 0.0
        before = np.cumsum(self.cache_slots) - self.cache_slots
        return self.cold + float(self.saved @ (self.cache_slots - np.clip(cache_slots - before, 0.0, self.cache_slots)))


def proportional_cache_slots(budget_bytes: float, rows: Sequence[int], cache_slot_bytes: Sequence[int]) -> list[int]:
    """Return the cache slots of each dim-group, in proportion to the bytes of its rows; at least one each.

    Args:
        rows: home rows of a rank in each dim-group.
        cache_slot_bytes: of one cache slot of each, with its state and ``CACHE_SLOT_BYTES``.
    """
    share = min(1.0, budget_bytes / max(1, sum(n * size for n, size in zip(rows, cache_slot_bytes, strict=True))))
    return [min(n, max(1, int(n * share))) for n in rows]


def divide_cache_slots(curves: Sequence[CacheSlotCurve], budget_bytes: float) -> list[int]:
    """Return the cache slots of each dim-group that miss least by these curves, but for one of each: all have one.

    Bytes that would save nothing go to cache slots in proportion to the rows that are in none, in case the curves are
    wrong.

    Args:
        budget_bytes: of cache slots on a rank; with one that does not hold a cache slot for each dim-group, each has
            one.
    """
    unit = np.array([curve.cache_slot_bytes for curve in curves], dtype=np.float64)
    most = np.array([curve.home_rows for curve in curves], dtype=np.int64)
    of = np.repeat(np.arange(len(curves)), [len(curve.cache_slots) for curve in curves])
    worth = np.concatenate([curve.saved / curve.cache_slot_bytes for curve in curves])
    order = np.argsort(-worth, kind="stable")
    order = order[worth[order] > 0]
    of = of[order]
    size = np.concatenate([curve.cache_slots for curve in curves])[order] * unit[of]
    taken = np.clip(budget_bytes - float(unit.sum()) - (np.cumsum(size) - size), 0.0, size)
    bought = np.floor(np.bincount(of, weights=taken, minlength=len(curves)) / unit + 1e-9).astype(np.int64)
    whole = np.minimum(1 + bought, most)
    left, missing = budget_bytes - float(whole @ unit), most - whole
    if left > 0 and missing.any():
        whole += np.floor(missing * min(1.0, left / float(missing @ unit))).astype(np.int64)
    return [int(count) for count in whole]


def total_misses(curves: Sequence[CacheSlotCurve], cache_slots: Sequence[int]) -> float:
    return sum(curve.misses(count) for curve, count in zip(curves, cache_slots, strict=True))


HALF_LIVES = (1.0, 4.0, 16.0, 64.0)
"""In rows used for each cache slot, so that a larger fast memory, whose rows are used more rarely, remembers as much
longer as it must (TinyLFU's sample is as many times its cache: Einziger, Friedman, Manes, ACM TOS 13(4), 2017)."""
FIRST = 2
"""The half-life of the beginning."""
_SAMPLED_CACHE_SLOTS = 2048
_LEAST_SAMPLED_ROWS, _MAX_SAMPLED_ROWS = 1 << 8, 1 << 17
# Half-life of the misses that are compared, in the same unit.
_MEMORY = 16.0
# A half-life is left for one that misses less by this share.
_GAIN = 0.005
# Between two choices, in the same unit.
_EVERY = 0.25
_SPREAD, _MODULUS = 2_654_435_761, 1 << 32


_STEPS_PER_OCTAVE = 4
# Above every negated count of a row that has been used, below that of one that has not.
_UNSEEN = 3e38


class UseRanks:
    """Counts the uses of sampled home rows between limits of their ranks. Not thread-safe.

    Args:
        sampled: rows of the sample.
        stride: home rows for each of them.
    """

    def __init__(self, sampled: int, stride: int, home_rows: int, device: torch.device) -> None:
        octaves = np.arange(_STEPS_PER_OCTAVE * (max(1, sampled).bit_length() + 1)) / _STEPS_PER_OCTAVE
        self._ranks = np.unique(np.append(np.minimum(np.ceil(2.0**octaves).astype(np.int64), sampled), sampled))
        self._stride, self._home_rows = stride, home_rows
        self._at = torch.from_numpy(self._ranks - 1).to(device)
        self._limits = torch.full((len(self._ranks),), _UNSEEN, device=device)
        self._uses = torch.zeros(len(self._ranks) + 1, device=device)
        self._rows = self._steps = 0.0

    @property
    def nbytes(self) -> int:
        return self._at.nbytes + self._limits.nbytes + self._uses.nbytes

    def set_counts(self, counts: torch.Tensor) -> None:
        """Set float32 [sampled], the counts that ranks are among from now on; -inf of a row that was never used."""
        self._limits = torch.sort(counts, descending=True).values.index_select(0, self._at).neg_().clamp_(max=_UNSEEN)

    def add(self, counts: torch.Tensor, far: torch.Tensor, rows: int) -> None:
        """Count a use of ``rows`` rows.

        Args:
            counts: float32 [n] of the sampled ones among them, before that use.
            far: bool [n], False where the row was used so shortly before that it is kept whatever its count.
        """
        between = torch.searchsorted(self._limits, counts.neg()).mul_(far)
        self._uses.index_add_(0, between, torch.ones_like(between, dtype=torch.float32))
        self._rows += rows

    def curve(self, steps: int, kept: float, cache_slot_bytes: int) -> CacheSlotCurve:
        """Return the misses of a step by cache slots, and keep a share of what was counted for the next curve.

        The host waits for the device.

        Args:
            steps: since the curve before.
            kept: share of the uses so far that counts on.
        """
        uses = self._uses.cpu().numpy().astype(np.float64)
        self._steps += steps
        each = self._stride / max(1.0, self._steps)
        rows = self._rows / max(1.0, self._steps)
        self._uses.mul_(kept)
        self._rows, self._steps = self._rows * kept, self._steps * kept
        bounds = np.minimum(self._ranks * self._stride, self._home_rows).astype(np.float64)
        bounds[-1] = self._home_rows
        # The rows of a step that have no cache slot until its update are read again for it.
        at_once = min(rows, float(self._home_rows))
        bounds = np.union1d(bounds, [at_once] if at_once > 0 else [])
        cache_slots = np.diff(bounds, prepend=0.0)
        middle = bounds - cache_slots / 2
        of = np.searchsorted(self._ranks * self._stride, middle).clip(max=len(self._ranks) - 1)
        width = np.diff(np.append(0, np.minimum(self._ranks * self._stride, self._home_rows)))
        saved = uses[of] * each / np.maximum(width[of], 1.0) + (middle < at_once)
        cache_slots, saved = _descending(cache_slots[cache_slots > 0], saved[cache_slots > 0])
        return CacheSlotCurve(cache_slots, saved, self._home_rows, cache_slot_bytes, float(uses[-1]) * each)


def _descending(cache_slots: np.ndarray, saved: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least curve above these segments whose slopes descend: adjacent segments joined."""
    joined: list[list[float]] = []
    for count, each in zip(cache_slots.tolist(), saved.tolist(), strict=True):
        joined.append([count, each * count])
        while len(joined) > 1 and joined[-1][1] * joined[-2][0] > joined[-2][1] * joined[-1][0]:
            last = joined.pop()
            joined[-1][0] += last[0]
            joined[-1][1] += last[1]
    counts, sums = np.array(joined, dtype=np.float64).reshape(-1, 2).T
    return counts, sums / counts


class HalfLife:
    """The clock by which counts decay: it runs faster where a shorter half-life is better. Not thread-safe.

    A count that decays forward needs no change when the half-life changes: from then on the clock runs at another rate.

    Args:
        rows: home rows; a block of ``stride`` of them has one row of the sample.

    Attributes:
        cache_slots: number of them now.
        clock: in half-lives.
        chosen: place in ``HALF_LIVES``.
        ranks: uses by their ranks, by the counts with the chosen half-life.
    """

    def __init__(self, cache_slots: int, rows: int, device: torch.device) -> None:
        self.clock, self.chosen = 0.0, FIRST
        self.cache_slots = cache_slots
        most = max(_LEAST_SAMPLED_ROWS, min(cache_slots // 4, _MAX_SAMPLED_ROWS))
        self._stride = max(1, cache_slots // _SAMPLED_CACHE_SLOTS, -(-rows // most))
        sampled = -(-rows // self._stride)
        self._counts = torch.full((len(HALF_LIVES), sampled), -torch.inf, device=device)
        self._last = torch.full((sampled,), -(1 << 30), dtype=torch.int32, device=device)
        self._limits = torch.full((len(HALF_LIVES), 1), -torch.inf, device=device)
        self._missed = torch.zeros(len(HALF_LIVES), dtype=torch.float64, device=device)
        self._half_lives = torch.tensor(HALF_LIVES, device=device)[:, None]
        self.ranks = UseRanks(sampled, self._stride, rows, device)
        self._filled = self._next_choice = 0.0
        self._step = 0

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes + self._last.nbytes + self.ranks.nbytes

    def use(self, slots: torch.Tensor, ahead: int) -> float:
        """Count one use of int64 [n] distinct home rows by a look-up; return the clock.

        Args:
            ahead: batches after this one that are known: rows used so shortly ago are kept whatever their count.
        """
        fillings = len(slots) / self.cache_slots
        self._filled += fillings
        self._step += 1
        block = slots.div(self._stride, rounding_mode="floor")
        sampled = block * self._stride + (block * _SPREAD % _MODULUS >> 8) % self._stride
        at = block[sampled == slots]
        known = self._counts[:, at]
        far = self._last[at] < self._step - 1 - ahead
        self.ranks.add(known[self.chosen], far, len(slots))
        missed = ((known < self._limits) & far).sum(dim=1)
        self._missed.mul_(2.0 ** (-fillings / _MEMORY)).add_(missed)
        self._counts[:, at] = torch.logaddexp2(known, self._filled / self._half_lives.expand(-1, len(at)))
        self._last[at] = self._step
        if self._filled >= self._next_choice:
            self._next_choice = self._filled + _EVERY
            self._choose(ahead)
        self.clock += fillings / HALF_LIVES[self.chosen]
        return self.clock

    def _choose(self, ahead: int) -> None:
        """Choose the half-life with the fewest misses, and find the counts of the rows that are in cache slots at
        last."""
        missed = self._missed.tolist()
        best = min(range(len(missed)), key=missed.__getitem__)
        if missed[best] < (1 - _GAIN) * missed[self.chosen]:
            self.chosen = best
        self.ranks.set_counts(self._counts[self.chosen])
        cache_slots = max(1, self.cache_slots // self._stride)
        if cache_slots >= self._counts.shape[1]:
            self._limits.fill_(-torch.inf)
            return
        kept = torch.where(self._last >= self._step - ahead, torch.inf, self._counts)
        self._limits = torch.topk(kept, cache_slots, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
