"""Uses of home rows by how many rows were used more until then: what more or fewer frames would miss.

Frames hold the rows with the highest decayed counts, so a row is missed where at least as many rows as there are frames
have higher ones. One number for each use, its rank before that use, therefore says what every number of frames would
have missed (Mattson, Gecsei, Slutz, Traiger: Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2),
1970). The rank is that among a sample of the rows (``HalfLife``), and the ranks of the past say nothing of rows that
have just appeared, so a curve of counts alone would promise too much.
"""

from __future__ import annotations

import numpy as np
import torch

from flexd.core.fast_memory import FrameCurve

_STEPS_PER_OCTAVE = 4
_UNSEEN = 3e38
"""Above every negated count of a row that has been used, below that of one that has not."""


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
        ordered = torch.sort(counts, descending=True).values
        self._limits = ordered.index_select(0, self._at).neg_().clamp_(max=_UNSEEN)

    def add(self, counts: torch.Tensor, far: torch.Tensor, rows: int) -> None:
        """Count a use of ``rows`` rows.

        Args:
            counts: float32 [n] of the sampled ones among them, before that use.
            far: bool [n], False where the row was used so shortly before that it is kept whatever its count.
        """
        between = torch.searchsorted(self._limits, counts.neg()).mul_(far)
        self._uses.index_add_(0, between, torch.ones_like(between, dtype=torch.float32))
        self._rows += rows

    def curve(self, steps: int, kept: float, frame_bytes: int) -> FrameCurve:
        """Return the misses of a step by frames, and keep a share of what was counted for the next curve.

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
        # The rows of a step that have no frame until its update are read again for it.
        at_once = min(rows, float(self._home_rows))
        bounds = np.union1d(bounds, [at_once] if at_once > 0 else [])
        frames = np.diff(bounds, prepend=0.0)
        middle = bounds - frames / 2
        of = np.searchsorted(self._ranks * self._stride, middle).clip(max=len(self._ranks) - 1)
        width = np.diff(np.append(0, np.minimum(self._ranks * self._stride, self._home_rows)))
        saved = uses[of] * each / np.maximum(width[of], 1.0) + (middle < at_once)
        frames, saved = _descending(frames[frames > 0], saved[frames > 0])
        return FrameCurve(frames, saved, self._home_rows, frame_bytes, float(uses[-1]) * each)


def _descending(frames: np.ndarray, saved: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least curve above these segments whose slopes descend: adjacent segments joined."""
    joined: list[list[float]] = []
    for count, each in zip(frames.tolist(), saved.tolist(), strict=True):
        joined.append([count, each * count])
        while len(joined) > 1 and joined[-1][1] * joined[-2][0] > joined[-2][1] * joined[-1][0]:
            last = joined.pop()
            joined[-1][0] += last[0]
            joined[-1][1] += last[1]
    counts, sums = np.array(joined, dtype=np.float64).reshape(-1, 2).T
    return counts, sums / counts
