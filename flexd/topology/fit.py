"""Fit a curve to measured times: latency from the small messages, then bandwidth at each size from the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.topology.cluster import CollectiveCurve

Float64Array = npt.NDArray[np.float64]

_LATENCY_BOUND = 2.0
"""Messages that take at most this many times as long as the smallest one determine the latency."""
_RESOLVED = 0.05
"""Below this share of the latency the time of the bytes cannot be distinguished from noise."""
_STEP = 1e-5
"""Least relative increase of the bytes' time from one size to the next: keeps curves valid when figures are rounded."""
_DIGITS = 7
_LEAST_SECONDS = 1e-9


@dataclass(frozen=True)
class CollectiveTimes:
    """Measured times of one collective on one link.

    Attributes:
        message_bytes: float64[k], bytes that a rank sends over the link, ascending.
        seconds: k arrays float64[r], of one collective in each repetition; r may differ from size to size.
    """

    message_bytes: Float64Array
    seconds: tuple[Float64Array, ...]

    @property
    def medians(self) -> Float64Array:
        """float64[k] seconds."""
        return np.array([float(np.median(times)) for times in self.seconds])

    @property
    def spread(self) -> Float64Array:
        """float64[k]: distance of the quartiles as a share of the median."""
        quartiles = np.array([np.percentile(times, (25, 75)) for times in self.seconds])
        share: Float64Array = (quartiles[:, 1] - quartiles[:, 0]) / self.medians
        return share


def fit_curve(times: CollectiveTimes) -> CollectiveCurve:
    """Return the curve through the medians.

    - A size that took longer than a larger one was disturbed (a disturbance only adds time), so it gets the larger
      one's time.
    - Latency: the intercept at zero bytes of the times of the small messages, up to twice the smallest one's time
      (Theil-Sen: the median of the slopes between all pairs, so that one bad size does not tilt it).
    - Bandwidth at a size: its bytes over its time without the latency. A size at which that time cannot be
      distinguished from noise gives no point; the first point's bandwidth applies to it.
    """
    sizes = times.message_bytes
    seconds = np.minimum.accumulate(times.medians[::-1])[::-1]
    latency = _latency(sizes, seconds)
    moving = seconds - latency
    resolved = moving > np.maximum(_RESOLVED * latency, _LEAST_SECONDS)
    if not resolved.any():
        # All of it is latency. The largest size bounds the bandwidth from below.
        sizes, moving = sizes[-1:], np.array([max(moving[-1], _RESOLVED * latency, _LEAST_SECONDS)])
    else:
        first = int(np.argmax(resolved))
        sizes, moving = sizes[first:], moving[first:]
    rise = (1.0 + _STEP) ** np.arange(len(sizes))
    moving = np.maximum.accumulate(moving / rise) * rise
    points = tuple((float(size), _rounded(size / time)) for size, time in zip(sizes, moving, strict=True))
    return CollectiveCurve(_rounded(latency), points)


def _latency(sizes: Float64Array, seconds: Float64Array) -> float:
    """Return the seconds of an empty message, between 0 and the smallest message's time."""
    count = max(int(np.searchsorted(seconds, _LATENCY_BOUND * seconds[0], side="right")), min(2, len(sizes)))
    size, time = sizes[:count], seconds[:count]
    if count == 1:
        return float(time[0])
    i, j = np.triu_indices(count, 1)
    slope = float(np.median((time[j] - time[i]) / (size[j] - size[i])))
    return float(np.clip(np.median(time - slope * size), 0.0, seconds[0]))


def _rounded(value: float) -> float:
    """Round to a number of digits that is readable in a file."""
    return float(f"{value:.{_DIGITS}g}")
